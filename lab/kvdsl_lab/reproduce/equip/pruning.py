"""Attention alone, of three ways to choose who leaves (table 3).

One layer, a cache that is full, and steps of one token each: in place, and shifted for every token, done well or as published. A time is of
all that attention takes: to choose who leaves, the update, the turning of keys, the products.

The paper does not say how LagKV and SnapKV, which compress prompts, go on at every token. Here SnapKV keeps what the last queries attend
to, without its pool, for which the paper asks functions of one's own; and LagKV ranks by a number that a token has for good. Both keep
their numbers beside the keys, where they are shifted as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvdsl_lab.reproduce.equip.common import VARIANTS, layers
from kvdsl_lab.reproduce.equip.races import LLAMA, TOY
from kvdsl_lab.reproduce.experiment import Cell, Experiment, Finding, Row, Setup, all_of, within

if TYPE_CHECKING:
    from kvdsl_lab.bench.baselines import Token
    from kvdsl_lab.bench.shifting import ShiftedCache

_PAPERS_SPEEDUPS = {"StreamingLLM": 7.42, "LagKV": 4.06, "SnapKV": 2.89}
"""Llama 2 7B on an MI210: 128 rows, 1,024 tokens, 512 of them kept."""

_POLICIES = {
    "StreamingLLM": "streaming_llm", "LagKV": str(VARIANTS / "lagkv_tokens.kv"), "SnapKV": str(VARIANTS / "snapkv_tokens.kv"),
}  # fmt: skip

_BATCH, _KEPT = 128, 512
_WAYS = {"shift": "shift done well", "published": "shift as published"}


def _cells(setup: Setup) -> Iterator[Cell]:
    batch, kept = setup.size((_BATCH, _KEPT), (2, 192))
    for name in _POLICIES:
        yield Cell(f"{name}, batch {batch}, cache {kept}", partial(_attention, name=name, batch=batch, kept=kept))


def _attention(setup: Setup, name: str, batch: int, kept: int) -> list[Row]:
    """A step's time in place and with both baselines, in turns; with how many processes wanted a core meanwhile."""
    import torch

    from kvdsl.loading import load
    from kvdsl.runtime.backends import choose
    from kvdsl_lab.bench import baselines, measure
    from kvdsl_lab.bench.decode import Shape, decode_step, new_tokens, steady_state
    from kvdsl_lab.bench.shifting import ShiftedCache

    model, spec = layers(setup, setup.size(LLAMA, TOY)), load(_POLICIES[name]).spec
    config = model.config
    heads = config.num_key_value_heads
    size = config.hidden_size // config.num_attention_heads
    shape = Shape(batch, heads, config.num_attention_heads // heads, size, kept + 1, setup.dtype or "bf16")
    tokens = new_tokens(shape, setup.seed)
    backend = choose(spec, setup.backend, torch.device("cpu"), shape.torch_dtype)
    steps = {"ours": decode_step(backend, steady_state(spec, shape, setup.seed))}
    for way, fresh in (("shift", False), ("published", True)):
        steps[way] = shifted_step(ShiftedCache(model, spec, {"budget": kept}, fresh=fresh), shape, setup.seed)
    candidates = {way: measure.calibrated(baselines.repeated(step, tokens)) for way, step in steps.items()}
    with torch.inference_mode():
        times = measure.interleaved(candidates, setup.repeats, 2)
    row = {
        "policy": name,
        "batch": batch,
        "heads": heads,
        "head_dim": size,
        "kept": kept,
        **measure.summary("ms", times["ours"]),
    }
    for way in _WAYS:
        row |= {f"{way}_ms": measure.summary("ms", times[way])["ms"]}
        row |= measure.summary(f"over_{way}", measure.ratios(times[way], times["ours"]))
    return [row | {"load": round(os.getloadavg()[0], 1), "paper": None if setup.quick else _PAPERS_SPEEDUPS[name]}]


def shifted_step(cache: ShiftedCache, shape: Any, seed: int) -> Any:
    """One step of a shifted cache's first layer, which holds as many tokens as it keeps."""
    import torch

    layer: Any = cache.layers[0]
    rows = (shape.batch, shape.kv_heads, shape.live - 1, shape.head_dim)
    generator = torch.Generator().manual_seed(seed)
    layer.update(*(torch.randn(rows, generator=generator).to(shape.torch_dtype) for _ in range(2)))

    def step(token: Token) -> Any:
        query, key, value = token
        layer.update(key, value)
        return layer.attend(query, shape.head_dim**-0.5)

    return step


def _findings(rows: Sequence[Row]) -> list[Finding]:
    found = []
    for row in rows:
        ways = [f"over_{way}" for way in _WAYS]
        told = ", ".join(
            f"{row[name]:.3g}x ({row[name + '_q1']:.3g} to {row[name + '_q3']:.3g}) over {way}"
            for name, way in zip(ways, _WAYS.values(), strict=True)
        )
        told += f"; {row['load']:.0f} processes wanted a core meanwhile"
        claim = f"{row['policy']}: attention in place is {_PAPERS_SPEEDUPS[row['policy']]:g} times as fast as with a cache that is shifted"
        holds = all_of(within((row[f"{name}_q1"], row[f"{name}_q3"]), low=_PAPERS_SPEEDUPS[row["policy"]]) for name in ways)
        found.append(Finding(claim, None if row["paper"] is None else holds, told))
    return found


TABLE3 = Experiment(
    "table3", "Attention in place and with a cache that is shifted, by who leaves", "Table 3", _cells,
    says="7.42 times as fast for StreamingLLM, 4.06 for LagKV, 2.89 for SnapKV (Llama 2 7B, MI210).",
    findings=_findings,
)  # fmt: skip
