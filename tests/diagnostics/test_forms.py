"""Forms that people bring from elsewhere are none of the language's own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvdsl.compiler import analyse
from kvdsl.files import resource
from kvdsl.syntax.forms import LONGEST, found

ROOT = Path(__file__).parents[2]
FILES = sorted(path for path in resource("policies").rglob("*.kv"))


def statements(text: str) -> list[str]:
    """What stands on the lines of a file, each without its comment; braces and strings split them, too."""
    lines = re.sub(r'"""(?:\\.|[^\\])*?"""|"(?:\\.|[^"\\\n])*"', '"text"', text, flags=re.DOTALL).split("\n")
    return [part.strip() for line in lines for part in re.split(r"[;{}]", line.partition("#")[0]) if part.strip()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_policy_has_one(path: Path) -> None:
    told = [(statement, form.message) for statement in statements(path.read_text()) for form, _ in found(statement)]
    assert not told


def test_neither_have_the_policies_of_the_documents() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    blocks = [block for page in pages for block in re.findall(r"```kv[^\n]*\n(.*?)```", page.read_text(), re.DOTALL)]
    told = [(line, form.message) for block in blocks for line in statements(block) for form, _ in found(line)]
    assert not told
    assert len(blocks) > 20


@pytest.mark.parametrize("text", ["(" * LONGEST, "a " * (LONGEST // 2), "f(" * (LONGEST // 2), "a, " * (LONGEST // 3)])
def test_long_statements_take_no_time(text: str) -> None:
    import time

    begun = time.process_time()  # of this process's own work, however busy the machine is
    for head in ("", "score ", "keep "):
        found(f"{head}{text}"[:LONGEST])
    analyse_long = f"kv 1\npolicy P {{\n  score {text} @ {text}\n}}\n"
    from kvdsl.source import SourceFile

    analyse(SourceFile("p.kv", analyse_long))
    assert time.process_time() - begun < 20, "a pattern that backtracks takes minutes"
