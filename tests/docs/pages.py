"""The documents, their code blocks, and what the blocks print.

Blocks are told apart by their language: `kv` (a file if its first line is an edition, `kv 2`, else statements of a policy), `python`,
`console` (commands after `$ `, each followed by what it prints; `# exits with 1` says that it finds something), `shell` (commands
that tests do not run) and `text`. A `text` block that follows a `python` block is what that prints. In what is printed, `...` stands for
anything. `title="NAME"` saves a block as a file.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdsl.cli import main
from scripts.make_docs import MADE

ROOT = Path(__file__).resolve().parents[2]
FOR_THE_SITE = (ROOT / "docs" / "policies", ROOT / "docs" / "notebooks", *(ROOT / "docs" / name for name in MADE))
"""A page for each policy and notebook, and those that are made whole: made with the site, and not committed."""

_FENCE = re.compile(
    r'^(?P<indent> *)```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^(?P=indent)```$', re.M | re.S
)


def documents() -> list[str]:
    """Every document, from the repository's root."""
    return [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md") if not {p, *p.parents} & {*FOR_THE_SITE}),
    ]


def read(document: str) -> str:
    """A document's text."""
    return (ROOT / document).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Block:
    """A fenced block; `start` and `end` say where its text lies in the document."""

    language: str
    title: str | None
    text: str
    start: int
    end: int

    @property
    def is_file(self) -> bool:
        """Whether a `kv` block is a whole file."""
        return self.text.startswith(("kv 1\n", "kv 2\n"))


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a document."""
    for found in _FENCE.finditer(text):
        yield Block(found["language"], found["title"], found["text"], *found.span("text"))


def whole(block: Block) -> str:
    """A `kv` block as a file: statements get a policy around them, with a budget and a score where they have none."""
    if block.is_file:
        return block.text
    words = {line.split()[0] for line in block.text.splitlines() if line.strip()}
    rest = [] if words & {"budget", "select"} or "param budget" in block.text else ["param budget = 512"]
    rest += [] if words & {"score", "select"} else ["score position"]
    return f'kv 2\npolicy Fragment {{\n"Statements from a document."\n{block.text}' + "\n".join(rest) + "\n}\n"


# -- running a page ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Printed:
    """What a document says that something prints, and what it does print."""

    what: str
    shown: str
    real: str
    start: int
    end: int

    @property
    def agree(self) -> bool:
        """Whether they are the same, where `...` stands for anything; a page may also leave out what is printed."""
        if not self.shown.strip():
            return True
        pattern = ".*".join(re.escape(part) for part in _tidy(self.shown).split("..."))
        return re.fullmatch(pattern, _tidy(self.real), re.DOTALL) is not None


def _tidy(text: str) -> str:
    """Without spaces at the ends of lines, and without several blank lines in a row."""
    lines = (line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{2,}", "\n\n", "\n".join(lines)).strip("\n")


def play(text: str) -> Iterator[Printed]:
    """Save, run and type everything that a page shows, in the current folder, one after the other.

    Raises:
        AssertionError: for a command whose exit code is not 0, or not the one that it is said to have.
        Exception: whatever a program raises.
    """
    names: dict[str, Any] = {"__name__": "page"}
    found = list(blocks(text))
    for block, after in zip(found, [*found[1:], None], strict=True):
        if block.title is not None:
            Path(block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            real = _program(block.text, names)
            if after is not None and after.language == "text":
                yield Printed(block.text, after.text, real, after.start, after.end)
        elif block.language == "console":
            yield from _session(block)


def _program(text: str, names: dict[str, Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(text, "a block of the page", "exec"), names)
    return out.getvalue()


def _session(block: Block) -> Iterator[Printed]:
    for found in re.finditer(r"^\$ kvdsl (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
        yield Printed(found[1], found[2], command(found[1]), block.start + found.start(2), block.start + found.end(2))


def command(line: str) -> str:
    """What `kvdsl LINE` prints, errors included."""
    line, _, expected = line.partition("# exits with ")
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(shlex.split(line))
    assert code == int(expected or 0), f"kvdsl {line}\n{out.getvalue()}\n{err.getvalue()}"
    return out.getvalue() if code == 0 else out.getvalue() + err.getvalue()


def forget_packages() -> None:
    """Drop what pages imported from their `generated` folders."""
    for name in [name for name in sys.modules if name.split(".")[0] == "generated"]:
        del sys.modules[name]
