"""Making caches for a measurement: policies by name, with budgets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvdsl.budget import as_written, tokens_or_rate
from kvdsl.errors import KvdslError
from kvdsl.loading import load
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.supplied import refuse_required
from kvdsl.shipped import separate


class Policies:
    """Cache classes by name, loaded once.

    Args:
        settings: defaults of params to change, and `storage` and `rope`, in those policies that have them.

    Raises:
        DiagnosticError: if there is no such policy, or a param that is set is in none of them.
        KvdslError: if one needs values from its caller.
    """

    def __init__(self, names: Sequence[str], settings: Mapping[str, str], backend: str = "auto") -> None:
        self.backend = backend
        self.classes = {name: load(name) for name in names}
        for cache_class in self.classes.values():
            refuse_required(cache_class.spec, "a measurement")
        params = {name: _settable(self.classes[name].spec) for name in names}
        nobodys = {name: value for name, value in settings.items() if not any(name in own for own in params.values())}
        for name, own in params.items() if settings else ():
            self.classes[name] = load(name, **nobodys, **{key: value for key, value in settings.items() if key in own})

    def pairs(self, budgets: Sequence[float]) -> Iterator[tuple[str, float | None]]:
        """Every policy with every budget; one that has no budget comes once, with None."""
        for name, cache_class in self.classes.items():
            if "budget" not in cache_class.spec.params:
                yield name, None
                continue
            for budget in budgets:
                yield name, budget

    def make(self, name: str, model: Any, budget: float | None) -> Any:
        """A fresh cache."""
        given = {} if budget is None else {"budget": budget}
        cache_class: Any = self.classes[name]
        return cache_class(model, backend=self.backend, **given)

    def release(self, model: Any) -> None:
        """Give the model its own attention back."""
        for cache_class in self.classes.values():
            cache_class.release(model)


def _settable(spec: PolicySpec) -> tuple[str, ...]:
    """What may be set of a policy: its params, and how a cache of it lies in memory."""
    return (*spec.params, "storage", *(("rope",) if spec.compact else ()))


def parse_budgets(text: str) -> list[float]:
    """`128,0.25,1.0` as numbers: ints are tokens, floats rates.

    Raises:
        KvdslError: if one is no budget.
    """
    found: list[float] = []
    for part in (piece.strip() for piece in text.split(",")):
        try:
            found.append(tokens_or_rate(as_written(float(part), part)))
        except (ValueError, OverflowError) as error:
            raise KvdslError(
                f"`{part}` is no budget; give numbers of tokens (128), or rates of the prompt up to 1.0 (0.25), separated by commas"
            ) from error
    return found


def parse_policies(text: str) -> list[str]:
    """`roco,h2o` as names; commas inside of brackets and braces separate nothing: `h2o,h2o with { when prefill; keep last 64 }`.

    Raises:
        KvdslError: if there is none.
    """
    names = separate(text)
    if not names:
        raise KvdslError("no policy is named; give for example `--policies full,roco,h2o`")
    return list(dict.fromkeys(names))
