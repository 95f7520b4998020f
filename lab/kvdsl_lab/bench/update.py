"""How fast a cache changes when E tokens leave and E come in: in place, and by shift and append (EQUIP, appendix D.5)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from kvdsl.runtime.backend import AttentionCall, Backend
from kvdsl.runtime.backends import choose
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.slots import SlotState
from kvdsl_lab.bench import baselines, decode, measure
from kvdsl_lab.bench.baselines import Shifting
from kvdsl_lab.bench.measure import Candidate

EQUIP_SHAPES = (
    (1, 64, 64), (1, 64, 128), (1, 128, 64), (8, 64, 64), (8, 64, 128), (8, 128, 64), (32, 64, 64), (32, 64, 128),
)  # fmt: skip
"""Batch, heads and head size of EQUIP's Table 5; 1,024 tokens are cached and 64 evicted."""

_SETS = 4
"""Different victims and new tokens that the updates take in turn."""


@dataclass(frozen=True)
class Shape:
    """One layer's cache: `live` tokens per KV head, of which `evict` leave at a time."""

    batch: int
    heads: int
    head_dim: int
    live: int
    evict: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Of keys and values."""
        return 2 * self.batch * self.heads * self.live * self.head_dim * decode.DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Victims:
    """Who leaves at an update: places [batch, kv_heads, evict] in the order of slots, the same for all heads or any of each."""

    places: Tensor
    first: int | None


def victims(spec: PolicySpec, shape: Shape, seed: int) -> list[Victims]:
    """Who leaves, update by update.

    A policy that looks at attention evicts others from every head: here, any. Else the same leave everywhere, next to each other:
    the oldest behind the sinks.
    """
    heads, generator = (shape.batch, shape.heads), torch.Generator().manual_seed(seed)
    sets = max(1, min(_SETS, shape.live // shape.evict - 1))
    if spec.reads_attention:
        order = torch.rand(*heads, shape.live, generator=generator).argsort(-1)
        parts = order.split(shape.evict, dim=-1)[:sets]
        return [Victims(part.sort().values, None) for part in parts]
    sinks = min(4, shape.live - sets * shape.evict)
    starts = [sinks + index * shape.evict for index in range(sets)]
    return [Victims((start + torch.arange(shape.evict)).expand(*heads, -1).contiguous(), start) for start in starts]


def new_tokens(shape: Shape, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Random keys and values of some updates, [batch, kv_heads, evict, dim] each."""
    generator = torch.Generator().manual_seed(seed + 1)
    size = (shape.batch, shape.heads, shape.evict, shape.head_dim)
    dtype = decode.DTYPES[shape.dtype]
    return [
        (torch.randn(size, generator=generator).to(dtype), torch.randn(size, generator=generator).to(dtype))
        for _ in range(_SETS)
    ]


# -- what is measured --------------------------------------------------------------------------------------------------


def full_cache(spec: PolicySpec, shape: Shape, seed: int) -> SlotState:
    """The policy's cache with `live` tokens per head, in slots of the same numbers."""
    return decode.steady_state(
        spec, decode.Shape(shape.batch, shape.heads, 1, shape.head_dim, shape.live + 1, shape.dtype), seed
    )


def in_place(
    backend: Backend, state: SlotState, leaving: list[Victims], new: list[tuple[Tensor, Tensor]]
) -> Callable[[], object]:
    """The new tokens overwrite the victims."""
    slots = [victims.places.int() for victims in leaving]
    calls = [AttentionCall(key, key, value, None, 1.0) for key, value in new]
    turn = count()

    def update() -> None:
        index = next(turn)
        backend.replace(state, slots[index % len(slots)], calls[index % len(calls)])

    return update


def shift_and_append(shifting: Shifting, leaving: list[Victims], new: list[tuple[Tensor, Tensor]]) -> Callable[[], object]:
    """What is left moves together, between two buffers."""
    turn = count()
    rows = [shifting.rows(one.places) if one.first is None else None for one in leaving]

    def update() -> None:
        index = next(turn)
        which, tokens = index % len(leaving), new[index % len(new)]
        first, wanted = leaving[which].first, rows[which]
        if first is not None:
            shifting.shift(first, tokens)
        elif wanted is not None:
            shifting.gather(wanted, tokens)

    return update


def in_fresh_memory(
    keys: Tensor, values: Tensor, leaving: list[Victims], new: list[tuple[Tensor, Tensor]]
) -> Callable[[], object]:
    """The same as models' code has it; what it makes is thrown away."""
    turn = count()
    stay = [torch.ones(keys.shape[:3], dtype=torch.bool).scatter_(2, one.places, False) for one in leaving]

    def update() -> object:
        index = next(turn)
        which, tokens = index % len(leaving), new[index % len(new)]
        first = leaving[which].first
        if first is not None:
            return baselines.shift_in_fresh_memory(keys, values, first, tokens)
        return baselines.gather_in_fresh_memory(keys, values, stay[which], tokens)

    return update


def bench_update(
    spec: PolicySpec,
    shape: Shape,
    *,
    backend: str = "auto",
    repeats: int = 15,
    warmup: int = 3,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Time an update of the policy's cache among its baselines.

    `shift_of_copy` is how much of a plain copy's bandwidth the shift reaches: below a half it were no fair baseline.
    """
    server = choose(spec, backend, torch.device("cpu"), decode.DTYPES[shape.dtype])
    state, leaving, new = full_cache(spec, shape, seed), victims(spec, shape, seed), new_tokens(shape, seed)
    keys, values = (x[:, :, : shape.live] for x in (state.keys, state.values))
    shifting = Shifting(keys, values, shape.evict)
    fresh = measure.calibrated(in_fresh_memory(*shifting.content(), leaving, new))
    rounds = {
        "ours": measure.calibrated(in_place(server, state, leaving, new)),
        "shift": measure.calibrated(shift_and_append(shifting, leaving, new)),
        "copy": measure.calibrated(shifting.copy),
        "fresh": Candidate(fresh.run, fresh.calls, max(1, repeats // 5) if fresh.calls == 1 else 1),
    }
    times = measure.interleaved(rounds, repeats, warmup, tick=tick)
    facts = {"threads": torch.get_num_threads(), "repeats": repeats, "warmup": warmup, "bytes": shape.nbytes}
    return measure.finite({"policy": spec.stem, "backend": server.name, **asdict(shape), **facts, **figures(times, shape)})


def figures(times: dict[str, list[float]], shape: Shape) -> dict[str, float]:
    """Medians and quartiles, and of ratios the medians over rounds."""
    ours = times["ours"]
    return {
        **measure.summary("ms", ours),
        **measure.summary("shift_ms", times["shift"]),
        **measure.summary("speedup", measure.ratios(times["shift"], ours)),
        **measure.summary("copy_ms", times["copy"]),
        **measure.summary("copy_gbps", measure.rates(2 * shape.nbytes, times["copy"])),
        **measure.summary("shift_of_copy", measure.ratios(times["copy"], times["shift"])),
        **measure.summary("fresh_ms", times["fresh"]),
        **measure.summary("speedup_over_fresh", measure.ratios(times["fresh"], ours)),
    }
