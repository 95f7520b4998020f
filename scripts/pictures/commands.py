"""What commands print, as they are seen in a terminal."""

from __future__ import annotations

import tempfile
from pathlib import Path

from scripts.pictures.home import kvdsl_on_path
from scripts.pictures.terminal import Terminal

WRONG = """\
kv 1

policy Mine {
  "Evicts what attention has turned away from; the first tokens stay."
  param budget = 256
  param sinks  = 4
  score attn
  keep  first sink
}
"""


def check(out: Path) -> None:
    """Two errors, with how to mend them."""
    _shown(out, "kvdsl check mine.kv", "2 errors", {"mine.kv": WRONG})


def diff(out: Path) -> None:
    """What is different between two policies, and a text that shows it."""
    _shown(out, "kvdsl diff h2o tova", "\n}", {})


def _shown(out: Path, command: str, last: str, files: dict[str, str]) -> None:
    """Run a command where these files lie, and draw what it prints up to its last words."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        for file, text in files.items():
            (home / file).write_text(text, encoding="utf-8")
        script = f"echo '$ {command}'; {command}; sleep 60"
        with Terminal(["sh", "-c", script], home, kvdsl_on_path(home), columns=100, rows=60) as screen:
            screen.until(last)
            out.write_text(screen.svg(command), encoding="utf-8")
