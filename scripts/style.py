"""Phrases that docs/style.md rules out, found in pages, docstrings, comments, messages, templates and policies.

The table of that page is the only list: a phrase added there is a phrase found here.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "style.md"
RECORD = ROOT / "docs" / "records" / "sentences.md"
"""Quotes what was written before."""

_CODE = re.compile(r"^ *```.*?^ *```|(`+)(?!`).+?(?<!`)\1(?!`)", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| (.+?) \| (`.+`) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Finding:
    """A ruled-out phrase; `better` is what the page proposes."""

    file: Path
    line: int
    phrase: str
    better: str

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: write {self.better}, not `{self.phrase}`"


def vocabulary(page: str) -> dict[str, str]:
    """Ruled-out phrases, in lower case, and what to write instead."""
    rows = _ROW.findall(page.partition("\n## Words\n")[2])
    return {phrase: better for better, phrases in rows for phrase in re.findall(r"`([^`]+)`", phrases)}


def prose(text: str, suffix: str) -> Iterator[tuple[int, str]]:
    """The sentences of a file, each piece with the line it starts on. Markdown loses its code; Python keeps strings and comments."""
    if suffix != ".py":
        yield 1, _CODE.sub(lambda code: re.sub(r"[^\n]", "\x00", code[0]), text)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, _CODE.sub(lambda code: re.sub(r"[^\n]", "\x00", code[0]), node.value)
    comments = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type == tokenize.COMMENT]
    for token in comments:
        yield token.start[0], token.string


def findings(file: Path, words: dict[str, str]) -> Iterator[Finding]:
    """Each ruled-out phrase of a file, across line ends too."""
    pattern = re.compile(r"\b(" + "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in words) + r")\b", re.IGNORECASE)
    for line, piece in prose(file.read_text(encoding="utf-8"), file.suffix):
        for found in pattern.finditer(piece):
            phrase = " ".join(found[0].lower().split())
            yield Finding(file, line + piece.count("\n", 0, found.start()), phrase, words[phrase])


def files() -> list[Path]:
    """Return the tracked files whose sentences people read, with the messages that `tests/diagnostics` records."""
    names = ["README.md", "CONTRIBUTING.md", "docs", "kvdsl", "templates", "policies", "tests/diagnostics/mistakes"]
    told = subprocess.run(["git", "ls-files", "--", *names], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    kinds = {".md", ".py", ".kv", ".jinja", ".hpp", ".cpp", ".txt"}
    names = [name for name in told.splitlines() if Path(name).suffix in kinds]
    return [ROOT / name for name in names if ROOT / name not in (PAGE, RECORD)]


def main() -> None:
    """Print every finding; exit with 1 if there is one."""
    words = vocabulary(PAGE.read_text(encoding="utf-8"))
    found = [one for file in files() for one in findings(file, words)]
    print("\n".join(map(str, found)) or f"{len(words)} phrases looked for, none found")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
