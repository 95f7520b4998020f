"""Step-locked comparison of a backend with the reference interpreter (design: "what good means here").

At every step the interpreter starts from the backend's own keys, values, positions, columns and sketches, as rounded by the
backend, and makes the same step in float64. Outputs, columns, sketches and kept sets must agree; kept sets may differ only where a
score, a threshold or a scope boundary lies within float32's precision, and what a token attends to only where the first that it
passed over ranks as high as one that it chose. Such steps are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvdsl.interp.attention import Call
from kvdsl.interp.evaluate import Scope, evaluate_number
from kvdsl.interp.head import Head
from kvdsl.interp.layer import Layer
from kvdsl.interp.numbers import resolve
from kvdsl.interp.operations import Operations
from kvdsl.interp.rotation import Rope
from kvdsl.interp.step import Step
from kvdsl.ir.nodes import Policy
from kvdsl.ir.visitors import walk
from kvdsl.runtime.backends import choose
from kvdsl.runtime.call import AttentionCall
from kvdsl.runtime.rope import Rope as TorchRope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.eviction import Together

# How far a backend's output and columns may lie from float64. The output is rounded to the model's dtype once; columns
# are float32 sums of float32 probabilities, whose error grows with the logits' size.
OUT_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
COLUMN_TOLERANCE = 1e-4

LAYERS = 4
"""Layers of the model of which a trace sees some."""


@dataclass(frozen=True)
class Case:
    """One random trace. Rows are left-padded by up to `padding` tokens; the prompt comes in `cuts` forwards, through `layers`
    layers from `layer` on. If there is `later`, a prompt of so many tokens follows the steps, and as many steps again; the second row
    has fewer of them, the third none. Prompts count as `expected` tokens at least.
    """

    policy: str
    group: int = 2
    head_dim: int = 32
    value_dim: int | None = None
    batch: int = 1
    kv_heads: int = 2
    dtype: torch.dtype = torch.float32
    budget: float = 12
    prompt: int = 9
    steps: int = 12
    padding: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    inputs: str = "normal"
    seed: int = 0
    at_once: int = 1
    layer: int = 1
    layers: int = 1
    cuts: int = 1
    later: int = 0
    expected: int = 0
    rope: str | None = None
    given: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        shown = {k: v for k, v in self.__dict__.items() if v != Case.__dataclass_fields__[k].default}
        return "-".join(f"{k}={str(v).replace('torch.', '')}" for k, v in shown.items())


@dataclass
class Tally:
    """Head-steps compared, and those where a boundary lay within precision."""

    steps: int = 0
    near: int = 0
    failures: list[str] = field(default_factory=list)


def compare(policy: Policy, spec: PolicySpec, backend: str, case: Case) -> Tally:
    """Run one trace on a backend and, step by step, in the interpreter.

    Args:
        policy: with its state columns.
    """
    return _Run(policy, spec, backend, case).compare()


class _Run:
    def __init__(self, policy: Policy, spec: PolicySpec, backend: str, case: Case) -> None:
        self.policy, self.case = policy, case
        self.rng = np.random.default_rng(case.seed)
        self.given = {"budget": case.budget, **dict(case.given)} if "budget" in spec.params else dict(case.given)
        self.layers = list(range(case.layer, case.layer + case.layers))
        self.states = [
            SlotState(spec, self.given, layer=layer, layers=LAYERS, head_offset=3, seed=case.seed) for layer in self.layers
        ]
        for state in self.states:
            state.expected = case.expected
        if spec.victims == "layers":
            together = Together()
            for state in self.states:
                together.join(state)
        self.backend = choose(spec, backend, torch.device("cpu"), case.dtype)
        self.sinks = torch.randn(case.kv_heads * case.group, generator=_torch_seed(case.seed)) if case.sinks else None
        self.rope = _rope(case)
        self.tally = Tally()

    def compare(self) -> Tally:
        case = self.case
        pads = [case.padding * row // max(1, case.batch - 1) for row in range(case.batch)]
        real = torch.tensor([[t >= pad for t in range(case.prompt)] for pad in pads])
        self.prompts = [0] * case.batch
        for part in real.tensor_split(min(case.cuts, case.prompt), dim=1):
            self._prompt(part)
        self._decode()
        if case.later:
            pads = [0, case.later // 2, case.later][: case.batch]
            self._prompt(torch.tensor([[t >= pad for t in range(case.later)] for pad in pads]))
            self._decode()
        return self.tally

    def _prompt(self, real: Tensor) -> None:
        """A forward of a prompt: of all tokens so far, in rows to which any come."""
        seen = self.states[0].seen.tolist() if self.states[0].allocated else self.prompts
        counts = zip(self.prompts, seen, real.sum(1).tolist(), strict=True)
        self.prompts = [before + new if new else prompt for prompt, before, new in counts]
        self._step(real, prefill=True)

    def _decode(self) -> None:
        for _ in range(0, self.case.steps, self.case.at_once):
            self._step(torch.ones(self.case.batch, self.case.at_once, dtype=torch.bool), prefill=False)

    # -- inputs --------------------------------------------------------------------------------------------------------

    @property
    def _value_dim(self) -> int:
        return self.case.value_dim or self.case.head_dim

    def _call(self, real: Tensor) -> AttentionCall:
        case, tokens = self.case, real.shape[1]
        query_heads = case.kv_heads * case.group
        shapes = [(query_heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, self._value_dim)]
        query, key, value = (self._vectors(heads, tokens, dim) for heads, dim in shapes)
        some = None if bool(real.all()) else real
        return AttentionCall(query, key, value, some, case.head_dim**-0.5, case.softcap, case.window, self.sinks, self.rope)

    def _vectors(self, heads: int, tokens: int, dim: int) -> Tensor:
        shape = (self.case.batch, heads, tokens, dim)
        return torch.from_numpy(INPUTS[self.case.inputs](self.rng, shape)).to(self.case.dtype)

    # -- one step ------------------------------------------------------------------------------------------------------

    def _reference(self, row: int) -> Layer:
        """The interpreter of a row: its heads in all layers."""
        case = self.case
        sinks = (
            [None] * case.kv_heads if self.sinks is None else list(self.sinks.double().numpy().reshape(case.kv_heads, -1))
        )
        rope = None if self.rope is None else Rope(self.rope.inv_freq.numpy(), self.rope.layout, self.rope.offset)
        calls = [Call(case.head_dim**-0.5, case.softcap, case.window, sink, rope) for sink in sinks]
        numbers = [
            resolve(self.policy, self.given, self.prompts[row], layer, LAYERS, expected=case.expected)
            for layer in self.layers
        ]
        return Layer(self.policy, numbers, calls * len(self.layers), heads=case.kv_heads, head_offset=3, seed=case.seed)

    def _heads(self, row: int, layer: Layer) -> list[Head]:
        """Heads that go on from the backend's tensors, layer by layer."""
        if not self.states[0].allocated:
            return layer.empty(self.case.head_dim, self._value_dim)
        machines = iter(layer.machines)
        return [
            next(machines).resume(
                _array(state.keys[row, h]),
                _array(state.values[row, h]),
                state.position[row, h].numpy(),
                _columns(state, row, h),
                int(state.seen[row]),
                _sketch(state, row, h),
            )
            for state in self.states
            for h in range(self.case.kv_heads)
        ]

    def _step(self, real: Tensor, *, prefill: bool) -> None:
        references = [self._reference(row) for row in range(self.case.batch)]
        heads = [self._heads(row, layer) for row, layer in enumerate(references)]
        calls = [self._call(real) for _ in self.states]
        run = self.backend.prefill if prefill else self.backend.decode
        outs = [run(state, call) for state, call in zip(self.states, calls, strict=True)]
        for row, layer in enumerate(references):
            chosen = real[row].nonzero()[:, 0]
            q, k, v = (np.concatenate([self._of_row(call, name, row, chosen) for call in calls]) for name in _INPUTS)
            got = np.concatenate([_by_head(out[row, chosen].transpose(0, 1), self.case.kv_heads) for out in outs])
            if len(chosen):
                self._check_row(row, layer, heads[row], (q, k, v), got, prefill=prefill)

    def _of_row(self, call: AttentionCall, name: str, row: int, chosen: Tensor) -> np.ndarray:
        """The new tokens' vectors of one row: [kv_heads, tokens, group, dim] of queries, else [kv_heads, tokens, dim]."""
        x = getattr(call, name)[row][:, chosen]
        return _by_head(x, self.case.kv_heads) if name == "query" else _array(x)

    def _check_row(
        self, row: int, layer: Layer, heads: list[Head], given: tuple[np.ndarray, ...], got: np.ndarray, *, prefill: bool
    ) -> None:
        q, k, v = given
        traces = [_Trace(machine) for machine in layer.machines]
        if prefill:
            for trace, step in zip(traces, layer.prefill(heads, q, k, v), strict=True):
                trace.add(step, step.out)
        else:
            for t in range(k.shape[1]):
                for trace, head, query, key, value in zip(traces, heads, q[:, t], k[:, t], v[:, t], strict=True):
                    trace.look(head, query, key, value)
                for trace, step in zip(traces, layer.decode(heads, q[:, t], k[:, t], v[:, t]), strict=True):
                    trace.add(step, step.out[None])
        for index, (head, trace) in enumerate(zip(heads, traces, strict=True)):
            state, h = self.states[index // self.case.kv_heads], index % self.case.kv_heads
            self._check(state, row, h, head, trace, got[index])

    def _check(self, state: SlotState, b: int, h: int, head: Head, trace: _Trace, got: np.ndarray) -> None:
        self.tally.steps += 1
        problem = (
            self._output_problem(np.concatenate(trace.outs), got)
            # What an earlier settle of the same call left undecided, later tokens may show in their outputs and columns.
            or _kept_problem(state, b, h, head)
            or _sketch_problem(state, b, h, head)
            or _column_problem(state, b, h, trace.machine, head)
        )
        if problem is None:
            return
        text, excused_by = problem
        if excused_by == "threshold" or trace.is_near(last_settle=excused_by == "boundary"):
            self.tally.near += 1
        else:
            self.tally.failures.append(f"layer {state.layer} ({b}, {h}) at head-step {self.tally.steps}: {text}")

    def _output_problem(self, outs: np.ndarray, got: np.ndarray) -> tuple[str, str] | None:
        scale = max(1.0, float(np.nanmax(np.abs(np.where(np.isfinite(outs), outs, 0)), initial=0)))
        # An infinite value times a probability that float32 rounds to 0 is NaN, where float64 has an infinity.
        got, outs = (np.where(np.isfinite(x), x, np.nan) for x in (got, outs))
        if np.allclose(got, outs, rtol=0, atol=OUT_TOLERANCE[self.case.dtype] * scale, equal_nan=True):
            return None
        return f"output differs by {np.nanmax(np.abs(got - outs)):.3g}", ""


# -- what may differ -------------------------------------------------------------------------------------------------------


def _kept_problem(state: SlotState, b: int, h: int, head: Head) -> tuple[str, str] | None:
    position = state.position[b, h]
    differ = set(head.position.tolist()) ^ set(position[position >= 0].tolist())
    return (f"kept sets differ in positions {sorted(differ)}", "boundary") if differ else None


def _sketch_problem(state: SlotState, b: int, h: int, head: Head) -> tuple[str, str] | None:
    sketch = _sketch(state, b, h)
    if sketch is None or head.sketch is None or sketch.tolist() == head.sketch.tolist():
        return None
    return f"the sketch is {sketch.tolist()}, not {head.sketch.tolist()}", ""


def _column_problem(state: SlotState, b: int, h: int, machine: Operations, head: Head) -> tuple[str, str] | None:
    position = state.position[b, h].numpy()
    live = np.flatnonzero(position >= 0)
    where = {int(p): i for i, p in enumerate(head.position)}
    order = [where[int(p)] for p in position[live]]
    columns = _columns(state, b, h)
    for column in machine.policy.columns:
        got, expected = columns[column.name][live], head.columns[column.name][order]
        if column.size is not None:
            size = int(evaluate_number(column.size, Scope(0, 0, machine.numbers.inputs(), machine.numbers.params)))
            got, expected = got[:, : max(1, size)], expected[:, : max(1, size)]
            got = np.where(_held(position[live], head.seen - 1, max(1, size), machine.call.window), got, expected)
        if not np.allclose(got, expected, rtol=COLUMN_TOLERANCE, atol=COLUMN_TOLERANCE, equal_nan=True):
            text = f"column {column.name} differs by {np.nanmax(np.abs(got - expected)):.3g}"
            return text, "threshold" if _has_threshold(column.body) else ""
    return None


def _held(position: np.ndarray, newest: int, size: int, window: int | None) -> np.ndarray:
    """Which places of a ring hold what a query that saw the slot gave, [slots, size], written out."""
    held = np.zeros((len(position), size), dtype=bool)
    for query in range(max(0, newest - size + 1), newest + 1):
        age = query - position
        held[:, query % size] = (age >= 0) if window is None else (age >= 0) & (age < window)
    return held


def _columns(state: SlotState, b: int, h: int) -> dict[str, np.ndarray]:
    """A head's columns, [slots] each, and its rings, [slots, size]."""
    single = {name: _array(x[b, h]) for name, x in state.single_columns(state.columns).items()}
    return single | {name: _array(x[:, b, h].T) for name, x in state.rings(state.columns).items()}


def _sketch(state: SlotState, b: int, h: int) -> np.ndarray | None:
    if not state.has_sketch:
        return None
    sketch = state.sketch[b, h]
    return sketch[sketch >= 0].numpy()


@dataclass
class _Trace:
    """What one head decided in a call, and how close that was."""

    machine: Operations
    outs: list[np.ndarray] = field(default_factory=list)
    settles: list[Step] = field(default_factory=list)
    close_choice: bool = False

    def look(self, head: Head, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Before a decoded token: would a small change make it look elsewhere?"""
        machine, policy = self.machine, self.machine.policy
        if policy.select is None or policy.cap == "hard":
            return
        head = head.clone()
        newest = head.seen
        machine.place(head, k[None], v[None])
        if policy.sketch is not None and machine.is_refresh(head, newest):
            machine.refresh(head, newest, q)
            self.close_choice |= _is_close_sketch(machine, head, q)
        chosen = machine.select(head, newest, q)
        assert chosen is not None
        by = machine.selects_by(head, newest, q)
        self.close_choice |= _is_close_cut(by[chosen], by[~chosen])

    def add(self, step: Step, out: np.ndarray) -> None:
        """A forward of the interpreter: its output, [tokens, group, value_dim], and settles."""
        self.settles += [*step.earlier, step]
        self.outs.append(out)

    def is_near(self, *, last_settle: bool) -> bool:
        """Whether a small change could make a difference: to a choice, or to a settle, of which the last one may not count."""
        settles = self.settles if last_settle else self.settles[:-1]
        return self.close_choice or any(_is_near(step) for step in settles if step.score is not None)


def _is_near(step: Step) -> bool:
    """Whether a small change of the score, or of what a scope ranks by, could change who leaves."""
    assert step.score is not None
    ranked = [step.score, *(by for by in step.by if by is not None)]
    return any(_has_close_pair(x) for x in ranked)


def _has_close_pair(x: np.ndarray) -> bool:
    """Two values that are not equal but closer than float32 tells apart after a sum of such errors."""
    finite = np.sort(x[np.isfinite(x)])
    gaps, size = np.diff(finite), np.abs(finite[1:]) + np.abs(finite[:-1])
    return bool(np.any(gaps <= 3e-5 * size + 1e-9))


def _is_close_cut(chosen: np.ndarray, passed_over: np.ndarray) -> bool:
    """Whether something chosen is as good as the best that was passed over, as float32 tells: sums of such sizes cancel."""
    chosen, passed_over = (x[np.isfinite(x)] for x in (chosen, passed_over))
    if not len(chosen) or not len(passed_over):
        return False
    size = max(np.abs(chosen).max(), np.abs(passed_over).max())
    return bool(np.any(np.abs(chosen - passed_over.max()) <= 1e-5 * size + 1e-9))


def _is_close_sketch(machine: Operations, head: Head, q: np.ndarray) -> bool:
    by, chosen = machine.sketches_by(head, head.seen - 1, q), np.zeros(q.shape[-1], dtype=bool)
    chosen[head.sketch] = True
    return _is_close_cut(by[chosen], by[~chosen])


def _has_threshold(body: object) -> bool:
    return any(getattr(node, "op", None) in ("<", "<=", ">", ">=", "==", "!=") for node in walk(body))  # type: ignore[arg-type]


# -- inputs ----------------------------------------------------------------------------------------------------------------

_INPUTS = ("query", "key", "value")


def _by_head(x: Tensor, kv_heads: int) -> np.ndarray:
    """[query_heads, tokens, dim] as [kv_heads, tokens, group, dim]."""
    return _array(x.unflatten(0, (kv_heads, -1))).swapaxes(1, 2)


def _rope(case: Case) -> TorchRope | None:
    """Rotary positions in one of the ways that there are; `partial` leaves dims at both ends as they are."""
    if case.rope is None:
        return None
    offset = case.head_dim // 4 if case.rope == "partial" else 0
    pairs = (case.head_dim - 2 * offset) // 2
    frequencies = 100.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs)
    return TorchRope(frequencies, "interleaved" if case.rope == "interleaved" else "half", offset)


def _array(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def _torch_seed(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- inputs: random and nasty ----------------------------------------------------------------------------------------------


def _normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape)


def _peaky(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Large logits: a few slots get nearly everything."""
    return rng.standard_normal(shape) * 3


def _ties(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Few different vectors: many scores are equal."""
    return rng.integers(0, 2, (*shape[:-1], 1)) * np.ones(shape) * 0.5


def _with(value: float, rate: float = 0.02) -> object:
    def make(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        x = rng.standard_normal(shape)
        bad = rng.random(shape[:-1]) < rate
        x[..., 0] = np.where(bad, value, x[..., 0])
        return x

    return make


INPUTS = {
    "normal": _normal,
    "peaky": _peaky,
    "ties": _ties,
    "zeros": lambda rng, shape: np.zeros(shape),
    "nan": _with(np.nan),
    "inf": _with(np.inf),
    "large": _with(30.0),
}
