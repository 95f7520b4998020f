"""One forward of one row, compared with the interpreter: exactly where that does, on ranges (`shadow`, `leaving`) where not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvdsl.interp import Head, Layer, Step
from kvdsl.interp.inputs import NOTHING, Supplied, of_head
from kvdsl.interp.rounding import placed
from kvdsl.ir.nodes import Column, Expr, Policy, is_call
from kvdsl.ir.visitors import walk

from .counts import Least, leaving
from .leaving import Settle, together
from .ranges import Range, choose, exactly, widened
from .shadow import OutOfBounds, Shadow

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Indices = NDArray[np.int64]

CLOSE = 1e-6
"""Columns that are closer than this need no bounds: absolutely, and times ten relatively."""


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
        supplied: what the caller gives of the tokens, [heads, L] by name.
    """

    def __init__(
        self,
        layer: Layer,
        heads: list[Head],
        q: Array,
        k: Array,
        v: Array,
        *,
        prompt: bool,
        fused: float,
        supplied: Supplied = NOTHING,
    ) -> None:
        self.supplied = supplied
        self.fused = fused
        self.layer, self.start, self.prompt = layer, [Start(head) for head in heads], prompt
        self.q = q
        self.k, self.v = placed(k, v, layer.machines[0].kv_dtype)
        self.heads = heads
        self.tokens: list[tuple[list[Step], list[Indices | None]]] = []
        if prompt:
            self.tokens.append((layer.prefill(heads, q, k, v, supplied), [head.sketch for head in heads]))
            self.outs = np.stack([step.out for step in self.tokens[0][0]])
        else:
            for t in range(q.shape[1]):
                given = {name: x[:, t : t + 1] for name, x in supplied.items()}
                steps = layer.decode(heads, q[:, t], k[:, t], v[:, t], given)
                self.tokens.append((steps, [head.sketch for head in heads]))
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
        for column in _remembered(self.layer.policy):
            got, expected = after.columns[column.name], head.columns[column.name][order]
            if column.rule == "ring":
                valid = shadow.ring_places(column)
                got, expected = (x[:, : valid.shape[1]][valid] for x in (got, expected))
            if not _agree(got, expected, CLOSE, 10 * CLOSE):
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
            for i, shadow in enumerate(shadows):
                given = of_head(self.supplied, i, slice(number, number + 1))
                shadow.arrive(self.q[i, number], self.k[i, number], self.v[i, number], sketches[i], given)
            yield [
                shadow.token(self.q[i, number], steps[i], self._peers(shadows, i, number))
                for i, shadow in enumerate(shadows)
            ]
            return
        parts = list(self._blocks())
        for index, part in enumerate(parts):
            yield [
                shadow.prompt(self.q[i, part], self.k[i, part], self.v[i, part], self.fused, of_head(self.supplied, i, part))
                for i, shadow in enumerate(shadows)
            ]
            if index + 1 < len(parts) and not self._settle(shadows, [step.earlier[index] for step in steps]):
                for shadow in shadows:
                    shadow.undecided = True
                return
        for i, shadow in enumerate(shadows):
            if shadow.policy.sketch is not None:
                shadow.refresh(self.q[i, -1], shadow.seen - 1, sketches[i])

    def _peers(self, shadows: Sequence[Shadow], head: int, number: int) -> list[tuple[Shadow, Array]]:
        """The KV heads of a head's layer, where they choose together, and their queries of a token."""
        if not self.layer.policy.heads_vote:
            return []
        layer = shadows[head].numbers.layer
        return [(shadow, self.q[i, number]) for i, shadow in enumerate(shadows) if shadow.numbers.layer == layer]

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
        certain = shadows[0].policy.measured is None or all(least == most for least, most in self._leaving(shadows))
        decided = certain and (not any(mask.any() for mask in masks) or Settle(shadows).decides(masks))
        for shadow, own in zip(shadows, gone, strict=True):
            if len(own):
                shadow.prune()
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
        if self.layer.policy.measured is not None:
            return self._measured_problem(shadows, gone, expected)
        counts = [[int(mask.sum()) for mask in masks] for masks in (gone, expected)]
        policy = self.layer.policy
        shared = policy.across_layers is not None and not policy.one_pool and any(map(any, counts))
        if not shared and (sum(counts[0]) != sum(counts[1]) or (counts[0] != counts[1] and not policy.heads_share)):
            return f"{counts[0]} tokens left the heads, not {counts[1]}"
        if not shared and not any(mask.any() for mask in expected):
            return None
        settle = Settle(shadows)
        if shared and not settle.as_many(gone):
            return f"{counts[0]} tokens left the heads, not {counts[1]}, where layers get {settle.shares}"
        self.undecided |= not settle.decides(expected)
        if not settle.allows(gone):
            left, should = ([sorted(s.position[own]) for s, own in zip(shadows, m, strict=True)] for m in (gone, expected))
            return f"{left} left, {should} should have"
        return None

    def _measured_problem(self, shadows: Sequence[Shadow], gone: Sequence[Mask], expected: Sequence[Mask]) -> str | None:
        """Where the budget reads the data, as many leave as that may come to; the interpreter's own number is among these."""
        bounds = self._leaving(shadows)
        for masks, whose in ((expected, "the interpreter"), (gone, "the backend")):
            counts = [int(mask.sum()) for mask in masks]
            if any(not least <= count <= most for count, (least, most) in zip(counts, bounds, strict=True)):
                return f"{counts} tokens left the heads of {whose}, not {bounds}"
        settle = Settle(shadows)
        self.undecided |= any(least != most for least, most in bounds) or not settle.decides(expected)
        return None if settle.allows(gone) else "other tokens left than could"

    def _leaving(self, shadows: Sequence[Shadow]) -> list[Least]:
        """How many tokens may leave each head at this settle, if any may in this phase."""
        phase = "decode" if self.prompt else "prefill"
        block = self.layer.machines[0].numbers.prefill_block
        unfinished = self.prompt and self.layer.policy.prefill == "blocks" and shadows[0].seen % block != 0
        if self.layer.policy.when == phase or unfinished:
            return [(0.0, 0.0) for _ in shadows]
        return leaving(shadows, together(shadows))

    def _column_problem(self, shadows: Sequence[Shadow], after: Sequence[Head]) -> str | None:
        for shadow, head, own in zip(shadows, after, self.heads, strict=True):
            if not _equal(head.sketch, own.sketch):
                return f"the sketch is {head.sketch}, not {own.sketch}"
            if len(head.position) < len(shadow.position):
                shadow.prune()
            order = _places(shadow.position, head.position)
            for column in _remembered(shadow.policy):
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


class TurnStep(RowStep):
    """What the end of a turn did: a settle, and no token."""

    def __init__(self, layer: Layer, heads: list[Head]) -> None:
        self.layer, self.start, self.heads, self.prompt = layer, [Start(head) for head in heads], heads, False
        self.tokens = [(layer.settle(heads), [head.sketch for head in heads])]
        self.outs = np.zeros((len(heads), 0))
        self.near, self.undecided = 0, False

    def _parts(self, *_: object) -> Iterator[list[Range] | str]:
        return iter(())


def _remembered(policy: Policy) -> list[Column]:
    """The columns that are there after a forward."""
    return [column for column in policy.columns if not (policy.forgets and column.rule == "ring")]


def _jumps(body: Expr) -> bool:
    """Whether a small change of what it reads may change the value by much."""
    steps = ("<", "<=", ">", ">=", "==", "!=", "%", "floor", "ceil")
    return any(is_call(part, *steps) for part in walk(body))


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
    return _agree(got, outs, tolerance * scale)


def _agree(got: Array, expected: Array, absolute: float, relative: float = 0.0) -> bool:
    """`np.allclose`, in a fraction of its time."""
    with np.errstate(all="ignore"):
        near = np.abs(got - expected) <= absolute + relative * np.abs(expected)
        same = (got == expected) | (np.isnan(got) & np.isnan(expected))
        return bool((near & np.isfinite(expected) | same).all())
