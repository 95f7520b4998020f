"""Whether it matters in which order the positions lie by which keys are turned (table 6).

The paper times the rotation alone; here it is part of the kernel, so that a whole step of one layer is timed. Slots in the order of the
text are turned block by block, by one angle; in any other order every key has an angle of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvdsl_lab.reproduce.experiment import Cell, Experiment, Finding, Row, Setup, all_of, within

if TYPE_CHECKING:
    from torch import Tensor

HEAD_DIM = 128
TOKENS = 8
"""Steps that a time is of."""
ORDERS = ("in order", "random, the same in every row", "random")


def _cells(setup: Setup) -> Iterator[Cell]:
    for batch, heads, live in setup.size(((1, 32, 4096), (1, 32, 16384), (8, 32, 4096)), ((1, 2, 64),)):
        name = f"batch {batch}, {heads} heads, {live} tokens"
        yield Cell(name, partial(_steps, batch=batch, heads=heads, live=live))


def _steps(setup: Setup, batch: int, heads: int, live: int) -> list[Row]:
    import torch

    from kvdsl.loading import load
    from kvdsl.runtime.backends import choose
    from kvdsl_lab.bench import measure
    from kvdsl_lab.bench.decode import Shape, decode_step, new_tokens, steady_state

    spec = load("streaming_llm").spec
    shape = Shape(batch=batch, kv_heads=heads, group=1, head_dim=HEAD_DIM, live=live, dtype="fp32")
    tokens = new_tokens(shape, setup.seed, count=TOKENS)
    candidates = {}
    for order in ORDERS:
        state = steady_state(spec, shape, setup.seed)
        _reorder(state, order, setup.seed)
        step = decode_step(choose(spec, setup.backend, torch.device("cpu"), shape.torch_dtype), state)
        candidates[order] = measure.calibrated(partial(_run, step, tokens))
    times = measure.interleaved(candidates, setup.repeats, 1)
    found = {"batch": batch, "heads": heads, "live": live}
    return [
        {
            **found, "order": order, **measure.summary("ms", times[order]),
            **measure.summary("vs_in_order", measure.ratios(times[order], times[ORDERS[0]])),
        }
        for order in ORDERS
    ]  # fmt: skip


def _run(step: Any, tokens: Sequence[Any]) -> None:
    for token in tokens:
        step(token)


def _reorder(state: Any, order: str, seed: int) -> None:
    """Have the tokens lie in other slots: keys are random, so that it is enough to say so."""
    import torch

    if order == ORDERS[0]:
        return
    rows = state.position.shape[:2] if order == ORDERS[2] else (1, 1)
    by: Tensor = torch.rand(*rows, state.slots, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    for tensor in (state.position, state.rank):
        tensor.copy_(tensor.gather(-1, by.expand_as(tensor)))


def _table(rows: Sequence[Row]) -> list[Row]:
    columns = ("batch", "heads", "live", "order", "ms", "ms_q1", "ms_q3", "vs_in_order")
    return [{f"{name}, {TOKENS} steps" if name == "ms" else name: row[name] for name in columns} for row in rows]


def _findings(rows: Sequence[Row]) -> list[Finding]:
    holds = all_of(within((row["vs_in_order_q1"], row["vs_in_order_q3"]), high=1.1) for row in rows)
    told = ", ".join(f"{row['vs_in_order']:.3g} ({row['order']})" for row in rows if row["order"] != ORDERS[0])
    claim = "a step takes at most a tenth longer where positions lie in any order"
    return [Finding(claim, holds if rows[0]["live"] >= 1024 else None, f"times as long: {told}")]


TABLE6 = Experiment(
    "table6", "A step whose keys are turned, by the order of their positions", "Table 6", _cells,
    says="the order makes no difference (geometric mean 0.99 to 1.00).", findings=_findings, table=_table,
)  # fmt: skip
