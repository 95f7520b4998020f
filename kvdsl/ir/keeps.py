"""The forms of `keep`, one row each.

The parser, the checker, the printer, `explain`, tests in the language, the documents and the editors read this table.
`kvdsl.interp.settle` says which slots a form protects, and each target names in `CAN` the forms that it has code for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class KeepRow:
    """A form of `keep`, by its word.

    Attributes:
        written: what follows the word: `count` is a number, `by` an expression per slot.
        doc: one line, for the language's reference.
        words: what it protects, for `explain`.
        place: the input that tells an end of the text: the slots where it is below the count. Protected ends leave last, and a query
            always selects them.
        holds: whether `by` is a condition, rather than what slots rank by.
    """

    name: str
    written: str
    doc: str
    words: str
    place: str = ""
    holds: bool = False

    @property
    def parts(self) -> list[str]:
        """The names of its expressions, in order."""
        return re.findall(r"{(\w+)}", self.written)

    @property
    def ranks(self) -> bool:
        """Whether it ranks slots by `by`."""
        return "by" in self.parts and not self.holds


KEEPS = {
    row.name: row
    for row in (
        KeepRow("first", "{count}", "protects the first tokens", "first tokens", place="position"),
        KeepRow("last", "{count}", "protects the last tokens", "last tokens", place="age"),
        KeepRow("top", "{count} by {by}", "protects the tokens with the highest value", "tokens with the highest {by}"),
        KeepRow("where", "{by}", "protects tokens for which the condition holds", "tokens where {by}", holds=True),
    )
}
ENDS = tuple(row.name for row in KEEPS.values() if row.place)
"""The forms that depend on a token's place only."""
