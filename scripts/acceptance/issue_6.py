"""Positions and storage: EQUIP, StreamingLLM's positions, Lazy Pruning."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from acceptance.registry import REPO, Measured, NotMeasured, all_pass, criterion, interpreted, kvdsl_json, tests

STREAMED = REPO / "benchmarks/results/cpu/ppl_streaming_20000.json"
STABLE = 1.1
"""How far the perplexity of a later stretch of 2,000 tokens may lie above that of the first: stretches of a book differ by themselves."""

GPUS = "cuda:80,cuda:90,cuda:100,hip:gfx90a,hip:gfx942"

SPR = {
    "h2o": (11.62, 27.32, 19.36, 35.73, 38.12, 39.90, 39.75, 31.43),
    "streaming_llm": (26.54, 36.04, 27.65, 47.94, 46.67, 45.04, 50.58, 47.34),
}
"""EQUIP's Table 5, the columns of its CPU, in the order of `kvdsl_lab.bench.update.EQUIP_SHAPES`."""


# -- equal to what they replace ----------------------------------------------------------------------------------------


@criterion(6, "slots in any order give what shift and append gives, with masks and windows, plain and rotated, per backend")
def _permuted() -> Measured:
    return all_pass(tests("tests/differential", "test_in_place_equals_shift_and_append"), 16)


@criterion(
    6,
    "generate says what the model says with a shift-and-append cache: reference model, 500 steps, EQUIP's two policies and blocks, C++ and "
    "torch; a divergence counts where the top two logits differ by more than 1e-4",
)
def _five_hundred() -> Measured:
    return all_pass(tests("tests/bench", "test_in_place_says_what_shift_and_append_says_for_500_steps"), 6)


@criterion(6, "models with ALiBi are refused with a reason")
def _alibi() -> Measured:
    return all_pass(
        tests("tests/hf", "test_attention_that_cannot_be_reached[bloom]|test_attention_that_cannot_be_reached[mpt]"), 2
    )


@criterion(6, "compact positions are the kept tokens by themselves at 0 to n - 1, one-layer models of ten families and more")
def _compact() -> Measured:
    return all_pass(tests("tests/hf", "test_logits_are_those_of_the_kept_tokens_alone"), 60)


@criterion(6, "`rope cached` is `rope fused`: to the bit on torch, within 1e-5 in C++")
def _rope_modes() -> Measured:
    return all_pass(tests("tests/runtime", "test_rope_cached."), 18)


@criterion(
    6,
    "`storage blocks` is `storage in_place` to the bit, C++ and torch; one pool serves rows of different lengths, and gets blocks back",
)
def _blocks() -> Measured:
    return all_pass(tests("tests/runtime", "test_blocks."), 40)


@criterion(6, "Triton: `storage blocks` is `storage in_place` to the bit, `rope cached` is `rope fused`; in its interpreter")
def _triton() -> Measured:
    return all_pass(interpreted("tests/triton/test_blocks.py", "tests/triton/test_rope_cached.py"), 15)


@criterion(6, "Triton, ahead of time: kernels of blocks and rotated halves on five targets spill nothing")
def _ahead() -> Measured:
    policies = ("equip_h2o", "equip_streaming", "benchmarks/policies/equip_blocks.kv")
    rows = kvdsl_json("build", *policies, "--target", GPUS)["rows"]
    spills, targets = sum(row["spills"] for row in rows), len({row["target"] for row in rows})
    return f"{len(rows)} kernels, {targets} targets, {spills} spills", "5 targets, 0 spills", targets == 5 and spills == 0


# -- several at once ---------------------------------------------------------------------------------------------------


@criterion(6, "steps that are taken back never happened, to the bit, per policy and backend")
def _undone() -> Measured:
    return all_pass(tests("tests/runtime", "test_undo."), 30)


@criterion(6, "assisted decoding and prompt lookup say and keep what plain decoding does; cropping is exact or refused")
def _assisted() -> Measured:
    return all_pass(tests("tests/hf", "test_speculation."), 30)


@criterion(6, "E tokens evicted and E inserted in one update, alike on every backend")
def _replaced() -> Measured:
    return all_pass(tests("tests/runtime", "test_replacing."), 10)


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


FUSED = '''
kv 1
import equip_h2o

policy Fused extends EQUIP_H2O {
  """EQUIP_H2O that keeps no rotated halves."""
  override rope fused
}
'''


@criterion(
    6, "a step with `rope fused` and with `rope cached`, both in C++, the fastest quarter; bytes of a token's key and value"
)
def _rope_speed() -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fused.kv"
        file.write_text(FUSED.lstrip(), encoding="utf-8")
        rounds = [(_milliseconds(str(file)), _milliseconds("equip_h2o")) for _ in range(3)]
        held = kvdsl_json("explain", str(file))["bytes"], kvdsl_json("explain", "equip_h2o")["bytes"]
    fused, cached = (min(times) for times in zip(*rounds, strict=True))
    plain, more = (one["key_and_value"] + one["rotated_half"] for one in held)
    return f"{fused:.2f} and {cached:.2f} ms; {plain} and {more} bytes", "fused <= cached", fused <= cached and plain < more


def _milliseconds(policy: str) -> float:
    """The lower quartile of one step's time in C++, whose keys are turned by different angles."""
    shape = "--batch 1 --kv-heads 8 --group 4 --head-dim 128 --live 1024 --dtype fp32 --repeats 7 --warmup 1"
    found: dict[str, Any] = kvdsl_json("bench", "decode", "--policy", policy, "--backend", "cpu", *shape.split())
    return float(found["ms_q1"])


RACES = REPO / "benchmarks/results/cpu"
CELLS = [(batch, budget) for batch in (8, 16) for budget in (256, 512, 1024)]


def _in_a_model(policy: str, dtype: str, bound: float) -> None:
    @criterion(
        6,
        f"bench generate, two layers of Llama-2-7B's shape in {dtype}: {policy} in place over shift, geometric mean of 6 cells (committed "
        f"results); beside it what a free update would give, and over the published way to shift",
    )
    def _() -> Measured:
        cells = [_race(policy, dtype, batch, budget) for batch, budget in CELLS]
        speedups = [ours["vs_first"] for _, _, ours in cells]
        over_shift = geometric_mean(speedups)
        free = geometric_mean([1 / (1 - shift["shares"]["update"] - shift["shares"]["rotation"]) for shift, _, _ in cells])
        over_fresh = geometric_mean([fresh["tpot_ms"] / ours["tpot_ms"] for _, fresh, ours in cells])
        attention = [100 * ours["shares"]["attention"] for _, _, ours in cells]
        value = (
            f"{over_shift:.2f}x ({', '.join(f'{x:.2f}' for x in speedups)}); a free update: {free:.2f}x; over the "
            f"published way: {over_fresh:.2f}x; attention takes {min(attention):.0f} to {max(attention):.0f} % of a token's time"
        )
        return value, f">= {bound:g}x", over_shift >= bound


def _race(policy: str, dtype: str, batch: int, budget: int) -> list[dict[str, Any]]:
    """The rows of shift, fresh and in place."""
    file = RACES / f"generate_shift_{policy}_{dtype}_{batch}x{budget}.json"
    if not file.exists():
        raise NotMeasured(f"there is no {file.relative_to(REPO)}")
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["rows"]
    if [row["policy"] for row in rows] != [f"shift:{policy}", f"fresh:{policy}", policy]:
        raise RuntimeError(f"{file.name} is of another race")
    return rows


for _dtype in ("fp32", "bf16"):
    _in_a_model("streaming_llm", _dtype, 1.62)
    _in_a_model("equip_h2o", _dtype, 4.48)


@criterion(6, "results of `kvdsl reproduce equip` and `lazy` are committed")
def _reproduced() -> Measured:
    absent = [name for name in ("results/equip.json", "results/lazy.json") if not (REPO / name).exists()]
    if absent:
        raise NotMeasured(f"there is no {' and no '.join(absent)}")
    return "both", "both", True


# -- in a graph -------------------------------------------------------------------------------------------------------


@criterion(
    6,
    "a decode step under each storage and rope mode traces with torch.compile(fullgraph=True), no recompilation over 1,000 steps",
)
def _compiled() -> Measured:
    return all_pass(tests("tests/hf/test_compile.py", "thousand"), 14)
