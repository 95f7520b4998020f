"""What the committed search has found, from its result."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

RESULT = Path(__file__).resolve().parents[2] / "results" / "search" / "smollm2_128" / "search.json"


def search(path: Path) -> None:
    """Draw it."""
    from kvdsl_lab.reproduce.plots import draw
    from kvdsl_lab.search.report import plot

    result = json.loads(RESULT.read_text(encoding="utf-8"))
    draw(partial(plot, result=result), result["front"], [path])
