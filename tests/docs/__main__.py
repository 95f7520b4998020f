"""`python -m tests.docs PAGE...`: put into the pages what their commands and programs print now.

In a new page, write `?` where output belongs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.docs.pages import ROOT, play, read


def rewritten(text: str) -> str:
    """The page with what is printed now; what agrees with it, with or without `...`, stays."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sys.path.insert(0, folder)
        printed = list(play(text))
        os.chdir(ROOT)
    for one in reversed(printed):
        if not one.agree:
            lines = [line.rstrip() for line in one.real.strip("\n").splitlines()]
            text = text[: one.start] + "\n".join(lines) + "\n" + text[one.end :]
    return text


if __name__ == "__main__":
    os.environ.pop("COLUMNS", None)
    for page in sys.argv[1:]:
        document = str(Path(page).resolve().relative_to(ROOT))
        (ROOT / document).write_text(rewritten(read(document)), encoding="utf-8")
