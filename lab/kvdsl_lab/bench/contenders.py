"""Who takes part in `kvdsl bench generate`: policies, the caches of transformers, presses of kvpress, and what is done without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvdsl.budget import tokens_of
from kvdsl_lab.bench import presses, shifting
from kvdsl_lab.bench.names import FRESH, KVPRESS, NATIVE, RECOMPUTE, SHIFT, STATIC, plain, policies_among
from kvdsl_lab.bench.texts import Pressed, Recomputed, Text
from kvdsl_lab.eval.caches import Policies


@dataclass(frozen=True)
class Contender:
    """Something that generates: `make` gives it a fresh cache, or None where a `window` of tokens is computed anew.

    Attributes:
        model: one of its own, where its cache needs another attention; otherwise everybody's.
        press: of kvpress, what its name says.
    """

    policy: str
    budget: float | None
    make: Callable[[], Any] = lambda: None
    window: float | None = None
    model: Any = None
    press: str | None = None

    def begin(self, model: Any) -> Text:
        """A text of which nothing has been read."""
        if self.window is not None:
            return Recomputed(model, None, window=self.window)
        if self.press is not None:
            return Pressed(model, self.make(), press=self._pressing)
        return Text(model if self.model is None else self.model, self.make())

    def _pressing(self, prompt: int) -> Any:
        assert self.press is not None and self.budget is not None
        return presses.press(self.press, tokens_of(self.budget, prompt), prompt)


def contenders(
    names: Sequence[str],
    settings: Mapping[str, str],
    budgets: Sequence[float],
    model: Any,
    backend: str,
    room: int | None = None,
) -> list[Contender]:
    """Everyone who is named with every budget, in the order of the names; who has none comes once.

    Args:
        room: tokens of a text, which a static cache must know from the start.

    Raises:
        DiagnosticError: if there is no such policy.
        KvdslError: if a policy is to be shifted for which that is not written, or a press cannot be had.
    """
    for name in names:
        if name.startswith((SHIFT, FRESH)):
            shifting.check_served(plain(name))
        elif name.startswith(KVPRESS):
            presses.check_press(name.removeprefix(KVPRESS))
    policies = Policies(policies_among(names), settings, backend)
    own = list(policies.pairs(budgets))
    twin = shifting.twin(model) if any(name.startswith((SHIFT, FRESH)) for name in names) else None

    def made(name: str) -> Iterator[Contender]:
        if name == NATIVE:
            yield Contender(name, None, partial(_growing, model))
        elif name == STATIC:
            yield Contender(name, None, partial(_static, model, room))
        elif name == RECOMPUTE:
            yield from (Contender(name, budget, window=budget) for budget in budgets)
        elif name.startswith(KVPRESS):
            press = name.removeprefix(KVPRESS)
            yield from (Contender(name, budget, partial(_growing, model), press=press) for budget in budgets)
        elif name.startswith((SHIFT, FRESH)):
            spec, fresh = policies.classes[plain(name)].spec, name.startswith(FRESH)
            for budget in (budget for policy, budget in own if policy == plain(name)):
                make = partial(shifting.ShiftedCache, twin, spec, {"budget": budget}, fresh=fresh)
                yield Contender(name, budget, make, model=twin)
        else:
            yield from (
                Contender(name, budget, partial(policies.make, name, model, budget))
                for policy, budget in own
                if policy == name
            )

    return [one for name in names for one in made(name)]


def _growing(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _static(model: Any, room: int | None) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=room)
