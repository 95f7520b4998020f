"""Warn if the `keep` lines of a policy can protect more tokens than its budget keeps.

Simulates a long text, with params at their defaults. Data-dependent conditions, as in `keep where attn > 0.1`, are unknown here;
the cache warns of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from kvdsl import codes
from kvdsl.diagnostics import Label, Sink
from kvdsl.helps import add
from kvdsl.ir.nodes import Expr
from kvdsl.passes.fold import value_of
from kvdsl.sema.parts import CheckedKeep, Parts

_PROMPT = 2**20
"""The length of a prompt that stands for all long ones."""

_LAYERS = {"@layer": 0.0, "@layers": 32.0}
_EVENLY = 61
"""The number of evenly spaced positions to test, besides those near the ends."""


@dataclass(frozen=True)
class Moment:
    """A settle in a long text.

    Attributes:
        prompt: the length of the prompt.
        names: the values of params and inputs.
        room: the number of protected tokens that can stay.
        held: the most prompt tokens that can be cached.
    """

    prompt: int
    names: Mapping[str, float]
    room: int
    held: int


@dataclass
class Protected:
    """Warns if more tokens are protected than the budget keeps.

    Attributes:
        known: the constant values of params (`name`) and of the budget (`@budget`).
        grows: whether a `budget` statement exists, so that a help cannot add one.
    """

    sink: Sink
    parts: Parts
    known: Mapping[str, float]
    grows: bool

    def check(self) -> None:
        """Warn at most once."""
        if "budget" in self.parts.exprs:
            any(self._warns(moment) for moment in self._moments())

    def _moments(self, prompt: int = _PROMPT) -> Iterator[Moment]:
        """Yield the settles at the end of the prompt and far behind it, if they evict."""
        when, held = self.parts.words["when"], prompt
        for newest in (prompt - 1, 4 * prompt - 1):
            names = {**self.known, **_LAYERS, "@prompt": float(prompt), "@seen": newest + 1.0, "@newest": float(newest)}
            kept = self._kept(names)
            if kept is None or when == ("decode" if newest < prompt else "prefill"):
                continue
            yield Moment(prompt, names | {"@budget": float(kept)}, self._room(names, kept), held)
            held = min(held, kept)

    def _kept(self, names: Mapping[str, float]) -> int | None:
        """Return the number of tokens that the budget keeps; None if it is unknown."""
        exprs = self.parts.exprs
        values = [value_of(exprs["measured"].expr, names)] if "measured" in exprs else []
        most = value_of(exprs["budget"].expr, {**names, "@everything": math.inf})
        values += [most]
        known = [value for value in values if value is not None]
        return math.floor(min(known)) if len(known) == len(values) and math.isfinite(min(known)) else None

    def _room(self, names: Mapping[str, float], kept: int) -> int:
        """Return how many protected tokens can stay in a settle."""
        drop, slack = (self._value(name, names) for name in ("max_drop", "slack"))
        hard = self.parts.words["cap"] == "hard" and self.parts.words["when"] != "prefill"
        return kept + (math.floor(slack) if drop else 0) - hard

    def _value(self, name: str, names: Mapping[str, float]) -> float:
        part = self.parts.exprs.get(name)
        return (0.0 if part is None else value_of(part.expr, names)) or 0.0

    def _warns(self, moment: Moment) -> bool:
        for keep in self.parts.keeps:
            if keep.ir.row.holds and (count := _count([keep], moment)) > moment.room:
                self._report(keep, f"protects {count:,} tokens of a long text", moment, self._mended(keep))
                return True
        tops = [keep for keep in self.parts.keeps if keep.ir.row.ranks]
        count = _count([keep for keep in self.parts.keeps if keep not in tops], moment)
        count += sum(_floored(keep.ir.count, moment.names) for keep in tops)
        if count <= moment.room or not self.parts.keeps:
            return False
        together = "" if len(self.parts.keeps) == 1 else "and the other `keep` lines "
        self._report(
            self.parts.keeps[-1], f"{together}may protect {count:,} tokens", moment, "protect fewer, or raise the budget"
        )
        return True

    def _mended(self, keep: CheckedKeep) -> str:
        """Return a help for a condition that protects too many tokens."""
        counts = [[_count([keep], moment) for moment in self._moments(prompt)] for prompt in (_PROMPT // 2, _PROMPT)]
        if counts[0] == counts[1]:
            return "protect fewer, or raise the budget"
        if any(count > moment.room + _PROMPT for count, moment in zip(counts[1], self._moments(), strict=True)):
            return "protect fewer"
        if self.grows or "budget" not in self.known:
            return "let the budget grow with the prompt, or protect fewer"
        return add("add `budget prompt + budget`", ": the param then counts the tokens kept beyond the prompt")

    def _report(self, keep: CheckedKeep, what: str, moment: Moment, help: str) -> None:
        hard = " when room is made for another one" if self.parts.words["cap"] == "hard" else ""
        message = f"`{keep.span.quoted()}` {what}, but {max(0, moment.room):,} of them can stay{hard}"
        self.sink.report(
            codes.OVERPROTECTED, keep.span, message, help, [Label(self.parts.exprs["budget"].span, "the budget")]
        )


def _count(keeps: list[CheckedKeep], moment: Moment) -> int:
    """Count the tokens protected together. Between two tested positions, protection starts or ends at most once."""
    names, end = moment.names, int(moment.names["@newest"]) + 1
    bounds = [_floored(keep.ir.count, names) for keep in keeps if keep.ir.count is not None]
    near = {2**power - 1 for power in range(end.bit_length())} | {n + off for n in bounds for off in (-1, 0)}
    places = {
        *near,
        *(end - 1 - at for at in near),
        *(end * part // _EVENLY for part in range(_EVENLY)),
        moment.prompt - 1,
        moment.prompt,
    }

    def holds(at: int) -> bool:
        return any(_holds(keep, at, names) for keep in keeps)

    def within(low: int, high: int) -> int:
        tested = [(at, holds(at)) for at in sorted(places) if low <= at < high]
        between = sum(_between(earlier, later, holds) for earlier, later in pairwise(tested))
        return between + sum(protected for _, protected in tested)

    return min(within(0, moment.prompt), moment.held) + within(moment.prompt, end)


def _between(earlier: tuple[int, bool], later: tuple[int, bool], holds: Callable[[int], bool]) -> int:
    """Count the protected positions between two tested ones."""
    (low, first), (high, last) = earlier, later
    if first == last:
        return (high - low - 1) * first
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) == first else (low, middle)
    return low - earlier[0] if first else later[0] - high


def _floored(count: Expr | None, names: Mapping[str, float]) -> int:
    value = None if count is None else value_of(count, names)
    return 0 if value is None else max(0, math.floor(value))


def _holds(keep: CheckedKeep, at: int, names: Mapping[str, float]) -> bool:
    """Return whether a `keep` protects the token at a position; False if that is unknown."""
    names = {**names, "@position": float(at), "@age": names["@newest"] - at}
    if keep.ir.row.place:
        return names[f"@{keep.ir.row.place}"] < _floored(keep.ir.count, names)
    return keep.ir.by is not None and bool(value_of(keep.ir.by, names))
