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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.interp import Call, Head, Layer, resolve_heads
from kvdsl.interp.attention import Rope as ExactRope
from kvdsl.ir.nodes import Policy
from kvdsl.ir.printer import print_policy
from kvdsl.loading import class_in_memory
from kvdsl.memory import KV_DTYPES
from kvdsl.passes.columns import add_columns
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.layers import introduce, slot_state
from kvdsl.runtime.torch import eviction

from . import given as given_values
from .inputs import INPUTS
from .precision import FUSED_16_BITS
from .random_policies import mixes_dims
from .row_step import RowStep, TurnStep
from .tensors import drawn

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]

OUT_TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""How far outputs may lie from float64: they are rounded to the model's dtype once."""

LAYERS, HEAD_OFFSET = 4, 3
RANDOM_INPUTS = ("normal", "peaky", "large")


@dataclass(frozen=True)
class Trace:
    """A trace. Rows are left-padded by up to `padding` tokens; `layers` are those that run, of `LAYERS`.

    `chunks`: forwards that the prompt comes in; `ragged`: some rows have no token in some forwards after it; `later`: tokens of a prompt
    after the steps, where steps follow again, of which the second row has fewer and the third none; `expected`: prompts count as so
    many tokens at least; `kv_dtype`: the cache's, of a model in float32; `device`: where the backend's tensors are.
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
    slopes: bool = False
    ends_turns: bool = False
    kv_dtype: str = "model"
    device: str = "cpu"

    def __str__(self) -> str:
        fields = self.__dataclass_fields__
        shown = [f"{k}={v!r}".replace("torch.", "") for k, v in self.__dict__.items() if v != fields[k].default]
        return f"Trace({', '.join(shown)})"


def random_trace(policy: Policy, seed: str) -> Trace:
    """Shapes, dtypes, padding and inputs for a policy, drawn at random; small, for speed."""
    draw = random.Random(seed)
    padding = draw.choice([0, 0, 0, 3])
    agree = policy.victims == "layers"
    together = agree or policy.across_layers is not None or policy.reuses
    budgets: list[float | None] = [None] if policy.budget is None else [None, None, 6, 7, 12, 0.75]
    if policy.budget is not None and not any(param.name == "budget" for param in policy.params):
        budgets = [None]
    return Trace(
        group=draw.choice([1, 2, 2, 4, 8]),
        head_dim=draw.choice([4, 8, 6, 32]),
        value_dim=None if mixes_dims(policy) else draw.choice([None, None, 6]),
        batch=draw.choice([1, 2, 2]) if padding == 0 else 2,
        kv_heads=draw.choice([1, 2]) if policy.victims == "own" and not policy.heads_share else draw.choice([1, 2, 3]),
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
        at_once=1 if agree else draw.choice([1, 1, 1, 2]),
        ragged=draw.random() < 0.15,
        later=draw.choice([0, 0, 0, 2, 7]),
        slopes=draw.random() < 0.15,
        ends_turns=draw.random() < 0.7 and reads_turns(policy),
    )


def in_fewer_bits(policy: Policy, trace: Trace, kv_dtype: str = "any") -> tuple[Policy, Trace]:
    """The same with a cache in a `kv_dtype`, `any`: one that is drawn. Rotated halves are refused beside it.

    Vectors of 40 and 64 dims have several scales in `int4`.
    """
    draw = random.Random(f"{trace.seed}-bits")
    drawn, dims = draw.choice([*KV_DTYPES[1:], "int8/int4", "fp8/int8"]), draw.choice([trace.head_dim, 32, 40, 64])
    changed = replace(trace, kv_dtype=drawn if kv_dtype == "any" else kv_dtype, dtype=torch.float32, head_dim=dims)
    return policy.model_copy(update={"rope": "fused"}), changed


def reads_turns(policy: Policy) -> bool:
    """Whether a policy notices that turns end."""
    return "turn" in print_policy(policy)


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
    spec: PolicySpec = class_in_memory(policy, files).spec
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
        sizes = {"layers": LAYERS, "heads": HEAD_OFFSET + trace.kv_heads, "group": trace.group, "dims": trace.head_dim}
        spec, self.tensors = drawn(spec.laid_out(kv_dtype=trace.kv_dtype), sizes, self.rng)
        self.states = [
            slot_state(spec, given, layer=layer, layers=LAYERS, head_offset=HEAD_OFFSET, seed=trace.seed)
            for layer in trace.layers
        ]
        for state in self.states:
            state.expected = trace.expected
        introduce(self.states)
        generator = torch.Generator().manual_seed(trace.seed)
        heads = trace.kv_heads * trace.group
        self.sinks = torch.randn(heads, generator=generator).to(trace.device) if trace.sinks else None
        self.slopes = torch.rand(heads, generator=generator).to(trace.device) if trace.slopes else None
        self.rope = _ropes(trace)[0]
        self.prompts = [0] * trace.batch
        self.layers: dict[int, Layer] = {}
        self.heads: list[list[Head]] = []
        self.turns = 0
        self.tally = Tally()

    def run(self) -> None:
        trace = self.trace
        pads = [trace.padding * row // max(1, trace.batch - 1) for row in range(trace.batch)]
        real = torch.tensor([[t >= pad for t in range(trace.prompt)] for pad in pads])
        for part in real.split(-(-trace.prompt // trace.chunks), dim=1):
            self._take_prompt(part)
        self._decode()
        self._end_turn()
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
        for step in range(0, self.trace.steps, self.trace.at_once):
            if step == 2 * self.trace.at_once:
                self._end_turn()
            self._forward(self._some(self.trace.at_once), prompt=False)

    def _end_turn(self) -> None:
        """A turn ends, and nothing comes in."""
        if not self.trace.ends_turns:
            return
        self.turns += 1
        self.layers.clear()
        before = self.heads
        for state in self.states:
            eviction.end_turn(state)
        self.heads = self._held()
        for b in range(self.trace.batch):
            if not (self.policy.settles_turns and before[b][0].seen):
                self._check_idle(b, before[b], self.heads[b])
                continue
            self._compare(b, TurnStep(self._layer(b), before[b]), self.heads[b], np.zeros((len(before[b]), 0)))

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
            torch.from_numpy(INPUTS[trace.inputs](self.rng, (batch, n, tokens, dim))).to(trace.device, trace.dtype)
            for n, dim in shapes
        )
        padded = None if real.all() else real.to(trace.device)
        scaling = trace.head_dim**-0.5
        supplied = given_values.drawn(
            self.policy, (batch, trace.kv_heads, tokens), self.rng, wild=trace.inputs in ("nan", "inf"), turns=self.turns
        )
        return AttentionCall(
            query,
            key,
            value,
            padded,
            scaling,
            trace.softcap,
            trace.window,
            self.sinks,
            self.rope,
            None if supplied is None else supplied.to(trace.device),
            slopes=self.slopes,
        )

    def _layer(self, row: int) -> Layer:
        """The interpreter of a row: all heads, layer by layer. Rows with prompts of one length have the same."""
        if self.prompts[row] not in self.layers:
            self.layers[self.prompts[row]] = self._new_layer(self.prompts[row])
        return self.layers[self.prompts[row]]

    def _new_layer(self, prompt: int) -> Layer:
        trace = self.trace
        sinks, slopes = (
            [None] * trace.kv_heads if x is None else list(_array(x).reshape(trace.kv_heads, -1))
            for x in (self.sinks, self.slopes)
        )
        calls = [
            Call(trace.head_dim**-0.5, trace.softcap, trace.window, sink, _ropes(trace)[1], slope)
            for sink, slope in zip(sinks, slopes, strict=True)
        ]
        shape = {"heads": trace.kv_heads, "head_offset": HEAD_OFFSET, "tensors": self.tensors}
        numbers = [
            resolve_heads(self.policy, self.given, prompt, layer, LAYERS, expected=trace.expected, turns=self.turns, **shape)
            for layer in trace.layers
        ]
        return Layer(
            self.policy, numbers, calls * len(numbers), trace.kv_heads, HEAD_OFFSET, trace.seed, self.tensors, trace.kv_dtype
        )

    def _held(self) -> list[list[Head]]:
        """Every row's heads as the backend has them."""
        heads: list[list[Head]] = [[] for _ in self.prompts]
        for index, state in enumerate(self.states):
            machines = self._layer(0).machines[
                index * self.trace.kv_heads :
            ]  # a head is what it holds, whatever the numbers
            keys, values, position = _array(state.keys), _array(state.values), state.position.cpu().numpy()
            columns = {name: _array(x) for name, x in state.column_index.single(state.columns).items()}
            rings = {name: _array(x.movedim(0, -1)) for name, x in state.column_index.rings(state.columns).items()}
            for b, row in enumerate(heads):
                for h in range(self.trace.kv_heads):
                    has_one = state.sketch.dim() > 1 and bool(state.seen[b])  # a row of padding alone has what came of that
                    sketch = state.sketch[b, h].cpu().numpy() if has_one else None
                    remembered = {name: x[b, h] for name, x in (columns | rings).items()}
                    chosen = None if sketch is None else sketch[sketch >= 0]
                    row.append(
                        machines[h].resume(keys[b, h], values[b, h], position[b, h], remembered, int(state.seen[b]), chosen)
                    )
        return heads

    def _forward(self, real: Tensor, *, prompt: bool) -> None:
        trace, dims = self.trace, (self.trace.head_dim, self.trace.value_dim or self.trace.head_dim)
        before = self.heads or [self._layer(b).empty(*dims) for b in range(trace.batch)]
        calls = [self._call(real) for _ in self.states]
        run = self.backend.prefill if prompt else self.backend.decode
        for state in self.states:
            if state.choices is not None:
                state.choices.begin(state.layer)
        outs = [run(state, call) for state, call in zip(self.states, calls, strict=True)]
        self.heads = self._held()
        for b in range(trace.batch):
            chosen = real[b].nonzero()[:, 0]
            if not len(chosen):
                self._check_idle(b, before[b], self.heads[b])
                continue
            q = np.concatenate([_array(call.query[b].unflatten(0, (trace.kv_heads, -1))[:, :, chosen]) for call in calls])
            k, v = (np.concatenate([_array(getattr(c, x)[b][:, chosen]) for c in calls]) for x in ("key", "value"))
            got = np.concatenate([_array(out[b, chosen].unflatten(1, (trace.kv_heads, -1)).transpose(0, 1)) for out in outs])
            fused = 0.0 if trace.dtype == torch.float32 else FUSED_16_BITS
            step = RowStep(
                self._layer(b), before[b], q.swapaxes(1, 2), k, v, prompt=prompt, fused=fused,
                supplied=self._supplied(calls, b, chosen),
            )  # fmt: skip
            self._compare(b, step, self.heads[b], got)

    def _supplied(self, calls: list[AttentionCall], row: int, tokens: Tensor) -> dict[str, Array]:
        """What is given of a row's tokens, for all heads, layer by layer; nothing where no layer is given any."""
        if all(call.supplied is None for call in calls):
            return {}
        shape = (self.trace.kv_heads, len(tokens))
        parts = [given_values.of_row(self.policy, call.supplied, row, tokens, shape) for call in calls]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _check_idle(self, row: int, before: list[Head], after: list[Head]) -> None:
        """A row without a token keeps what it has."""
        for old, new in zip(before, after, strict=True):
            if sorted(old.position) != sorted(new.position) or old.seen != new.seen:
                self.tally.failures.append(f"row {row} changed without a token")

    def _compare(self, row: int, step: RowStep, after: list[Head], outs: Array) -> None:
        tally, tolerance = self.tally, OUT_TOLERANCE[self.trace.dtype]
        tally.steps += len(after)
        if any(not _same_vectors(held, head) for held, head in zip(after, step.heads, strict=True)):
            tally.failures.append(f"row {row} at head-step {tally.steps}: keys or values are others than were placed")
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


def _same_vectors(held: Head, head: Head) -> bool:
    """Whether the tokens that both hold have the same keys and values, to the bit."""
    _, mine, its = np.intersect1d(held.position, head.position, return_indices=True)
    pairs = ((held.key, head.key), (held.value, head.value))
    return all(np.array_equal(one[mine], other[its], equal_nan=True) for one, other in pairs)


def _ropes(trace: Trace) -> tuple[Rope | None, ExactRope | None]:
    """How keys and queries are rotated: for the runtime and for the interpreter."""
    if trace.rope == "none":
        return None, None
    offset = trace.head_dim // 4 if trace.rope == "partial" else 0  # dims at both ends stay as they are
    pairs = (trace.head_dim - 2 * offset) // 2
    inv_freq = 100.0 ** -(np.arange(pairs, dtype=np.float64) / pairs)
    pairing: Any = "interleaved" if trace.rope == "interleaved" else "half"
    return Rope(torch.from_numpy(inv_freq), pairing, offset), ExactRope(inv_freq, pairing, offset)


def _array(x: Tensor) -> Array:
    made: Array = x.detach().cpu().double().numpy()
    return made
