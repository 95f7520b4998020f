"""Who takes part in `kvdsl bench generate`: policies, the caches of transformers, presses of kvpress, and what is done without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvdsl.budget import tokens_of
from kvdsl_lab.bench import presses, shifting
from kvdsl_lab.bench.texts import Pressed, Recomputed, Text
from kvdsl_lab.eval.caches import Policies

NATIVE = "transformers"
"""The name of transformers' own growing cache, with the model's own attention."""

STATIC = "static"
"""The name of transformers' cache that has room for the whole text from the start, with the model's own attention."""

RECOMPUTE = "recompute"
"""The name of a window of `budget` tokens that is computed anew for every token, without a cache."""

SHIFT, FRESH = "shift:", "fresh:"
"""Before a policy's name: its rule with a cache that is shifted for every token, done well or as published (`kvdsl_lab.bench.shifting`)."""

KVPRESS = "kvpress:"
"""Before the name of a press: it leaves `budget` tokens of the prompt, and those that are generated stay."""


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
            shifting.check_served(_plain(name))
        elif name.startswith(KVPRESS):
            presses.check_press(name.removeprefix(KVPRESS))
    policies = Policies(list(dict.fromkeys(_plain(name) for name in names if _is_policy(name))), settings, backend)
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
            spec, fresh = policies.classes[_plain(name)].spec, name.startswith(FRESH)
            for budget in (budget for policy, budget in own if policy == _plain(name)):
                make = partial(shifting.ShiftedCache, twin, spec, {"budget": budget}, fresh=fresh)
                yield Contender(name, budget, make, model=twin)
        else:
            yield from (
                Contender(name, budget, partial(policies.make, name, model, budget))
                for policy, budget in own
                if policy == name
            )

    return [one for name in names for one in made(name)]


def _is_policy(name: str) -> bool:
    """Whether the name is a policy's, be it one that is to be shifted."""
    return name not in (NATIVE, STATIC, RECOMPUTE) and not name.startswith(KVPRESS)


def _plain(name: str) -> str:
    """The policy's name, where it is to be shifted as well."""
    return name.removeprefix(SHIFT).removeprefix(FRESH)


def _growing(model: Any) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def _static(model: Any, room: int | None) -> Any:
    from transformers import StaticCache

    return StaticCache(config=model.config, max_cache_len=room)
