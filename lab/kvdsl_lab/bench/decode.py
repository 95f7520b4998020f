"""How fast one decode step is: place, attend, observe, settle in the steady state of a full cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.loading import load
from kvdsl.runtime.backend import AttentionCall, Backend
from kvdsl.runtime.backends import choose
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.order import FREE
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.columns import INITIAL
from kvdsl_lab.bench import baselines, measure, selecting
from kvdsl_lab.bench.baselines import Cache, Token
from kvdsl_lab.bench.measure import Candidate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SETTLING = 16
"""Steps before anything is timed, so that the state columns hold what attention gave them."""

_TOKENS = 8
"""Different tokens that the steps take in turn."""

_EAGER_REPEATS = 5
_EXPANDED_LIMIT = 6 << 30
"""An expanded cache larger than this is not tried."""

_COPIED_LIMIT = 512 << 20
"""Beside a policy that selects, nor is what expands one larger than this anew at every step: it reads all that the policy skips."""


@dataclass(frozen=True)
class Shape:
    """One layer's cache while it attends: `live` slots per KV head."""

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    live: int
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        """As torch names it."""
        return DTYPES[self.dtype]


# -- what is measured --------------------------------------------------------------------------------------------------


def steady_state(spec: PolicySpec, shape: Shape, seed: int = 0, device: str = "cpu", **params: float) -> SlotState:
    """A full cache: budget = live - 1, so that `live` slots are attended and one is evicted at each step.

    Of a policy that never evicts, `decode_step` takes every token back.

    Args:
        params: values of the policy's params other than their defaults.
    """
    generator = torch.Generator(device).manual_seed(seed)
    filled = shape.live - 1
    given = ({"budget": int(filled)} if "budget" in spec.params else {}) | params
    prompt = torch.full((shape.batch,), filled, dtype=torch.int32, device=device)
    layer = selecting.first_selecting_layer(spec, given, prompt)
    state = slot_state(spec, given, layer=layer, layers=selecting.LAYERS, seed=seed)
    heads = (shape.batch, shape.kv_heads, filled)
    numbers = state.settings.resolve(prompt)
    state.column_index.size_rings(state.settings, numbers, None)
    columns = torch.zeros(state.column_index.rows, *heads, device=device)
    for column, rule in zip(columns, spec.column_rules, strict=False):  # rings, behind, need no beginning
        column.copy_(
            torch.rand(heads, generator=generator, device=device) if rule == "token" else torch.tensor(INITIAL[rule])
        )
    kept = {
        "keys": _random((*heads, shape.head_dim), shape, generator),
        "values": _random((*heads, shape.head_dim), shape, generator),
        "position": torch.arange(filled, dtype=torch.int32, device=device).expand(heads).contiguous(),
        "columns": columns,
    }
    kept |= state.format.rows_by_name(kept["keys"], kept["values"])
    state.room.reserves = True
    state.store(kept, prompt, numbers)
    if spec.sketches:
        selecting.sketch(state, _random((shape.batch, shape.kv_heads * shape.group, 1, shape.head_dim), shape, generator))
    state.make_room(1)  # where it grows; from now on every token is taken back
    state.room.grows = False
    return state


def new_tokens(shape: Shape, seed: int = 0, device: str = "cpu", count: int = _TOKENS) -> list[Token]:
    """Random queries, keys and values of `count` steps."""
    generator = torch.Generator(device).manual_seed(seed + 1)
    query, cached = (
        (shape.batch, shape.kv_heads * shape.group, 1, shape.head_dim),
        (shape.batch, shape.kv_heads, 1, shape.head_dim),
    )
    return [tuple(_random(size, shape, generator) for size in (query, cached, cached)) for _ in range(count)]  # type: ignore[misc]


def _random(size: tuple[int, ...], shape: Shape, generator: torch.Generator) -> Tensor:
    return torch.randn(size, generator=generator, device=generator.device).to(shape.torch_dtype)


def decode_step(backend: Backend, state: SlotState) -> Callable[[Token], Tensor]:
    """One step of the policy; without eviction the new token is taken back, so that the cache stays as full as it is."""
    scaling = state.keys.shape[-1] ** -0.5
    filled = int(state.seen[0])
    rope = rotation(state.keys.shape[-1]) if state.spec.compact else None

    def step(token: Token) -> Tensor:
        query, key, value = (x.to(state.dtype) for x in token)
        out = backend.decode(state, AttentionCall(query, key, value, None, scaling, rope=rope))
        if not state.spec.bounded:
            state.position[:, :, filled] = FREE
            state.seen.fill_(filled)
        return out

    return selecting.on_schedule(state, step)


def rotation(head_dim: int) -> Rope:
    """How Llama 2 rotates a head of this size: policies with compact positions rotate every key that moved."""
    return Rope(1e4 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim), "half")


def live_bytes(state: SlotState) -> int:
    """Keys and values of what a step attends to: the live slots and the new token's."""
    live = int((state.position >= 0).sum()) + state.position.shape[0] * state.position.shape[1]
    return live * sum(pool.shape[-1] * pool.element_size() for pool in (state.layout.key_pool, state.layout.value_pool))


# -- what it is compared with ------------------------------------------------------------------------------------------


def fastest_sdpa(cache: Cache, tokens: list[Token]) -> tuple[str, Callable[[Token], Tensor]]:
    """The faster of the two ways in which models call torch's fused attention, timed here and now."""
    ways = {"enable_gqa": baselines.sdpa_grouped(cache)}
    if cache.nbytes * cache.group <= _EXPANDED_LIMIT:
        ways["expanded"] = baselines.sdpa_expanded(cache)
    timed = measure.interleaved({name: Candidate(baselines.repeated(way, tokens)) for name, way in ways.items()}, 3, 1)
    best = min(timed, key=lambda name: measure.quartiles(timed[name])[1])
    return best, ways[best]


def _first(held: tuple[Tensor, Tensor], shape: Shape, dtype: torch.dtype) -> Cache:
    """A copy of the slots that are attended to."""
    keys, values = (x[:, :, : shape.live].to(dtype, copy=True) for x in held)
    return Cache(keys, values, shape.group)


def candidates(
    backend: Backend, state: SlotState, shape: Shape, tokens: list[Token], repeats: int
) -> tuple[dict[str, Candidate], str]:
    """Everything to be timed, and which way to call SDPA won. The baselines have a cache of their own.

    A policy that selects is compared with our own dense step as well; and one sample of it has as many steps as it takes for a
    sketch to be refreshed.
    """
    cache = _first((state.keys, state.values), shape, shape.torch_dtype)
    stored = _first((state.layout.keys(state.slots), state.layout.values(state.slots)), shape, state.layout.dtype)
    scope = len(state.spec.columns) > 1
    way, sdpa = fastest_sdpa(cache, tokens)
    found = {
        "ours": _in_periods(measure.calibrated(baselines.repeated(decode_step(backend, state), tokens)), state),
        "read": measure.calibrated(lambda: baselines.streaming_read(stored)),
        "sdpa": measure.calibrated(baselines.repeated(sdpa, tokens)),
        "folded": measure.calibrated(baselines.repeated(baselines.sdpa_folded(cache), tokens)),
    }
    if state.spec.selects:
        found["dense"] = _dense(backend, shape, tokens)
    for name, attend in (
        ("grouped", baselines.attend_grouped), ("eager", baselines.attend_eager),
        ("preallocated", baselines.attend_eager_preallocated),
    ):  # fmt: skip
        if state.spec.selects and name != "grouped" and cache.nbytes * cache.group > _COPIED_LIMIT:
            continue
        evicting = baselines.Evicting(cache, attend(cache), by_std=scope)
        found[name] = measure.calibrated(baselines.repeated(evicting.step, tokens))
    seldom = max(1, repeats // _EAGER_REPEATS)
    for name in ("eager", "preallocated", "grouped") if state.spec.selects else ("eager",):
        if name in found and found[name].calls == 1:
            found[name] = Candidate(found[name].run, every=seldom)
    return found, way


def _in_periods(candidate: Candidate, state: SlotState) -> Candidate:
    """Samples of whole periods."""
    period = selecting.period(state)
    return Candidate(candidate.run, calls=-(-candidate.calls // period) * period)


def _dense(backend: Backend, shape: Shape, tokens: list[Token]) -> Candidate:
    """The step of `full` over as many slots."""
    spec = load("full").spec
    server = choose(spec, backend.name, torch.device("cpu"), shape.torch_dtype)
    return measure.calibrated(baselines.repeated(decode_step(server, steady_state(spec, shape)), tokens))


# -- the figures -------------------------------------------------------------------------------------------------------


def bench_decode(
    spec: PolicySpec,
    shape: Shape,
    *,
    backend: str = "auto",
    repeats: int = 15,
    warmup: int = 3,
    seed: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Time the policy's decode step among its baselines.

    Raises:
        KvdslError: if the policy's settings leave no room for `live` slots, or the backend cannot serve it.
    """
    torch.manual_seed(seed)
    server = choose(spec, backend, torch.device("cpu"), shape.torch_dtype)
    state = steady_state(spec, shape, seed)
    tokens = new_tokens(shape, seed)
    step = decode_step(server, state)
    for index in range(SETTLING if spec.bounded else 1):
        step(tokens[index % len(tokens)])
    size = live_bytes(state)
    _check_steady(state, shape)
    rounds, way = candidates(server, state, shape, tokens, repeats)
    times = measure.interleaved(rounds, repeats, warmup, tick=tick)
    head = {"policy": spec.stem, "backend": server.name, **asdict(shape), "bytes": size, "threads": torch.get_num_threads()}
    facts = {
        "repeats": repeats, "warmup": warmup, "eager_repeats": measure.taken(times.get("eager", [])),
        "calls_per_sample": rounds["ours"].calls, "sdpa_call": way,
    }  # fmt: skip
    parts = {"breakdown": selecting.breakdown(server, state, step, tokens)} if spec.selects else {}
    return measure.finite({**head, **facts, **figures(times, size), **parts})


def _check_steady(state: SlotState, shape: Shape) -> None:
    """The bench means what it says only where every step attends to `live` slots."""
    live = (state.position >= 0).sum(-1)
    if state.spec.bounded and bool((live != shape.live - 1).any()):
        raise KvdslError(
            f"`{state.spec.stem}` holds {int(live.min())} to {int(live.max())} tokens between steps, not {shape.live - 1}: this "
            f"measurement is for policies that evict one token a step; leave its trigger and slack at their defaults"
        )


def figures(times: Mapping[str, list[float]], size: int) -> dict[str, float]:
    """Medians and quartiles, and of ratios the medians over rounds."""
    ours = times["ours"]
    found = {
        **measure.summary("ms", ours),
        **measure.summary("gbps", measure.rates(size, ours)),
        **measure.summary("read_gbps", measure.rates(size, times["read"])),
        **measure.summary("roofline", measure.ratios(times["read"], ours)),
    }
    names = {
        "sdpa": "sdpa", "eager": "eager", "grouped": "grouped", "folded": "sdpa_folded", "preallocated": "eager_preallocated",
    }  # fmt: skip
    if "dense" in times:
        names["dense"] = "dense"
    for key, name in names.items():
        taken = times.get(key, [math.nan] * len(ours))
        found |= measure.summary(f"{name}_ms", taken)
        found |= measure.summary(f"vs_{name}", measure.ratios(taken, ours))
    return found
