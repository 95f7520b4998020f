"""What a token costs behind 8,000 tokens, from the committed measurement of SmolLM2: bars of time, and what the cache takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from scripts.pictures.svg import INK, QUIET, drawing

MEASURED = Path(__file__).resolve().parents[2] / "results" / "cpu" / "generate" / "bf16_1_8000.json"
SHOWN = {
    "transformers": "transformers", "static": "transformers, static", "full": "kvdsl, full cache", "streaming_llm": "kvdsl, StreamingLLM",
    "roco": "kvdsl, RoCo", "h2o": "kvdsl, H2O",
}  # fmt: skip
"""Whose row is drawn, and under which name."""

WIDTH, TOP, ROW, LEFT, LONGEST = 560, 66, 27, 168, 210
OURS, THEIRS = "#0072b2", "#8c959f"


def speed(path: Path) -> None:
    """Draw it."""
    found = json.loads(MEASURED.read_text(encoding="utf-8"))
    rows = {row["policy"]: row for row in found["rows"]}
    prompt = rows["transformers"]["prompt_tokens"]
    title = f"SmolLM2 behind a prompt of {prompt:,} tokens: milliseconds a token, and the cache at the end"
    height = TOP + ROW * len(SHOWN) + 4
    path.write_text(
        drawing(WIDTH, height, title, parts(title, [rows[policy] for policy in SHOWN]), in_both=True), encoding="utf-8"
    )


def parts(title: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f'<rect width="{WIDTH}" height="{TOP + ROW * len(rows) + 4}" rx="10" fill="#f6f8fa" stroke="#d0d7de"/>'
    head, _, what = title.partition(": ")
    yield text(16, 26, head, INK, ' font-size="15" font-weight="bold"')
    yield text(16, 46, what, QUIET)
    most = max(row["tpot_ms"] for row in rows)
    for number, row in enumerate(rows):
        y = TOP + ROW * number
        long = LONGEST * row["tpot_ms"] / most
        colour = OURS if SHOWN[row["policy"]].startswith("kvdsl") else THEIRS
        yield text(LEFT - 8, y + 15, SHOWN[row["policy"]], INK, ' text-anchor="end"')
        yield f'<rect x="{LEFT}" y="{y + 1}" width="{long:.1f}" height="{ROW - 7}" rx="2" fill="{colour}"/>'
        yield text(LEFT + long + 7, y + 15, f"{row['tpot_ms']:.0f} ms", INK, ' font-weight="bold"')
        yield text(WIDTH - 16, y + 15, f"{row['cache_bytes'] / 2**20:.0f} MiB", QUIET, ' text-anchor="end"')


def text(x: float, y: float, words: str, colour: str, marks: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" fill="{colour}"{marks}>{escape(words)}</text>'
