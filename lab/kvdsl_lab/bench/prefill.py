"""How fast one layer's prompt is, and what memory it takes: attention, statistics and eviction beside attention alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvdsl.runtime.backend import AttentionCall, Backend
from kvdsl.runtime.backends import choose
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.slots import SlotState
from kvdsl_lab.bench import baselines, measure
from kvdsl_lab.bench.decode import DTYPES
from kvdsl_lab.bench.measure import Candidate
from kvdsl_lab.eval.usage import Usage

_EAGER_EVERY = 3


@dataclass(frozen=True)
class Shape:
    """One layer's prompt: `length` tokens in every row."""

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    length: int
    dtype: str

    @property
    def eager_bytes(self) -> int:
        """What the eager path needs at once: scores and probabilities of every query head, in float32."""
        return 2 * 4 * self.batch * self.kv_heads * self.group * self.length**2


def prompt(shape: Shape, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random queries, keys and values, which lie in memory as a model's do: token by token."""
    generator = torch.Generator().manual_seed(seed)
    heads = (shape.kv_heads * shape.group, shape.kv_heads, shape.kv_heads)
    query, key, value = (
        torch.randn(shape.batch, shape.length, n, shape.head_dim, generator=generator)
        .to(DTYPES[shape.dtype])
        .transpose(1, 2)
        for n in heads
    )
    return query, key, value


def prefill(
    backend: Backend, spec: PolicySpec, tensors: tuple[Tensor, Tensor, Tensor], seed: int, usage: Usage | None = None
) -> Callable[[], object]:
    """One layer's prompt under the policy, from an empty cache to the survivors in their slots; `usage` sees the first time."""
    call = AttentionCall(*tensors, real=None, scaling=tensors[0].shape[-1] ** -0.5)

    def run() -> Tensor:
        state = SlotState(spec, {}, seed=seed)
        out = backend.prefill(state, call)
        if usage is not None and usage.evicted is None:
            usage.see_layer(state)
        return out

    return run


def bench_prefill(
    spec: PolicySpec,
    shape: Shape,
    *,
    backend: str = "auto",
    repeats: int = 5,
    warmup: int = 1,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Time a prompt beside torch's fused attention, which keeps no statistics, and the eager path where that fits.

    Peaks are what the process grows by beyond its inputs; None where the system does not tell.
    """
    server, tensors = choose(spec, backend, torch.device("cpu"), DTYPES[shape.dtype]), prompt(shape, seed)
    usage = Usage()
    runs: dict[str, Callable[[], object]] = {
        "ours": prefill(server, spec, tensors, seed, usage),
        "sdpa": lambda: baselines.sdpa_prompt(*tensors),
    }
    if shape.eager_bytes < measure.free_memory() // 2:
        runs["eager"] = lambda: baselines.eager_prompt(*tensors)
    peaks = {name: measure.peak_bytes(run) for name, run in runs.items()}
    rounds = {name: Candidate(run, every=_EAGER_EVERY if name == "eager" else 1) for name, run in runs.items()}
    times = measure.interleaved(rounds, repeats, warmup, tick=tick)
    head = {"policy": spec.stem, "backend": server.name, **asdict(shape)}
    facts = {"threads": torch.get_num_threads(), "repeats": repeats, "warmup": warmup}
    return measure.finite({**head, **facts, **figures(times, peaks), **usage.row()})


def figures(times: dict[str, list[float]], peaks: dict[str, int | None]) -> dict[str, Any]:
    """Medians and quartiles, and of ratios the medians over rounds; what was not run is None."""
    found: dict[str, Any] = {
        **measure.summary("ms", times["ours"], 1),
        **measure.summary("sdpa_ms", times["sdpa"], 1),
        **measure.summary("ratio", measure.ratios(times["ours"], times["sdpa"])),
        **measure.summary("eager_ms", times.get("eager", []), 1),
        "peak_bytes": peaks["ours"],
        "sdpa_peak_bytes": peaks["sdpa"],
        "eager_peak_bytes": peaks.get("eager"),
    }
    return found
