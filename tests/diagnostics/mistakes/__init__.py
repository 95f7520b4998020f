"""Mistakes that people may make, and what is said about each; `python -m tests.diagnostics.mistakes` rewrites it.

A mistake is a title, which says what was meant, and lines of a policy. Around them stand `kv 1`, a docstring, and, where the lines
have none, `param budget = 512` (unless they select) and `score mean(attn)`; `file: NAME.kv` begins a file as it is. Below `---`
stands what `kvdsl check` says: the code, the place and the message; the help; and of each edit that the help offers the lines that
it changes, and what is said then.

`open.txt` was read entry by entry, and messages were mended until each said what is wrong and what to write. The two others say how
well that carries over. `kept_apart.txt` was drawn by chance from the same list of mistakes as two thirds of `open.txt`, and not
looked at until the end; but who wrote the messages had written the list. `afterwards.txt` was written when they were done, so its
grades are the more honest ones. Graded when they were first looked at, from 5 (what is wrong, and an edit that does what was meant)
over 3 (half of it, or no edit) to 1 (misleads), by one reader:

                                     5    4    3    2    1   mean
    kept_apart.txt, 50   before      3    7   10   25    5   2.56
                         after      29   13    5    1    2   4.32
    afterwards.txt, 25   before      1    2    5   15    2   2.40
                         after       7    2    6    9    1   3.20

Then what these two showed was mended as well, and their files show what is said since.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdsl.compiler import Analysis, analyse
from kvdsl.diagnostics import Diagnostic, mends
from kvdsl.files import resource
from kvdsl.helps import Fix
from kvdsl.source import SourceFile

FOLDER = Path(__file__).parent
FILES = ("open.txt", "kept_apart.txt", "afterwards.txt")


@dataclass(frozen=True)
class Mistake:
    """What somebody wrote, and what they meant; `said` is what the corpus has about it."""

    title: str
    written: str
    said: str = ""

    @property
    def file(self) -> SourceFile:
        """The file in which it stands."""
        head = re.match(r"file: (\S+)\n", self.written)
        if head is not None:
            return _beside_policies(head[1], self.written[head.end() :] + "\n")
        lines = self.written.split("\n")
        selects = any(re.match(r"(select|sketch)\b", line) for line in lines)
        if not selects and not any(re.match(r"(param\s+)?budget\b", line) for line in lines):
            lines.insert(0, "param budget = 512")
        if not selects and not any(re.match(r"(score|evict|return|rank)\b", line, re.IGNORECASE) for line in lines):
            lines.append("score mean(attn)")
        body = "".join(f"  {line}\n" for line in ['"An example."', *lines])
        return _beside_policies("example.kv", f"kv 1\n\npolicy Example {{\n{body}}}\n")

    def block(self) -> str:
        """The mistake with what is said about it now."""
        return f"=== {self.title}\n{self.written}\n---\n{said(self.file)}"


def _beside_policies(name: str, text: str) -> SourceFile:
    return SourceFile(name, text, resource("policies") / name)


def read(name: str) -> list[Mistake]:
    """The mistakes of a file of the corpus."""
    blocks = re.split(r"^=== ", (FOLDER / name).read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    mistakes = []
    for block in blocks:
        title, _, rest = block.partition("\n")
        written, _, told = rest.partition("\n---\n")
        mistakes.append(Mistake(title, written.rstrip("\n"), told.rstrip("\n")))
    return mistakes


def said(file: SourceFile) -> str:
    """What is said about a file, and what comes of the edits that helps offer."""
    analysis = analyse(file)
    return "\n".join(line for found in analysis.diagnostics for line in _told(found, analysis)) or "nothing"


def _told(found: Diagnostic, analysis: Analysis) -> Iterator[str]:
    kind = "" if found.severity == "error" else f" {found.severity}"
    yield f"{found.code}{kind} at `{' '.join(found.span.text.split())}`: {found.message}"
    if found.help is not None:
        yield f"  help: {found.help}"
    for fix in found.fixes:
        after = applied(fix)
        yield f"  fix: {_changed(fix)}  # {'checks' if after.ok else _then(analysis, after)}"


def applied(fix: Fix) -> Analysis:
    """What is said about the file with an edit."""
    file = fix.span.file
    return analyse(SourceFile(file.name, fix.applied(), file.path))


def _changed(fix: Fix) -> str:
    before, after = (text.splitlines() for text in (fix.span.file.text, fix.applied()))
    lines = [line[2:].strip() for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    return " ⏎ ".join(lines) if lines else "(a line less)"


def _then(before: Analysis, after: Analysis) -> str:
    """What is wrong still."""
    known = {(one.code, one.message) for one in before.diagnostics}
    left = [one for one in after.diagnostics if one.severity == "error"]
    new = [one for one in left if (one.code, one.message) not in known]
    return f"then {new[0].code}: {new[0].message}" if new else f"then {len(left)} of the other errors"


def broken_rule(found: Diagnostic, analysis: Analysis) -> list[str]:
    """The edits of a finding that mend nothing."""
    return [
        f"{found.code} {found.message!r}: {fix.title} makes {_changed(fix)!r}"
        for fix in found.fixes
        if not mends(found, fix, analysis.diagnostics, applied(fix).diagnostics)
    ]


def main() -> None:
    """Writes what is said about every mistake."""
    for name in FILES:
        path = FOLDER / name
        if path.exists():
            path.write_text("\n\n".join(one.block() for one in read(name)) + "\n", encoding="utf-8")
