"""Step-locked comparison of a backend with the reference interpreter (design: "what good means here").

At every step the interpreter starts from the backend's own keys, values, positions and columns, as rounded by the backend,
and makes the same step in float64. Outputs, columns and kept sets must agree; kept sets may differ only where a score, a
threshold or a scope boundary lies within float32's precision. Such steps are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvdsl.interp.attention import Call
from kvdsl.interp.head import Head
from kvdsl.interp.machine import Interpreter, Step
from kvdsl.interp.numbers import resolve
from kvdsl.ir.nodes import Policy
from kvdsl.ir.visitors import walk
from kvdsl.runtime.backends import choose
from kvdsl.runtime.slots import AttentionCall, SlotState
from kvdsl.runtime.spec import PolicySpec

# How far a backend's output and columns may lie from float64. The output is rounded to the model's dtype once; columns
# are float32 sums of float32 probabilities, whose error grows with the logits' size.
OUT_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
COLUMN_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Case:
    """One random trace. `real` rows are left-padded by up to `padding` tokens."""

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
        self.state = SlotState(spec, self.given, layer=1, layers=4, head_offset=3, seed=case.seed)
        self.backend = choose(spec, backend, torch.device("cpu"), case.dtype)
        self.sinks = torch.randn(case.kv_heads * case.group, generator=_torch_seed(case.seed)) if case.sinks else None
        self.tally = Tally()

    def compare(self) -> Tally:
        case = self.case
        pads = [case.padding * row // max(1, case.batch - 1) for row in range(case.batch)]
        real = torch.tensor([[t >= pad for t in range(case.prompt)] for pad in pads])
        heads = {(b, h): self._interpreter(b, h, 0).empty(case.head_dim, self._value_dim) for b, h in self._pairs()}
        call = self._call(case.prompt, real if case.padding else None)
        self._step(call, real, heads, prefill=True)
        self.state.decoding = True
        for _ in range(0, case.steps, case.at_once):
            call = self._call(case.at_once, None)
            self._step(call, torch.ones(case.batch, case.at_once, dtype=torch.bool), self._resumed(), prefill=False)
        return self.tally

    # -- inputs --------------------------------------------------------------------------------------------------------

    @property
    def _value_dim(self) -> int:
        return self.case.value_dim or self.case.head_dim

    def _pairs(self) -> Iterator[tuple[int, int]]:
        yield from np.ndindex(self.case.batch, self.case.kv_heads)

    def _call(self, tokens: int, real: Tensor | None) -> AttentionCall:
        case = self.case
        query_heads = case.kv_heads * case.group
        shapes = [(query_heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, self._value_dim)]
        query, key, value = (self._vectors(heads, tokens, dim) for heads, dim in shapes)
        return AttentionCall(query, key, value, real, case.head_dim**-0.5, case.softcap, case.window, self.sinks)

    def _vectors(self, heads: int, tokens: int, dim: int) -> Tensor:
        shape = (self.case.batch, heads, tokens, dim)
        return torch.from_numpy(INPUTS[self.case.inputs](self.rng, shape)).to(self.case.dtype)

    # -- one step ------------------------------------------------------------------------------------------------------

    def _interpreter(self, row: int, head: int, prompt: int) -> Interpreter:
        case = self.case
        sinks = None if self.sinks is None else self.sinks.double().numpy().reshape(case.kv_heads, -1)[head]
        call = Call(case.head_dim**-0.5, case.softcap, case.window, sinks)
        numbers = resolve(self.policy, self.given, prompt=max(prompt, 0), layer=1, layers=4)
        return Interpreter(self.policy, numbers, call, head_index=3 + head, seed=case.seed)

    def _resumed(self) -> dict[tuple[int, int], Head]:
        """Heads that go on from the backend's tensors."""
        state, heads = self.state, {}
        for b, h in self._pairs():
            columns = {name: _array(state.columns[i, b, h]) for i, name in enumerate(state.spec.columns)}
            heads[b, h] = self._interpreter(b, h, 0).resume(
                _array(state.keys[b, h]),
                _array(state.values[b, h]),
                state.position[b, h].numpy(),
                columns,
                int(state.seen[b]),
            )
        return heads

    def _step(self, call: AttentionCall, real: Tensor, heads: dict[tuple[int, int], Head], *, prefill: bool) -> None:
        run = self.backend.prefill if prefill else self.backend.decode
        if prefill:
            self.prompts = real.sum(1).tolist()
        out = run(self.state, call)
        for (b, h), head in heads.items():
            chosen = real[b].nonzero()[:, 0]
            q = _array(call.query[b].unflatten(0, (self.case.kv_heads, -1))[h][:, chosen]).swapaxes(0, 1)
            k, v = _array(call.key[b, h, chosen]), _array(call.value[b, h, chosen])
            machine = self._interpreter(b, h, self.prompts[b])
            if prefill:
                steps = [machine.prefill(head, q, k, v)]
            else:
                steps = [machine.decode(head, *one) for one in zip(q, k, v, strict=True)]
            outs = steps[0].out if prefill else np.stack([step.out for step in steps])
            group = slice(h * self.case.group, (h + 1) * self.case.group)
            self._check(b, h, machine, steps, outs, _array(out[b, chosen, group]), head)

    def _check(
        self, b: int, h: int, machine: Interpreter, steps: list[Step], outs: np.ndarray, got: np.ndarray, head: Head
    ) -> None:
        self.tally.steps += 1
        problem = (
            self._output_problem(outs, got)
            # What an earlier token of the same call left undecided, later ones may show in their outputs and columns.
            or self._kept_problem(b, h, head)
            or self._column_problem(b, h, machine, head)
        )
        if problem is None:
            return
        text, excused_by_last = problem
        undecided = steps if excused_by_last else steps[:-1]
        if excused_by_last == "threshold" or any(_is_near(step) for step in undecided if step.score is not None):
            self.tally.near += 1
        else:
            self.tally.failures.append(f"({b}, {h}) at head-step {self.tally.steps}: {text}")

    def _output_problem(self, outs: np.ndarray, got: np.ndarray) -> tuple[str, str] | None:
        scale = max(1.0, float(np.nanmax(np.abs(np.where(np.isfinite(outs), outs, 0)), initial=0)))
        # An infinite value times a probability that float32 rounds to 0 is NaN, where float64 has an infinity.
        got, outs = (np.where(np.isfinite(x), x, np.nan) for x in (got, outs))
        if np.allclose(got, outs, rtol=0, atol=OUT_TOLERANCE[self.case.dtype] * scale, equal_nan=True):
            return None
        return f"output differs by {np.nanmax(np.abs(got - outs)):.3g}", ""

    def _kept_problem(self, b: int, h: int, head: Head) -> tuple[str, str] | None:
        position = self.state.position[b, h]
        differ = set(head.position.tolist()) ^ set(position[position >= 0].tolist())
        return (f"kept sets differ in positions {sorted(differ)}", "boundary") if differ else None

    def _column_problem(self, b: int, h: int, machine: Interpreter, head: Head) -> tuple[str, str] | None:
        position = self.state.position[b, h].numpy()
        live = np.flatnonzero(position >= 0)
        where = {int(p): i for i, p in enumerate(head.position)}
        order = [where[int(p)] for p in position[live]]
        for index, column in enumerate(machine.policy.columns):
            got, expected = _array(self.state.columns[index, b, h])[live], head.columns[column.name][order]
            if not np.allclose(got, expected, rtol=COLUMN_TOLERANCE, atol=COLUMN_TOLERANCE, equal_nan=True):
                text = f"column {column.name} differs by {np.nanmax(np.abs(got - expected)):.3g}"
                return text, "threshold" if _has_threshold(column.body) else ""
        return None


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


def _has_threshold(body: object) -> bool:
    return any(getattr(node, "op", None) in ("<", "<=", ">", ">=", "==", "!=") for node in walk(body))  # type: ignore[arg-type]


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
