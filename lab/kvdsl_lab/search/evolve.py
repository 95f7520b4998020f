"""The search itself: generations of candidates, of which the better ones are judged more closely, and the best ones have children.

A seed decides the whole sequence; time only says where it ends. What the store knows is not measured again, so that a search which was
stopped comes to where it was in moments, and goes on.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Protocol

import numpy as np

from kvdsl.ir.nodes import Policy
from kvdsl.ir.printer import print_policy
from kvdsl_lab.search import moves
from kvdsl_lab.search.space import EVERY, Bounds, Size, canonical, key, size_of, without_parts
from kvdsl_lab.search.store import Store, geometric_mean

GENERATION = 48
"""Candidates that are judged on the cheapest rung, at most."""
PROMOTED = 8
"""Of a generation, those that are judged on the last rung, at least; so many candidates are judged together."""
SLACK = 0.1
"""Of the cheapest rung's error, by which a candidate may be behind the last of its niche and still climb. Among good policies that rung
orders no better than chance: it only says who is not worth a closer look."""
NICHE = 6
"""Policies of the same bytes of state that may have children."""
OPERATION = 0.001
"""Of its error, that a policy has to be better by for every operation more."""
TUNE_EVERY = 8
"""Generations between two in which a policy's numbers are tuned."""
SPARED = 0.002
"""Of its error, for which a finalist may become simpler."""
TUNED_FOR, TUNED_AT_ONCE, TUNE_STEP = 4, 8, 0.4
"""Generations of CMA-ES, how many candidates each has, and its first step, in natural logarithms of the numbers."""


class Judges(Protocol):
    """What judges: `judge.Judge`."""

    @property
    def cases(self) -> Sequence[object]:
        """What is asked, each with a name of its own as a string."""

    @property
    def rungs(self) -> Sequence[str]:
        """What their errors are of, the cheapest first."""

    @property
    def choice(self) -> str | None:
        """What the errors are of by which the finalists are chosen, on the number behind the last rung's; None: the last rung's."""

    def errors(self, policies: Sequence[Policy], rung: int) -> list[list[float]]:
        """Of every policy the error in each case."""

    def processor_time(self) -> float:
        """Seconds that it has had of processors, up to a constant."""


@dataclass(frozen=True)
class Found:
    """A policy with what is known of it.

    Attributes:
        errors: in each case, on the rung that it reached.
    """

    policy: Policy
    key: str
    size: Size
    errors: tuple[float, ...]

    @property
    def known(self) -> tuple[Policy, str, Size]:
        """Without the errors: what is judged."""
        return self.policy, self.key, self.size

    @property
    def error(self) -> float:
        return geometric_mean(self.errors)

    @property
    def weighed(self) -> float:
        """The error, and a little for every operation: what decides between policies of the same bytes."""
        return self.error * (1 + OPERATION * self.size.nodes)

    @property
    def rounded(self) -> tuple[str, ...]:
        """The errors to five digits: on one processor other words for a policy, and other policies beside it, change what lies behind."""
        return tuple(f"{error:.5g}" for error in self.errors)


class _OutOfTime(Exception):
    pass


@dataclass
class Evolution:
    """The sequence.

    Attributes:
        until: `time.monotonic()` after which nothing new is judged; None: never.
        most: policies had after which it ends, also those that were not let in; None: no bound.
        tick: told after every generation.
        budgets: those that are searched for: whether `keep` lines fit is asked of them.
        seeds: by name, judged on the last rung.
        population: the best of every number of bytes of state, the best first, judged on the last rung.
        curve: after each generation how many policies were had by then, and the best error of any.
    """

    judge: Judges
    store: Store
    bounds: Bounds
    seed: int = 0
    until: float | None = None
    most: int | None = None
    tick: Callable[[Evolution], None] = lambda evolution: None
    budgets: Sequence[int] = EVERY
    seeds: dict[str, Found] = field(default_factory=dict)
    population: list[Found] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    generation: int = 0
    _seen: set[str] = field(default_factory=set)
    _climbed: set[tuple[str, ...]] = field(default_factory=set)
    """What the cheapest rung has said of those that left it."""

    def run(self, seeds: Sequence[tuple[str, Policy]]) -> None:
        """Search from these policies, named, until there is no time left.

        The seeds are judged whatever the time. `population` has what was found.
        """
        admitted = {name: self._admitted(policy, f"seed {name}", ()) for name, policy in seeds}
        named = {name: one for name, one in admitted.items() if one is not None}
        self._climbed |= {one.rounded for one in self._all_judged(list(named.values()), 0, always=True)}
        judged = self._all_judged(list(named.values()), self._last, always=True)
        self.seeds = {name: one for name, one in zip(named, judged, strict=True) if math.isfinite(one.error)}
        self._survive(list(self.seeds.values()))
        try:
            while self.most is None or len(self._seen) < self.most:
                self.generation += 1
                self._survive(self._tuned() if self.generation % TUNE_EVERY == 0 else self._born())
                self.tick(self)
        except _OutOfTime:
            pass

    def front(self) -> list[Found]:
        """Those of the population that no other beats in error, bytes and operations at once."""

        def costs(one: Found) -> tuple[float, ...]:
            return (*one.errors, one.size.state_bytes, one.size.nodes)

        def beaten(one: Found, other: Found) -> bool:
            pairs = list(zip(costs(one), costs(other), strict=True))
            return all(theirs <= ours for ours, theirs in pairs) and any(theirs < ours for ours, theirs in pairs)

        return [one for one in self.population if not any(beaten(one, other) for other in self.population)]

    def judged(self, policy: Policy, move: str, parents: Sequence[str], rung: int) -> Found | None:
        """One more policy, judged whatever the time; None if it is not let in."""
        one = self._admitted(policy, move, parents, again=True)
        return None if one is None else self._all_judged([one], rung, always=True)[0]

    @property
    def choosing(self) -> int:
        """The rung by which finalists are chosen."""
        return self._last + (self.judge.choice is not None)

    def chosen(self, many: Sequence[Found]) -> list[Found]:
        """Policies as the rung sees them that chooses, judged whatever the time."""
        return self._all_judged([one.known for one in many], self.choosing, always=True)

    def finalists(self, count: int) -> list[Found]:
        """The best of each number of bytes of state, then the next best; no seeds. Each without what it does not need, the best first.

        On another text than is searched on, where there is one: the best of many is the best there partly by chance. Who is simplified may
        come to fewer bytes, which another finalist has, too.
        """
        seeds = {one.key for one in self.seeds.values()}
        there = self.chosen([one for one in self.population if one.key not in seeds])
        found = sorted(there, key=lambda one: (one.weighed, one.key))
        firsts = {one.size.state_bytes: one for one in reversed(found)}
        ordered = sorted(firsts.values(), key=lambda one: one.error) + found
        simplest: dict[Policy, Found] = {}
        for one in map(self._simplest, dict.fromkeys(ordered)):
            if one.key not in seeds:
                simplest.setdefault(one.policy, one)
            if len(simplest) == count:
                break
        return sorted(simplest.values(), key=lambda one: (one.weighed, one.key))

    def _simplest(self, one: Found) -> Found:
        """The policy without every part that can be left out at next to no cost."""
        parts = without_parts(one.policy, self.budgets).values()
        admitted = [self._admitted(policy, "simplified", [one.key], again=True) for policy in parts]
        for simpler in self._all_judged([part for part in admitted if part is not None], self.choosing, always=True):
            if simpler.error <= one.error * (1 + SPARED):
                return self._simplest(simpler)
        return one

    # -- a generation --------------------------------------------------------------------------------------------------

    def _born(self) -> list[Found]:
        """Children of the population that were judged on the last rung."""
        children, climbing = self._children(self._rng("children")), list[Found]()
        for _ in range(GENERATION // PROMOTED):
            climbing += [one for one in self._all_judged(list(islice(children, PROMOTED)), 0) if self._climbs(one)]
            if len(climbing) >= PROMOTED:
                break
        return self._all_judged([one.known for one in climbing], self._last)

    def _children(self, rng: Random) -> Iterator[tuple[Policy, str, Size]]:
        """Policies that were not had yet, until hardly any comes."""
        known = moves.moves(self.bounds)
        for _ in range(50 * GENERATION):
            parents = [self._parent(rng), self._parent(rng)]
            name = rng.choice(list(known))
            child = known[name](rng, [one.policy for one in parents])
            if child is None:
                continue
            crossed = name in ("statements", "expressions")
            one = self._admitted(child, name, [parent.key for parent in parents[: 1 + crossed]])
            if one is not None:
                yield one

    def _climbs(self, one: Found) -> bool:
        """Whether the cheapest rung lets a candidate go on, which is noted: it is not far behind its niche, and does what no other did."""
        niche = self._niche(one.size.state_bytes)
        if not math.isfinite(one.error) or one.rounded in self._climbed:
            return False
        if len(niche) == NICHE:
            firsts = self._all_judged([other.known for other in niche], 0, always=True)
            if one.error > (1 + SLACK) * max(first.error for first in firsts):
                return False
        self._climbed.add(one.rounded)
        return True

    def _tuned(self) -> list[Found]:
        """A policy with better numbers, by CMA-ES."""
        from cmaes import CMA

        rng = self._rng("numbers")
        parent = self._parent(rng)
        values = [value for _, value in moves.numbers(parent.policy)]
        if len(values) < 2:  # CMA-ES needs two dimensions; the move "number" does for one
            return self._born()
        optimizer = CMA(mean=np.log(values), sigma=TUNE_STEP, seed=rng.randrange(2**31), population_size=TUNED_AT_ONCE)
        found: list[Found] = []
        for _ in range(TUNED_FOR):
            points = [optimizer.ask() for _ in range(optimizer.population_size)]
            tuned = [moves.with_numbers(parent.policy, np.exp(point).tolist()) for point in points]
            admitted = [self._admitted(policy, "tuned", [parent.key], again=True) for policy in tuned]
            judged = {one.key: one for one in self._all_judged([one for one in admitted if one is not None], self._last)}
            errors = [1e3 if one is None else min(judged[one[1]].error, 1e3) for one in admitted]
            optimizer.tell(list(zip(points, errors, strict=True)))
            found += judged.values()
        return found

    def _survive(self, more: Sequence[Found]) -> None:
        """The best of every niche; of those with the same errors, which are one policy in other words, the smallest."""
        told: dict[tuple[str, ...], Found] = {}
        for one in sorted((*self.population, *more), key=lambda one: (one.weighed, one.key)):
            if math.isfinite(one.error):
                told.setdefault(one.rounded, one)
        niches: dict[int, list[Found]] = {}
        for one in told.values():
            niches.setdefault(one.size.state_bytes, []).append(one)
        self.population = sorted(
            (one for niche in niches.values() for one in niche[:NICHE]), key=lambda one: (one.weighed, one.key)
        )
        before = [error for _, error in self.curve[-1:]]
        self.curve.append((len(self._seen), min(before + [one.error for one in self.population])))

    @property
    def _cases(self) -> list[str]:
        return [str(case) for case in self.judge.cases]

    @property
    def _last(self) -> int:
        """The last rung."""
        return len(self.judge.rungs) - 1

    def _parent(self, rng: Random) -> Found:
        """The better of two that are drawn from a niche."""
        niche = self._niche(rng.choice(sorted({one.size.state_bytes for one in self.population})))
        return niche[min(rng.randrange(len(niche)) for _ in range(2))]

    def _niche(self, state_bytes: int) -> list[Found]:
        """Those of the population with so many bytes of state, the best first."""
        return [one for one in self.population if one.size.state_bytes == state_bytes]

    def _rng(self, what: str) -> Random:
        digest = hashlib.sha256(f"{self.seed} {self.generation} {what}".encode()).digest()
        return Random(int.from_bytes(digest[:8], "little"))

    # -- one policy ----------------------------------------------------------------------------------------------------

    def _admitted(
        self, policy: Policy, move: str, parents: Sequence[str], *, again: bool = False
    ) -> tuple[Policy, str, Size] | None:
        """A policy in its canonical form with its key and size; None if it was had already (unless `again`), or is not let in."""
        try:
            policy = canonical(policy, self.budgets)
        except ValueError:  # a number beyond what a node may hold
            return None
        name = key(policy)
        if name in self._seen and not again:
            return None
        known, size = self.store.size(name)
        if not known:
            size = size_of(policy, self.bounds)
            self.store.add(name, print_policy(policy), move, parents, size)
        self._seen.add(name)
        return None if size is None else (policy, name, size)

    def _all_judged(self, many: Sequence[tuple[Policy, str, Size]], rung: int, *, always: bool = False) -> list[Found]:
        """Policies as the rung sees them: those that the store does not know in one go."""
        known = {name: self.store.errors(name, rung, self._cases) for _, name, _ in many}
        todo = {name: policy for policy, name, _ in many if known[name] is None}
        if todo:
            if not always and self.until is not None and time.monotonic() >= self.until:
                raise _OutOfTime
            begun = self.judge.processor_time()  # what others take of the machine, or a pause, is none of the search's work
            found = self.judge.errors(list(todo.values()), rung)
            seconds = (self.judge.processor_time() - begun) / len(todo)
            for name, errors in zip(todo, found, strict=True):
                self.store.judge(name, rung, self._cases, errors, seconds)
                known[name] = errors
        return [Found(policy, name, size, tuple(known[name] or ())) for policy, name, size in many]
