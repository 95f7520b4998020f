"""The made parts of docs/records/models.md: whole models, from the prompt to the last token."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from scripts.pages.markdown import ROOT, table

MEASURED = ROOT / "results" / "cpu" / "generate"
"""What `kvdsl bench generate --json` wrote, a file for each dtype, number of rows and length of the prompt."""

CELLS = {
    "bf16": ((1, 512), (1, 2048), (1, 8000), (8, 512), (8, 2048)),
    "fp32": ((1, 512), (1, 2048), (1, 4000), (8, 512)),
}

Row = dict[str, Any]


def _rows(dtype: str, batch: int, prompt: int) -> dict[str, Row]:
    """By policy."""
    found = json.loads((MEASURED / f"{dtype}_{batch}_{prompt}.json").read_text(encoding="utf-8"))
    return {row["policy"]: {**row, "repeats": found["repeats"]} for row in found["rows"]}


def _table(dtype: str, show: Callable[[Row], str]) -> str:
    rows = {cell: _rows(dtype, *cell) for cell in CELLS[dtype]}
    policies: Sequence[str] = list(next(iter(rows.values())))
    head = ("", *(f"{prompt:,} tokens" if batch == 1 else f"{batch} rows of {prompt:,}" for batch, prompt in rows))
    return table(head, ((f"`{policy}`", *(show(own[policy]) for own in rows.values())) for policy in policies))


def _host_table() -> str:
    rows = json.loads((MEASURED.parent / "host.json").read_text(encoding="utf-8"))["rows"]
    lines = (
        (
            f"`{row['policy']}`",
            *(f"{row[name]:.0f} ({row[f'{name}_q1']:.0f} to {row[f'{name}_q3']:.0f})" for name in ("us", "beyond_us")),
        )
        for row in rows
    )
    return table(("", "µs", "beyond"), lines)


def _later(row: Row) -> str:
    return f"{row['tpot_ms']:.1f} ms" + _beside(row, "vs_first", 1, row["new_tokens"] * row["repeats"])


def _first(row: Row) -> str:
    return f"{row['ttft_ms'] / 1e3:.2f} s" + _beside(row, "ttft_vs_first", -1, row["repeats"])


def _beside(row: Row, name: str, power: int, times: int) -> str:
    """A quotient, or its inverse, and the quartiles of what was measured more than once; nothing for who is compared with."""
    if row["policy"] == "transformers":
        return ""
    middle, *ends = (row[f"{name}{end}"] ** power for end in ("", "_q1", "_q3"))
    return f", {middle:.2f}" + (f" ({min(ends):.2f} to {max(ends):.2f})" if times > 1 else "")


def _memory(row: Row) -> str:
    return f"{row['peak_bytes'] / 2**20:,.0f} MiB, {row['cache_bytes'] / 2**20:,.0f}"


SHOWN = {"a token": _later, "first token": _first, "memory": _memory}

PARTS: dict[str, Callable[[], str]] = {
    **{f"{name} {dtype}": partial(_table, dtype, show) for dtype in CELLS for name, show in SHOWN.items()},
    "host": _host_table,
}
