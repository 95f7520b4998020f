"""Positions and storage: EQUIP, StreamingLLM's positions, Lazy Pruning."""

from __future__ import annotations

import json
from statistics import geometric_mean
from typing import Any

from acceptance.registry import REPO, Measured, NotMeasured, criterion, kvdsl_json

STREAMED = REPO / "benchmarks/results/cpu/ppl_streaming_20000.json"
STABLE = 1.1
"""How far the perplexity of a later stretch of 2,000 tokens may lie above that of the first: stretches of a book differ by themselves."""

SPR = {
    "h2o": (11.62, 27.32, 19.36, 35.73, 38.12, 39.90, 39.75, 31.43),
    "streaming_llm": (26.54, 36.04, 27.65, 47.94, 46.67, 45.04, 50.58, 47.34),
}
"""EQUIP's Table 5, the columns of its CPU, in the order of `kvdsl_lab.bench.update.EQUIP_SHAPES`."""


# -- streaming ---------------------------------------------------------------------------------------------------------


@criterion(
    6, "streaming_llm on 20,000 tokens at 512 slots: worst stretch over the first; window beside it (committed result)"
)
def _streaming() -> Measured:
    if not STREAMED.exists():
        raise NotMeasured(f"there is no {STREAMED.relative_to(REPO)}")
    rows = json.loads(STREAMED.read_text(encoding="utf-8"))["rows"]
    worst = {}
    for policy in ("streaming_llm", "window"):
        first, *later = [row["ppl"] for row in rows if row["policy"] == policy]
        worst[policy] = max(later) / first
    reached = max(row["last"] for row in rows if row["policy"] == "streaming_llm")
    value = f"{worst['streaming_llm']:.3f} up to token {reached:,}; window {worst['window']:.3f}"
    return value, f"<= {STABLE:g} up to 20,000", worst["streaming_llm"] <= STABLE and reached >= 20_000


# -- speed on a CPU ----------------------------------------------------------------------------------------------------


def _table_5(policy: str) -> None:
    @criterion(
        6,
        f"bench update, {policy}: over shift, cell by cell of EQUIP's Table 5 on a CPU; beside it, over the published way to shift",
    )
    def _() -> Measured:
        rows = kvdsl_json("bench", "update", "--policy", policy, "--equip", "--repeats", "5")["rows"]
        cells = [(row["speedup"], paper, row) for row, paper in zip(rows, SPR[policy], strict=True)]
        short = [
            f"{row['batch']}x{row['heads']}x{row['head_dim']}: {found:.1f} of {paper}"
            for found, paper, row in cells
            if found <= paper
        ]
        least = min(found for found, _, _ in cells)
        published = [row["speedup_over_fresh"] for row in rows]
        more = sum(found > paper for found, paper in zip(published, SPR[policy], strict=True))
        value = (
            f"{len(cells) - len(short)} of {len(cells)} cells, from {least:.1f}x on; over the published way {more} of {len(cells)}, from "
            f"{min(published):.1f}x on" + "".join(f"; {cell}" for cell in short)
        )
        return value, f"> {min(SPR[policy])} to {max(SPR[policy])}x", not short


_table_5("h2o")
_table_5("streaming_llm")


@criterion(
    6,
    "a step with `--rope fused` and with `--rope cached`, both in C++, the fastest quarter; bytes of a token's key and value",
)
def _rope_speed() -> Measured:
    ropes = ("fused", "cached")
    rounds = [[_milliseconds("equip_h2o", rope) for rope in ropes] for _ in range(3)]
    held = [kvdsl_json("explain", "equip_h2o", "--rope", rope)["bytes"] for rope in ropes]
    fused, cached = (min(times) for times in zip(*rounds, strict=True))
    plain, more = (one["key_and_value"] + one["rotated_half"] for one in held)
    return f"{fused:.2f} and {cached:.2f} ms; {plain} and {more} bytes", "fused <= cached", fused <= cached and plain < more


def _milliseconds(policy: str, rope: str) -> float:
    """The lower quartile of one step's time in C++, whose keys are turned by different angles."""
    shape = "--batch 1 --kv-heads 8 --group 4 --head-dim 128 --live 1024 --dtype fp32 --repeats 7 --warmup 1"
    found: dict[str, Any] = kvdsl_json(
        "bench", "decode", "--policy", policy, "--rope", rope, "--backend", "cpu", *shape.split()
    )
    return float(found["ms_q1"])


def _in_a_model(policy: str, bound: float) -> None:
    @criterion(
        6,
        f"bench generate, two layers of Llama-2-7B's shape in bf16: {policy} in place over shift, geometric mean of 6 cells (committed "
        f"result of `kvdsl reproduce equip`); beside it, over the published way to shift",
    )
    def _() -> Measured:
        found = json.loads((REPO / "results" / "equip.json").read_text(encoding="utf-8"))
        rows = next(part["rows"] for part in found["experiments"] if part["name"] == "figure7")
        own = [row for row in rows if row["policy"] == policy]
        over_shift, published = (geometric_mean(row[key] for row in own) for key in ("over_shift", "over_published"))
        cells = ", ".join(f"{row['over_shift']:.2f}" for row in own)
        value = f"{over_shift:.2f}x ({cells}); over the published way: {published:.2f}x"
        return value, f">= {bound:g}x", over_shift >= bound

    @criterion(6, f"the same in fp32: {policy}")
    def _() -> Measured:
        raise NotMeasured("takes an hour: docs/performance/ has the command, and what it gave")


_in_a_model("streaming_llm", 1.62)
_in_a_model("equip_h2o", 4.48)
