"""What the stages found, as tables for docs/performance/gpus.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

KINDS = {
    "decode": ("policy", "batch", "live", "layers", "ms", "gbps", "eager_ms", "of_best"),
    "select": ("policy", "batch", "live", "ms", "dense_ms", "sdpa_ms", "vs_best_dense"),
    "prompt": ("policy", "length", "ms", "attend_ms", "observe_ms", "of_sdpa", "peak_bytes"),
    "variant": ("variant", "batch", "live", "ms"),
    "select variant": ("policy", "variant", "batch", "live", "ms"),
    "prompt variant": ("variant", "length", "ms"),
}
MODEL = ("cache", "batch", "context", "budget", "ttft_s", "token_ms", "tokens_per_s", "peak_bytes")
IN_PLACE = (
    "policy", "batch", "cache", "ms", "shift_ms", "published_ms", "over_shift", "over_published",
    "eager_ms", "eager_over_shift", "eager_over_published",
)  # fmt: skip


def tables(folder: Path) -> None:
    """Print all that there is."""
    kernels, model, in_place = (_lines(folder / f"{stage}.jsonl") for stage in ("kernels", "model", "in_place"))
    for kind, columns in KINDS.items():
        _table(f"{kind}", columns, [line for line in kernels if line.get("kind") == kind])
    _table("model", MODEL, [line for line in model if "cache" in line])
    _table("in place", IN_PLACE, [line for line in in_place if "cache" in line])


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _table(title: str, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    for row in rows:
        print(
            "|", " | ".join(_cell(row.get(name)) for name in columns), "|" + (f" {row['error']}" if row.get("error") else "")
        )


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
