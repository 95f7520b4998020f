"""Read a file's statements and blocks with their comments, which the grammar's tree lacks.

A second pass over the same tokens needs only three rules. Braces hold blocks, separators end statements, and a comment belongs to
the text before it on its line, or else to the text below.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lark import Token

from kvdsl.source import SourceFile
from kvdsl.syntax.parser import Parsed


@dataclass
class Piece:
    """A token. Its comments are those inside parentheses, where a statement may span several lines.

    Attributes:
        above: comments on lines of their own before it.
        behind: the comment on the rest of its line.
    """

    type: str
    text: str
    above: list[str] = field(default_factory=list)
    behind: str = ""


@dataclass
class Block:
    """A block in braces, or the whole file.

    Attributes:
        behind: the comment after the opening brace.
        one_line: whether both braces are on one line.
    """

    entries: list[Entry] = field(default_factory=list)
    behind: str = ""
    one_line: bool = False


@dataclass
class Entry:
    """A statement, or a comment on a line of its own, which has no pieces.

    Attributes:
        pieces: the statement's tokens without its block.
        comment: the comment itself, or the one after the statement.
        blank: whether there is an empty line above.
    """

    pieces: list[Piece] = field(default_factory=list)
    block: Block | None = None
    comment: str = ""
    blank: bool = False

    @property
    def kind(self) -> str:
        """The type of the first token; empty for a comment."""
        return self.pieces[0].type if self.pieces else ""


def read_entries(source: SourceFile, parsed: Parsed) -> Block:
    """Return the entries of a file without syntax errors."""
    return _Reader(source, parsed).run()


class _Reader:
    def __init__(self, source: SourceFile, parsed: Parsed) -> None:
        self.text = source.text
        self.items = sorted([*parsed.tokens, *parsed.comments], key=lambda token: token.start_pos or 0)
        self.root = Block()
        self.following = _following(self.items)
        self.blocks = [self.root]
        self.unfinished: list[
            tuple[Entry, int]
        ] = []  # statements around the innermost block, and the offsets of their blocks
        self.entry: Entry | None = None  # the innermost unfinished statement
        self.depth = 0  # parentheses
        self.above: list[str] = []  # comments that belong to the next token
        self.behind = ""
        self.end = 0

    def run(self) -> Block:
        for index, item in enumerate(self.items):
            if item.type == "COMMENT":
                self._comment(item, in_header=self.following[index] == "LBRACE")
            elif item.type == "_SEP":
                if self.following[index] != "LBRACE":
                    self.entry = None
            elif item.type == "LBRACE":
                self._opened(item)
            elif item.type == "RBRACE":
                self._closed(item)
            else:
                self._piece(item)
            if item != "\n":
                self.end = item.end_pos or 0
        return self.root

    # -- tokens ------------------------------------------------------------------------------------------------------

    def _piece(self, item: Token) -> None:
        if self.entry is not None and self.entry.kind == "STRING":
            self.entry = None  # a docstring needs no separator
        if self.entry is None:
            self.entry = self._added(Entry(), item)
        self.entry.pieces.append(Piece(item.type, str(item), self.above))
        self.above = []
        self.depth += {"LPAR": 1, "RPAR": -1}.get(item.type, 0)

    def _opened(self, item: Token) -> None:
        assert self.entry is not None, "a block belongs to a statement"
        block = Block([Entry(comment=comment) for comment in self.above], self.behind)
        self.entry.block = block
        self.above, self.behind = [], ""
        self.blocks.append(block)
        self.unfinished.append((self.entry, item.start_pos or 0))
        self.entry = None

    def _closed(self, item: Token) -> None:
        self.entry, begin = self.unfinished.pop()
        self.blocks.pop().one_line = "\n" not in self.text[begin : item.start_pos]

    # -- comments ----------------------------------------------------------------------------------------------------

    def _comment(self, item: Token, in_header: bool) -> None:
        start = item.start_pos or 0
        text = item.rstrip()
        alone = not self.text[self.text.rfind("\n", 0, start) + 1 : start].strip()
        if in_header:
            if alone or self.behind:
                self.above.append(text)
            else:
                self.behind = text
        elif self.depth and self.entry is not None:
            if alone:
                self.above.append(text)
            else:
                self.entry.pieces[-1].behind = text
        elif alone or not self._put_behind(text):
            self.entry = None
            self._added(Entry(comment=text), item)

    def _put_behind(self, text: str) -> bool:
        """Attach a comment to the text before it; return False if there is none or it already has one."""
        block = self.blocks[-1]
        last = block.entries[-1] if block.entries else None
        if last is not None and last.pieces and not last.comment:
            last.comment = text
        elif last is None and block is not self.root and not block.behind:
            block.behind = text
        else:
            return False
        return True

    def _added(self, entry: Entry, item: Token) -> Entry:
        """Append an entry to its block and return it."""
        entries = self.blocks[-1].entries
        entry.blank = bool(entries) and self.text.count("\n", self.end, item.start_pos) > 1
        entries.append(entry)
        return entry


def _following(items: list[Token]) -> list[str]:
    """Return for each item the type of the next token other than comments and separators."""
    found: list[str] = []
    following = ""
    for item in reversed(items):
        found.append(following)
        if item.type not in ("_SEP", "COMMENT"):
            following = item.type
    return found[::-1]
