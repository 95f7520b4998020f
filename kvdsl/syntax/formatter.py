"""The canonical layout of a file, as `kvdsl fmt` writes it.

- Two spaces a level, one statement a line. `policy Full {}` and other one-line blocks stay on one line if they fit.
- At most one empty line in a row, none at a block's ends, one above and below a block of several lines.
- In runs of lines, the `=` of params and lets align, and so does the text after a statement's first word, if the widths
  before them differ by at most three characters. Comments after such lines always align.
- A statement longer than `WIDTH` is broken inside its parentheses (`kvdsl.syntax.wrapping`).
- Comments, strings, numbers and parentheses stay as written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvdsl.diagnostics import Sink
from kvdsl.source import SourceFile
from kvdsl.syntax.comments import Block, Entry, read_entries
from kvdsl.syntax.parser import parse
from kvdsl.syntax.reader import normalized
from kvdsl.syntax.shape import parse_module
from kvdsl.syntax.wrapping import INDENT, WIDTH, flat, has_comments, wrapped

_SPREAD = 3


def format_source(source: SourceFile, sink: Sink) -> str | None:
    """Return the text in its canonical layout, or None after a report of a syntax error.

    Formatting is idempotent and keeps all tokens and comments.
    """
    parse_module(source, sink)
    if sink.failed():
        return None
    before = parse(source, sink)
    text = "".join(f"{line}\n" for line in _lines(read_entries(source, before), 0, ""))
    after = normalized(SourceFile(source.name, text, source.path), sink)
    if after is None:  # with indentation it is larger than a policy can be
        return None
    parsed = parse(after, sink)
    kept = (parsed.tree, len(parsed.comments)) == (before.tree, len(before.comments))
    assert kept, "formatting would change tokens or comments"
    return text


# -- entries -----------------------------------------------------------------------------------------------------------


@dataclass
class _Rendered:
    """An entry's lines, with what its neighbours need.

    Attributes:
        comment: the comment still to be placed after the last line.
        kind: entries of one kind align; empty for entries that do not align.
        head: the text before the column of alignment.
        rest: the text after it.
    """

    entry: Entry
    lines: list[str]
    comment: str = ""
    kind: str = ""
    head: str = ""
    rest: str = ""

    @property
    def several(self) -> bool:
        """Whether the entry is a block of several lines."""
        return self.entry.block is not None and len(self.lines) > 1


def _lines(block: Block, level: int, owner: str) -> Iterator[str]:
    """Yield the lines of a block's entries; `owner` is the type of its statement's first word."""
    entries = [_rendered(entry, level, owner) for entry in block.entries]
    if level == 0:
        _set_apart(entries)
    for run in _runs(entries, _align_together):
        _align(run)
    for run in _runs(entries, _comment_together):
        _put_comments(run)
    for index, one in enumerate(entries):
        if one.entry.blank and index:
            yield ""
        yield from one.lines


def _rendered(entry: Entry, level: int, owner: str) -> _Rendered:
    indent = " " * (INDENT * level)
    if not entry.pieces:
        return _Rendered(entry, [indent + entry.comment])
    found = _Rendered(entry, _statement(entry, level), entry.comment)
    if len(found.lines) == 1 and entry.block is None:
        found.kind, at = _alignment(entry, owner)
        found.head, found.rest = indent + flat(entry.pieces[:at]), flat(entry.pieces[at:])
    return found


def _statement(entry: Entry, level: int) -> list[str]:
    """Return the lines of a statement without the comment after it."""
    indent = " " * (INDENT * level)
    inline = _inline(entry)
    if inline is not None and len(indent + inline) <= WIDTH:
        return [indent + inline]
    if entry.block is None:
        return [line for text in wrapped(entry.pieces, indent) for line in text.split("\n")]
    opening = indent + flat(entry.pieces) + " {" + (f"  {entry.block.behind}" if entry.block.behind else "")
    return [opening, *_lines(entry.block, level + 1, entry.kind), f"{indent}}}"]


def _inline(entry: Entry) -> str | None:
    """Return the statement on one line, or None if it needs several."""
    if has_comments(entry.pieces) or any("\n" in piece.text for piece in entry.pieces):
        return None
    text = flat(entry.pieces)
    if entry.block is None:
        return text
    if entry.block.behind or (entry.block.entries and not entry.block.one_line):
        return None
    inner = [_inline(one) for one in entry.block.entries]
    if None in inner:
        return None
    return f"{text} {{ {'; '.join(map(str, inner))} }}" if inner else f"{text} {{}}"


def _set_apart(entries: list[_Rendered]) -> None:
    """Put an empty line above and below each block of several lines; a comment right above belongs to it."""
    for index, one in enumerate(entries):
        if not one.several:
            continue
        first = index
        while first > 0 and not entries[first - 1].entry.pieces and not entries[first].entry.blank:
            first -= 1
        entries[first].entry.blank = True
        if index + 1 < len(entries):
            entries[index + 1].entry.blank = True


# -- alignment ---------------------------------------------------------------------------------------------------------


def _alignment(entry: Entry, owner: str) -> tuple[str, int]:
    """Return the kind of a statement, and the index of the token to align."""
    types = [piece.type for piece in entry.pieces]
    words = types[:2] if entry.kind == "OVERRIDE" else types[:1]
    if words[-1] in ("PARAM", "LET"):
        parameters = types.index("RPAR") if "LPAR" in types[: types.index("EQUAL")] else 0
        return " ".join(words), types.index("EQUAL", parameters)
    if owner != "POLICY" or entry.kind in ("OVERRIDE", "STRING") or len(entry.pieces) == 1:
        return "", 0
    return "STATEMENT", 1


Run = list[_Rendered]


def _runs(entries: list[_Rendered], together: Callable[[Run, _Rendered], bool]) -> list[Run]:
    """Split entries into runs: each entry fits `together` with those right above it."""
    runs: list[Run] = []
    for one in entries:
        if runs and not one.entry.blank and together(runs[-1], one):
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def _align_together(run: Run, one: _Rendered) -> bool:
    widths = [len(other.head) for other in (*run, one)]
    return bool(one.kind) and one.kind == run[-1].kind and max(widths) - min(widths) <= _SPREAD


def _align(run: Run) -> None:
    width = max(len(one.head) for one in run)
    if len(run) > 1 and all(width + 1 + len(one.rest) <= WIDTH for one in run):
        for one in run:
            one.lines = [f"{one.head:<{width}} {one.rest}"]


def _comment_together(run: Run, one: _Rendered) -> bool:
    return all(other.comment and len(other.lines) == 1 for other in (run[-1], one))


def _put_comments(run: Run) -> None:
    width = max(len(one.lines[-1]) for one in run)
    for one in run:
        if one.comment:
            one.lines[-1] = f"{one.lines[-1]:<{width}}  {one.comment}"
