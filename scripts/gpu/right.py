"""Experiment 9: are the kernels right? Each check tells what is wrong, line by line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.layout import SlotAfterSlot
from kvdsl.runtime.torch.backend import TorchBackend
from scripts.gpu.setting import (
    HAS_TRANSFORMERS,
    AttentionCall,
    Lines,
    PolicySpec,
    Setting,
    Shape,
    SlotState,
    Token,
    as_call,
    choose,
    clone_of,
    half,
    on_device,
    prepared,
)
from scripts.gpu.timing import captured

TOLERANCE = {"fp32": 2e-5, "fp16": 2e-3, "bf16": 1.6e-2}
COLUMN_TOLERANCE = {"fp32": 1e-5, "fp16": 1e-4, "bf16": 1e-4}
"""Of what a prompt leaves in the columns: on 16 bits attention's log-sum-exps may be off by that much."""
SCRATCH = ("part", "top", "total", "logits", "new_logits", "work")
"""Tensors of a workspace that a step writes before it reads them: poisoned before every step."""
_REORDERED = 50
"""Steps of rows in an order of their own."""


def run(setting: Setting, lines: Lines) -> int:
    """All checks; 1 if something is wrong."""
    lines.tell(**setting.environment(), missing=setting.missing())
    wrong = 0
    for spec in setting.specs():
        for what, found in (
            ("numerics", numerics(spec, setting)),
            ("prompts", prompted(spec, setting)),
            ("graph", replayed(spec, setting)),
            ("rows", of_some_rows(spec, setting)),
        ):
            wrong += _report(lines, f"{what}: {spec.stem}", found)
    if HAS_TRANSFORMERS:
        from scripts.gpu.whole import generated_alike

        for name in setting.names:
            wrong += _report(lines, f"generate: {name}", generated_alike(name, setting))
    return 1 if wrong else 0


def _report(lines: Lines, what: str, problems: Iterable[str]) -> int:
    """Say how a check went, at once; how many problems there are. A check that raises is one."""
    found: list[str] = []
    try:
        found += problems
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    lines.tell(check=what, wrong=[problem[:500] for problem in found])
    print(f"{what}: {'right' if not found else 'WRONG'}", *found, sep="\n  ", flush=True)
    return len(found)


# -- steps -------------------------------------------------------------------------------------------------------------


def numerics(spec: PolicySpec, setting: Setting) -> Iterator[str]:
    """Steps next to attention in float64 and next to the torch backend, which goes on from the same slots; each step twice.

    Where two tokens rank the same but for rounding, a policy that selects may attend to the other one.
    """
    for shape in setting.sizes.checked:
        backend, state, tokens = prepared(setting, spec, shape, **half(spec, shape))
        heads, differing = 0, 0
        for token in tokens:
            call = as_call(state, token)
            twin, again = clone_of(state), clone_of(state)
            exact = attention(state, token) if not (spec.compact or spec.selects) else None
            _poison(state)
            out, expected, second = (
                backend.decode(state, call),
                TorchBackend().decode(twin, call),
                backend.decode(again, call),
            )
            yield from (
                f"{shape}: {what} differ between two runs of one step" for what in _unlike(state, out, again, second)
            )
            errors = (out.double() - (expected.double() if exact is None else exact)).abs().amax(-1)
            if spec.selects:
                heads, differing = heads + errors.numel(), differing + int((~(errors <= 2 * TOLERANCE[shape.dtype])).sum())
            elif not float(errors.max()) <= TOLERANCE[shape.dtype]:
                yield f"{shape}: outputs differ by {float(errors.max()):.2g}"
            if spec.sketches and not torch.equal(state.sketch, twin.sketch):
                yield f"{shape}: sketches differ"
            same = (state.position.sort(-1).values == twin.position.sort(-1).values).all(-1)
            heads, differing = heads + same.numel(), differing + int((~same).sum())
            off = _columns_apart(state, twin, same)
            if not off <= 1e-4:
                yield f"{shape}: columns differ by {off:.2g}"
        if differing > max(1, 0.02 * heads):  # scores that are equal but for rounding
            yield f"{shape}: {differing} of {heads} head-steps keep or attend to other tokens"


def _poison(state: SlotState) -> None:
    """NaN into what a step may read only after it wrote it."""
    for name in SCRATCH if state.workspace is not None else ():
        state.workspace.tensors[name].fill_(torch.nan)


def _unlike(state: SlotState, out: Tensor, other: SlotState, second: Tensor) -> Iterator[str]:
    if not torch.equal(out, second):
        yield "outputs"
    there = state.position >= 0
    if not torch.equal(state.position, other.position):
        yield "positions"
    elif state.spec.columns and not torch.equal(*(x.columns.where(there[None], 0).nan_to_num() for x in (state, other))):
        yield "columns"


def _columns_apart(state: SlotState, twin: SlotState, same: Tensor) -> float:
    """How far columns differ in slots that hold the same token, of heads that keep the same."""
    if not state.spec.columns:
        return 0.0
    alike = same[None, :, :, None] & (state.position == twin.position)[None] & (state.position >= 0)[None]
    return float((state.columns - twin.columns).masked_fill(~alike, 0).abs().max())


def attention(state: SlotState, token: Token) -> Tensor:
    """What the token attends to, in float64: [batch, 1, query_heads, dim]."""
    query, key, value = (x.double() for x in token)
    keys = torch.cat([state.keys.double(), key], 2)
    values = torch.cat([state.values.double(), value], 2)
    there = torch.cat([state.position >= 0, torch.ones_like(state.position[..., :1], dtype=torch.bool)], -1)
    grouped = query.unflatten(1, (keys.shape[1], -1)).squeeze(3)
    logits = grouped @ keys.transpose(-1, -2) * keys.shape[-1] ** -0.5
    return (logits.masked_fill(~there[:, :, None], -torch.inf).softmax(-1) @ values).flatten(1, 2)[:, None]


def replayed(spec: PolicySpec, setting: Setting) -> Iterator[str]:
    """A step in one CUDA graph, replayed many times, gives what the same step gives outside of it, bit for bit."""
    if not spec.triton_source.exists() or not setting.real:
        return
    shape: Shape = setting.sizes.checked[0]
    backend, state, tokens = prepared(setting, spec, shape, **half(spec, shape))
    twin, static = clone_of(state), tuple(x.clone() for x in tokens[0])
    graph, out = captured(lambda: backend.decode(state, as_call(state, static)))  # type: ignore[arg-type]
    for tensor, before in zip(state.tensors().values(), twin.tensors().values(), strict=True):
        tensor.copy_(before)  # capturing may have run steps
    for number in range(setting.sizes.replays):
        token = tokens[number % len(tokens)]
        for to, x in zip(static, token, strict=True):
            to.copy_(x)
        graph.replay()
        expected = backend.decode(twin, as_call(twin, token))
        if not torch.equal(out, expected):
            yield f"replay {number}: outputs differ by {float((out - expected).abs().max()):.2g}"
            return
    if not torch.equal(state.position, twin.position) or not torch.equal(state.seen, twin.seen):
        yield "what is kept differs"


def of_some_rows(spec: PolicySpec, setting: Setting) -> Iterator[str]:
    """Steps of rows in any order, in one CUDA graph that is told which, give what they give in order, bit for bit, and a row that is
    not real is left alone.
    """
    shape: Shape = next(one for one in setting.sizes.checked if one.batch == 2)
    backend, state, tokens = prepared(setting, spec, shape, **half(spec, shape))
    if backend.name != "triton" or type(state.layout) is not SlotAfterSlot:
        return
    from kvdsl.runtime.gpu.rows import Rows

    rows, static = Rows(cast("Any", backend), state), tuple(x.clone() for x in tokens[0])
    twin, draw = clone_of(state), torch.Generator().manual_seed(0)
    which = torch.arange(shape.batch, dtype=torch.int32, device=setting.device)
    real = torch.ones(shape.batch, 1, dtype=torch.bool, device=setting.device)

    def step() -> Tensor:
        return rows.decode(which, as_call(state, static)._replace(real=real))  # type: ignore[arg-type]

    graph, out = captured(step) if setting.real else (None, step())
    for tensor, before in zip(state.tensors().values(), twin.tensors().values(), strict=True):
        tensor.copy_(before)
    for number in range(min(setting.sizes.replays, _REORDERED)):
        token, order = tokens[number % len(tokens)], torch.randperm(shape.batch, generator=draw).to(setting.device)
        which.copy_(order)
        real[0] = number % 3 > 0
        for to, x in zip(static, token, strict=True):
            to.copy_(x[order])
        if graph is None:
            out = step()
        else:
            graph.replay()
        in_order = torch.ones_like(real).index_put_((order,), real)
        expected = backend.decode(twin, as_call(twin, token)._replace(real=in_order))[order]
        if not torch.equal(out, expected):
            yield f"{shape}: step {number}: outputs differ by {float((out - expected).abs().max()):.2g}"
            return
    if not torch.equal(state.position, twin.position) or not torch.equal(state.seen, twin.seen):
        yield f"{shape}: what is kept differs"


# -- prompts -----------------------------------------------------------------------------------------------------------


def prompted(spec: PolicySpec, setting: Setting) -> Iterator[str]:
    """What prompts leave in the columns next to a matrix of all probabilities in float64."""
    if not spec.reads_attention or not spec.triton_source.exists():
        return
    for shape in setting.sizes.checked_prompts:
        state, tensors = slot_state(spec, {"budget": shape.length}), on_device(setting, shape)
        backend = choose(spec, "triton", torch.device(setting.device), tensors[0].dtype)
        backend.prefill(state, AttentionCall(*tensors, real=None, scaling=shape.head_dim**-0.5))
        expected = statistics_of(*tensors[:2])
        order = state.position.argsort(-1)[..., -shape.length :]  # nothing was evicted; free slots come first
        for name, column in state.column_index.single(state.columns).items():
            if name not in expected:
                continue
            off = (column.gather(-1, order).double() - expected[name]).abs() / expected[name].clamp(min=1)
            if not float(off.max()) <= COLUMN_TOLERANCE[shape.dtype]:
                yield f"{shape}: `{name}` is off by {float(off.max()):.2g}"


def statistics_of(query: Tensor, key: Tensor) -> dict[str, Tensor]:
    """What the policies' columns should hold, [batch, kv_heads, tokens] each."""
    grouped = query.double().unflatten(1, (key.shape[1], -1))
    logits = torch.einsum("bhgqd,bhsd->bhgqs", grouped, key.double()) * key.shape[-1] ** -0.5
    hidden = torch.ones_like(logits, dtype=torch.bool).triu(1)
    attn = logits.masked_fill(hidden, -torch.inf).softmax(-1).mean(2)
    return {"sum_attn": attn.sum(2), "sum_attn_squared": attn.square().sum(2), "last_attn": attn[:, :, -1]}
