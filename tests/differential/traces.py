"""Random policies on random traces, step-locked with the interpreter.

The rule (design: "what good means here"). At each step the interpreter starts from the backend's own keys, values, positions,
columns and sketches. Kept sets must be equal and columns agree to float32's precision. Where they do not, the step is repeated on
ranges (`shadow`), which bound what float32 arithmetic may compute from that very state: if a column lies outside, or if no order
of eviction within the bounds frees just these slots, the backend is wrong. If not, and kept sets, sketches or columns with a
threshold in them differ, then a threshold, a score or the boundary of a scope lies within precision: the step is *near*, and
counted. (Columns may also differ because an expression amplifies rounding errors; then they agree to its precision.) No tolerance
is chosen for any policy.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvdsl.compiler import package
from kvdsl.errors import KvdslError
from kvdsl.interp import Call, Head, Layer, Step, resolve
from kvdsl.interp.rotation import Rope as ExactRope
from kvdsl.ir.nodes import Expr, Policy
from kvdsl.ir.printer import print_policy
from kvdsl.ir.visitors import walk
from kvdsl.passes.columns import add_columns
from kvdsl.runtime.call import AttentionCall
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.layouts import slot_state
from kvdsl.runtime.torch.eviction import Together

from .inputs import INPUTS
from .precision import FUSED_16_BITS, Range, choose, exactly, widened
from .random_policies import mixes_dims
from .shadow import OutOfBounds, Settle, Shadow

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]

OUT_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""How far outputs may lie from float64: they are rounded to the model's dtype once."""

CLOSE = 1e-6
"""Columns that are closer than this need no bounds: absolutely, and times ten relatively."""

LAYERS, HEAD_OFFSET = 4, 3
RANDOM_INPUTS = ("normal", "peaky", "large")


@dataclass(frozen=True)
class Trace:
    """A trace. Rows are left-padded by up to `padding` tokens; `layers` are those that run, of `LAYERS`.

    `chunks`: forwards that the prompt comes in; `ragged`: some rows have no token in some forwards after it; `later`: tokens of a prompt
    after the steps, where steps follow again, of which the second row has fewer and the third none; `expected`: prompts count as so
    many tokens at least.
    """

    group: int = 2
    head_dim: int = 8
    value_dim: int | None = None
    batch: int = 1
    kv_heads: int = 2
    layers: tuple[int, ...] = (1,)
    dtype: torch.dtype = torch.float32
    budget: float | None = None
    prompt: int = 9
    chunks: int = 1
    steps: int = 6
    padding: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    rope: str = "half"
    inputs: str = "normal"
    seed: int = 0
    at_once: int = 1
    ragged: bool = False
    later: int = 0
    expected: int = 0
    given: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        fields = self.__dataclass_fields__
        shown = [f"{k}={v!r}".replace("torch.", "") for k, v in self.__dict__.items() if v != fields[k].default]
        return f"Trace({', '.join(shown)})"


def random_trace(policy: Policy, seed: str) -> Trace:
    """Shapes, dtypes, padding and inputs for a policy, drawn at random; small, for speed."""
    draw = random.Random(seed)
    padding = draw.choice([0, 0, 0, 3])
    together = policy.victims == "layers"
    budgets: list[float | None] = [None] if policy.budget is None else [None, None, 6, 7, 12, 0.75]
    if policy.budget is not None and not any(param.name == "budget" for param in policy.params):
        budgets = [None]
    return Trace(
        group=draw.choice([1, 2, 2, 4, 8]),
        head_dim=draw.choice([4, 8, 6, 32]),
        value_dim=None if mixes_dims(policy) else draw.choice([None, None, 6]),
        batch=draw.choice([1, 2, 2]) if padding == 0 else 2,
        kv_heads=draw.choice([1, 2]) if policy.victims == "own" and policy.across is None else draw.choice([1, 2, 3]),
        layers=draw.choice([(0, 1), (0, 1, 2)]) if together else (draw.randrange(LAYERS),),
        dtype=draw.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
        budget=draw.choice(budgets),
        prompt=padding + draw.choice([1, 5, 9, 14]),
        chunks=draw.choice([1, 1, 1, 2]),
        steps=6,
        padding=padding,
        window=draw.choice([None, None, None, 5]),
        softcap=draw.choice([None, None, 5.0]),
        sinks=draw.random() < 0.2,
        rope=draw.choice(["half", "interleaved", "partial", "none"]),
        inputs=draw.choice(["normal"] * 8 + ["peaky"] * 4 + ["large", "large", "nan", "inf", "zeros", "ties"]),
        seed=draw.randrange(2**31),
        at_once=1 if together else draw.choice([1, 1, 1, 2]),
        ragged=draw.random() < 0.15,
        later=draw.choice([0, 0, 0, 2, 7]),
    )


@dataclass
class Tally:
    """Head-steps compared; those where a boundary lay within precision and the outcome differed; and what went wrong.

    `refused`: traces that the runtime refused in words, as a budget that its keeps exceed. `checked`, `undecided`: head-steps for
    which the ranges were computed although nothing differed, and those of them that could have come out in more than one way.
    """

    traces: int = 0
    steps: int = 0
    near: int = 0
    refused: int = 0
    checked: int = 0
    undecided: int = 0
    failures: list[str] = field(default_factory=list)

    COUNTS = ("traces", "steps", "near", "refused", "checked", "undecided")

    def add(self, other: Tally) -> None:
        for name in self.COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.failures += other.failures


# -- packages ------------------------------------------------------------------------------------------------------------


def spec_of(policy: Policy, files: Mapping[str, str] | None = None) -> PolicySpec:
    """Compile a policy and import its package from memory."""
    files = package(policy, print_policy(policy)) if files is None else files
    name = f"_kvdsl_random_{policy.stem}"
    whole = ModuleType(name)
    whole.__path__ = []
    modules = {name: whole}
    for part in ("kernels_torch", "cache"):
        modules[f"{name}.{part}"] = made = ModuleType(f"{name}.{part}")
        made.__file__, made.__package__ = f"/nowhere/{name}/{part}.py", name
    sys.modules.update(modules)
    try:
        for part in ("kernels_torch", "cache"):
            module = modules[f"{name}.{part}"]
            exec(compile(files[f"{part}.py"], f"<{part} of {policy.stem}>", "exec"), module.__dict__)
            setattr(whole, part, module)
    finally:
        for own in modules:
            del sys.modules[own]
    spec: PolicySpec = getattr(modules[f"{name}.cache"], f"{policy.name}Cache").spec
    return spec


# -- traces --------------------------------------------------------------------------------------------------------------


def run_policy(policy: Policy, backend: Any, trace: Trace, *, spec: PolicySpec | None = None, check: bool = False) -> Tally:
    """One trace of one policy on a backend.

    Args:
        policy: folded, without state columns.
        backend: of `kvdsl.runtime.backends`.
        check: compute the ranges of every step, to see how much they leave open and that the interpreter lies in them.
    """
    run = Run(add_columns(policy), spec or spec_of(policy), backend, trace, check)
    try:
        run.run()
    except KvdslError as error:
        if not any(word in str(error) for word in ("protects", "remembers a number of queries that depends on the prompt")):
            raise
        run.tally.refused += 1
    run.tally.traces += 1
    return run.tally


class Run:
    """One trace on a backend and, step by step, in the interpreter."""

    def __init__(self, policy: Policy, spec: PolicySpec, backend: Any, trace: Trace, check: bool = False) -> None:
        self.policy, self.trace, self.backend, self.check = policy, trace, backend, check
        self.rng = np.random.default_rng(trace.seed)
        self.given = ({} if trace.budget is None else {"budget": trace.budget}) | dict(trace.given)
        given = {name: self.given.get(name) for name in spec.params}
        self.states = [
            slot_state(spec, given, layer=layer, layers=LAYERS, head_offset=HEAD_OFFSET, seed=trace.seed)
            for layer in trace.layers
        ]
        for state in self.states:
            state.expected = trace.expected
        if policy.victims == "layers":
            together = Together()
            for state in self.states:
                together.join(state)
        generator = torch.Generator().manual_seed(trace.seed)
        self.sinks = torch.randn(trace.kv_heads * trace.group, generator=generator) if trace.sinks else None
        self.rope = _ropes(trace)[0]
        self.prompts = [0] * trace.batch
        self.tally = Tally()

    def run(self) -> None:
        trace = self.trace
        pads = [trace.padding * row // max(1, trace.batch - 1) for row in range(trace.batch)]
        real = torch.tensor([[t >= pad for t in range(trace.prompt)] for pad in pads])
        for part in real.split(-(-trace.prompt // trace.chunks), dim=1):
            self._take_prompt(part)
        self._decode()
        if trace.later:
            first = torch.tensor([min(trace.later, trace.later * row // 2) for row in range(trace.batch)])
            self._take_prompt(self._some(trace.later) & (torch.arange(trace.later) >= first[:, None]))
            self._decode()

    def _take_prompt(self, real: Tensor) -> None:
        """A forward of a prompt: of all tokens so far, in rows to which any come."""
        seen = self.states[0].seen.tolist() if self.states[0].allocated else self.prompts
        counts = zip(self.prompts, seen, real.sum(1).tolist(), strict=True)
        self.prompts = [before + new if new else prompt for prompt, before, new in counts]
        self._forward(real, prompt=True)

    def _decode(self) -> None:
        for _ in range(0, self.trace.steps, self.trace.at_once):
            self._forward(self._some(self.trace.at_once), prompt=False)

    def _some(self, tokens: int) -> Tensor:
        """Which of so many tokens come, bool [batch, tokens]: of ragged rows not all."""
        kept = 0.7 if self.trace.ragged else 1.0
        return torch.from_numpy(self.rng.random((self.trace.batch, tokens)) < kept)

    def _call(self, real: Tensor) -> AttentionCall:
        trace, (batch, tokens) = self.trace, real.shape
        heads = trace.kv_heads * trace.group
        shapes = [
            (heads, trace.head_dim),
            (trace.kv_heads, trace.head_dim),
            (trace.kv_heads, trace.value_dim or trace.head_dim),
        ]
        query, key, value = (
            torch.from_numpy(INPUTS[trace.inputs](self.rng, (batch, n, tokens, dim))).to(trace.dtype) for n, dim in shapes
        )
        padded = None if real.all() else real
        scaling = trace.head_dim**-0.5
        return AttentionCall(query, key, value, padded, scaling, trace.softcap, trace.window, self.sinks, self.rope)

    def _layer(self, row: int) -> Layer:
        """The interpreter of a row: all heads, layer by layer."""
        trace = self.trace
        sinks = [None] * trace.kv_heads
        if self.sinks is not None:
            sinks = list(self.sinks.double().numpy().reshape(trace.kv_heads, -1))
        calls = [Call(trace.head_dim**-0.5, trace.softcap, trace.window, own, _ropes(trace)[1]) for own in sinks]
        numbers = [
            resolve(self.policy, self.given, self.prompts[row], layer, LAYERS, expected=trace.expected)
            for layer in trace.layers
        ]
        return Layer(self.policy, numbers, calls * len(numbers), trace.kv_heads, HEAD_OFFSET, trace.seed)

    def _heads(self, layer: Layer, b: int) -> list[Head]:
        """A row's heads as the backend has them."""
        trace = self.trace
        if not self.states[0].allocated:
            return layer.empty(trace.head_dim, trace.value_dim or trace.head_dim)
        heads = []
        for index, machine in enumerate(layer.machines):
            state, h = self.states[index // trace.kv_heads], index % trace.kv_heads
            columns = {name: _array(x[b, h]) for name, x in state.single_columns(state.columns).items()}
            columns |= {name: _array(x[:, b, h]).T for name, x in state.rings(state.columns).items()}
            sketch = state.sketch[b, h].numpy() if state.has_sketch else None
            heads.append(
                machine.resume(
                    _array(state.keys[b, h]),
                    _array(state.values[b, h]),
                    state.position[b, h].numpy(),
                    columns,
                    int(state.seen[b]),
                    None if sketch is None else sketch[sketch >= 0],
                )
            )
        return heads

    def _forward(self, real: Tensor, *, prompt: bool) -> None:
        trace = self.trace
        layers = [self._layer(b) for b in range(trace.batch)]
        before = [self._heads(layer, b) for b, layer in enumerate(layers)]
        calls = [self._call(real) for _ in self.states]
        run = self.backend.prefill if prompt else self.backend.decode
        outs = [run(state, call) for state, call in zip(self.states, calls, strict=True)]
        for b, layer in enumerate(layers):
            chosen = real[b].nonzero()[:, 0]
            if not len(chosen):
                self._check_idle(b, before[b], self._heads(layer, b))
                continue
            q = np.concatenate([_array(call.query[b].unflatten(0, (trace.kv_heads, -1))[:, :, chosen]) for call in calls])
            k, v = (np.concatenate([_array(getattr(c, x)[b][:, chosen]) for c in calls]) for x in ("key", "value"))
            got = np.concatenate([_array(out[b, chosen].unflatten(1, (trace.kv_heads, -1)).transpose(0, 1)) for out in outs])
            fused = 0.0 if trace.dtype == torch.float32 else FUSED_16_BITS
            step = RowStep(layer, before[b], q.swapaxes(1, 2), k, v, prompt=prompt, fused=fused)
            self._compare(b, step, self._heads(layer, b), got)

    def _check_idle(self, row: int, before: list[Head], after: list[Head]) -> None:
        """A row without a token keeps what it has."""
        for old, new in zip(before, after, strict=True):
            if sorted(old.position) != sorted(new.position) or old.seen != new.seen:
                self.tally.failures.append(f"row {row} changed without a token")

    def _compare(self, row: int, step: RowStep, after: list[Head], outs: Array) -> None:
        tally, tolerance = self.tally, OUT_TOLERANCE[self.trace.dtype]
        tally.steps += len(after)
        differing = step.differing(after, outs, tolerance)
        if differing or self.check:
            problem = step.problem(after, outs, tolerance)
            if problem:
                tally.failures.append(f"row {row} at head-step {tally.steps}: {problem}")
            else:
                tally.near += step.near
        if self.check:
            tally.checked += len(after)
            tally.undecided += len(after) * step.undecided


class Start:
    """What a head was before a forward, as much as its shadow needs."""

    def __init__(self, head: Head) -> None:
        self.key, self.value, self.position, self.seen = head.key, head.value, head.position, head.seen
        self.sketch = head.sketch
        self.columns = {name: x.copy() for name, x in head.columns.items()}  # the only thing that changes in place


class RowStep:
    """What one forward did to the heads of one row: the interpreter's steps, and on demand their ranges.

    Args:
        q, k, v: [heads, L, G, D], [heads, L, D], [heads, L, Dv].
        fused: the precision of the attention that serves prompts.
    """

    def __init__(self, layer: Layer, heads: list[Head], q: Array, k: Array, v: Array, *, prompt: bool, fused: float) -> None:
        self.fused = fused
        self.layer, self.start, self.prompt = layer, [Start(head) for head in heads], prompt
        self.q, self.k, self.v = q, k, v
        self.heads = heads
        self.tokens: list[tuple[list[Step], list[Indices | None]]] = []
        if prompt:
            self.tokens.append((layer.prefill(heads, q, k, v), [head.sketch for head in heads]))
            self.outs = np.stack([step.out for step in self.tokens[0][0]])
        else:
            for t in range(q.shape[1]):
                self.tokens.append((layer.decode(heads, q[:, t], k[:, t], v[:, t]), [head.sketch for head in heads]))
            self.outs = np.stack([[step.out for step in steps] for steps, _ in self.tokens], axis=1)
        self.near = 0
        self.undecided = False

    # -- without ranges --------------------------------------------------------------------------------------------------

    def differing(self, after: Sequence[Head], outs: Array, tolerance: float) -> int:
        """How many heads do not agree with a backend's."""
        self.near = 0
        return sum(not self._same(index, head, outs[index], tolerance) for index, head in enumerate(after))

    def _same(self, index: int, after: Head, out: Array, tolerance: float) -> bool:
        head = self.heads[index]
        if set(after.position.tolist()) != set(head.position.tolist()) or not _equal(after.sketch, head.sketch):
            self.near += 1
            return False
        order = _places(head.position, after.position)
        shadow = Shadow(self.layer.machines[index], after)
        for column in self.layer.policy.columns:
            got, expected = after.columns[column.name], head.columns[column.name][order]
            if column.rule == "ring":
                valid = shadow.ring_places(column)
                got, expected = (x[:, : valid.shape[1]][valid] for x in (got, expected))
            if not np.allclose(got, expected, rtol=10 * CLOSE, atol=CLOSE, equal_nan=True):
                self.near += _jumps(column.body)
                return False
        if not _close(out, self.outs[index], tolerance):
            self.near += 1
            return False
        return True

    # -- on ranges -------------------------------------------------------------------------------------------------------

    @np.errstate(all="ignore")
    def problem(self, after: Sequence[Head], outs: Array, tolerance: float) -> str | None:
        """What no rounding explains."""
        try:
            return self._problem(after, outs, tolerance)
        except OutOfBounds as found:
            return f"{found} is out of bounds"

    def _problem(self, after: Sequence[Head], outs: Array, tolerance: float) -> str | None:
        shadows = [Shadow(machine, head) for machine, head in zip(self.layer.machines, self.start, strict=True)]
        bounds: list[list[Range]] = [[] for _ in shadows]
        for number, (steps, sketches) in enumerate(self.tokens):
            for part in self._parts(shadows, number, steps, sketches):
                if isinstance(part, str):
                    return part
                for own, out in zip(bounds, part, strict=True):
                    own.append(out)
            if any(shadow.undecided for shadow in shadows):
                self.undecided = True
                return None  # what a query attends to is open, and with it everything else
            if steps is not self.tokens[-1][0] and not self._settle(shadows, steps):
                return None  # what an earlier token left undecided, later ones may show in anything
        steps = self.tokens[-1][0]
        return (
            self._interpreter_problem(shadows, steps)
            or self._output_problem(bounds, outs, tolerance)
            or self._kept_problem(shadows, steps, after)
            or self._column_problem(shadows, after)
        )

    def _parts(
        self, shadows: Sequence[Shadow], number: int, steps: Sequence[Step], sketches: Sequence[Indices | None]
    ) -> Iterator[list[Range] | str]:
        """The forward of a token, or of the prompt, up to its last settle: outputs of each head, [L, G, Dv], part by part."""
        if not self.prompt:
            if any(step.earlier for step in steps) and not self._settle(shadows, [step.earlier[0] for step in steps]):
                self.undecided = True
                for shadow in shadows:
                    shadow.undecided = True
            yield [
                shadow.token(
                    self.q[i, number], self.k[i, number], self.v[i, number],
                    None if steps[i].selected is None else steps[i].position[steps[i].selected], sketches[i],
                )
                for i, shadow in enumerate(shadows)
            ]  # fmt: skip
            return
        parts = list(self._blocks())
        for index, part in enumerate(parts):
            yield [
                shadow.prompt(self.q[i, part], self.k[i, part], self.v[i, part], self.fused)
                for i, shadow in enumerate(shadows)
            ]
            if index + 1 < len(parts) and not self._settle(shadows, [step.earlier[index] for step in steps]):
                for shadow in shadows:
                    shadow.undecided = True
                return
        for i, shadow in enumerate(shadows):
            if shadow.policy.sketch is not None:
                shadow.refresh(self.q[i, -1], shadow.seen - 1, sketches[i])

    def _blocks(self) -> Iterator[slice]:
        """The parts after which a prompt settles, and what remains."""
        start, count, policy = 0, self.q.shape[1], self.layer.policy
        block = int(min(self.layer.machines[0].numbers.prefill_block, 2**31)) if policy.prefill == "blocks" else 2**31
        while start < count:
            stop = min(count, start + block - (self.start[0].seen + start) % block)
            yield slice(start, stop)
            start = stop

    def _settle(self, shadows: Sequence[Shadow], steps: Sequence[Step]) -> bool:
        """Evict as the interpreter did; whether nothing else was possible."""
        gone = [step.position[step.victims] for step in steps]
        masks = [np.isin(shadow.position, own) for shadow, own in zip(shadows, gone, strict=True)]
        decided = not any(mask.any() for mask in masks) or Settle(shadows).decides(masks)
        for shadow, own in zip(shadows, gone, strict=True):
            shadow.drop(own)
        self.undecided |= not decided
        return decided

    def _interpreter_problem(self, shadows: Sequence[Shadow], steps: Sequence[Step]) -> str | None:
        """The interpreter's own numbers must lie in the ranges: this tests both."""
        for shadow, step in zip(shadows, steps, strict=True):
            order = _places(step.position, shadow.position)
            for column in shadow.policy.columns:
                bound, value = shadow.columns[column.name], step.columns[column.name][order]
                if column.rule == "ring":
                    valid = shadow.ring_places(column)
                    bound, value = (x[:, : valid.shape[1]][valid] for x in (bound, value))
                if not bound.holds(value).all():
                    return f"the interpreter's column {column.name} is out of bounds"
        if steps[0].score is None:
            return None
        settle = Settle(shadows)
        for shadow, step, score in zip(shadows, steps, settle.scores, strict=True):
            assert step.score is not None
            if not score.holds(step.score[_places(step.position, shadow.position)]).all():
                return "the interpreter's score is out of bounds"
        gone = [np.isin(s.position, step.position[step.victims]) for s, step in zip(shadows, steps, strict=True)]
        return None if settle.allows(gone) else "the interpreter's victims are out of bounds"

    def _output_problem(self, bounds: Sequence[Sequence[Range]], outs: Array, tolerance: float) -> str | None:
        for index, (own, got) in enumerate(zip(bounds, outs, strict=True)):
            if _close(got, self.outs[index], tolerance):
                continue
            whole = Range(*(np.concatenate([getattr(one, part) for one in own]) for part in ("lo", "hi", "nan")))
            rounded = widened(whole, tolerance)
            # What is infinite or NaN in one precision may be either in the other.
            loose = choose(np.isfinite(whole.lo) & np.isfinite(whole.hi) & ~whole.nan, rounded, exactly(got))
            if not loose.holds(got).all():
                return f"output of head {index} differs by {np.nanmax(np.abs(got - self.outs[index])):.3g}"
        return None

    def _kept_problem(self, shadows: Sequence[Shadow], steps: Sequence[Step], after: Sequence[Head]) -> str | None:
        expected = [np.isin(s.position, step.position[step.victims]) for s, step in zip(shadows, steps, strict=True)]
        gone = [~np.isin(shadow.position, head.position) for shadow, head in zip(shadows, after, strict=True)]
        for shadow, head, mine in zip(shadows, after, gone, strict=True):
            if not np.isin(head.position, shadow.position).all() or len(head.position) != (~mine).sum():
                return "the backend holds tokens that it should not have"
        counts = [[int(mask.sum()) for mask in masks] for masks in (gone, expected)]
        if sum(counts[0]) != sum(counts[1]) or (counts[0] != counts[1] and self.layer.policy.across is None):
            return f"{counts[0]} tokens left the heads, not {counts[1]}"
        if not any(mask.any() for mask in expected):
            return None
        settle = Settle(shadows)
        self.undecided |= not settle.decides(expected)
        if not settle.allows(gone):
            left, should = ([sorted(s.position[own]) for s, own in zip(shadows, m, strict=True)] for m in (gone, expected))
            return f"{left} left, {should} should have"
        return None

    def _column_problem(self, shadows: Sequence[Shadow], after: Sequence[Head]) -> str | None:
        for shadow, head, own in zip(shadows, after, self.heads, strict=True):
            if not _equal(head.sketch, own.sketch):
                return f"the sketch is {head.sketch}, not {own.sketch}"
            order = _places(shadow.position, head.position)
            for column in shadow.policy.columns:
                bound, value, at = shadow.columns[column.name][order], head.columns[column.name], head.position
                if column.rule == "ring":
                    valid = shadow.ring_places(column)[order]
                    at = np.broadcast_to(at[:, None], valid.shape)[valid]
                    bound, value = (x[:, : valid.shape[1]][valid] for x in (bound, value))
                wrong = ~bound.holds(value)
                if wrong.any():
                    one = int(wrong.argmax())
                    return f"column {column.name} of {at[one]} is {value[one]}, outside of {bound.lo[one]}..{bound.hi[one]}"
        return None


def _ropes(trace: Trace) -> tuple[Rope | None, ExactRope | None]:
    """How keys and queries are rotated: for the runtime and for the interpreter."""
    if trace.rope == "none":
        return None, None
    offset = trace.head_dim // 4 if trace.rope == "partial" else 0  # dims at both ends stay as they are
    pairs = (trace.head_dim - 2 * offset) // 2
    inv_freq = 100.0 ** -(np.arange(pairs, dtype=np.float64) / pairs)
    pairing: Any = "interleaved" if trace.rope == "interleaved" else "half"
    return Rope(torch.from_numpy(inv_freq), pairing, offset), ExactRope(inv_freq, pairing, offset)


def _jumps(body: Expr) -> bool:
    """Whether a small change of what it reads may change the value by much."""
    steps = ("<", "<=", ">", ">=", "==", "!=", "%", "floor", "ceil")
    return any(getattr(part, "op", None) in steps or getattr(part, "function", None) in steps for part in walk(body))


def _places(of: Indices, wanted: Indices) -> list[int]:
    """Where each wanted position stands."""
    where = {int(p): i for i, p in enumerate(of)}
    return [where[int(p)] for p in wanted]


def _equal(a: Indices | None, b: Indices | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and sorted(a) == sorted(b))


def _close(got: Array, outs: Array, tolerance: float) -> bool:
    scale = max(1.0, float(np.nanmax(np.abs(np.where(np.isfinite(outs), outs, 0)), initial=0)))
    # An infinite value times a probability that float32 rounds to 0 is NaN, where float64 has an infinity.
    got, outs = (np.where(np.isfinite(x), x, np.nan) for x in (got, outs))
    return bool(np.allclose(got, outs, rtol=0, atol=tolerance * scale, equal_nan=True))


def _array(x: Tensor) -> Array:
    made: Array = x.detach().double().numpy()
    return made
