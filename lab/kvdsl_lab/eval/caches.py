"""Making caches for a measurement: policies by name, with budgets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvdsl.loading import load
from kvdsl.precheck import settings_by_policy
from kvdsl_lab.eval.names import ASKER


class Policies:
    """Cache classes by name, loaded once.

    Args:
        settings: defaults of params to change, and options of `kvdsl.memory`, in those policies that have them.

    Raises:
        DiagnosticError: if there is no such policy, or a param that is set is in none of them.
        KvdslError: if one needs values from its caller.
    """

    def __init__(self, names: Sequence[str], settings: Mapping[str, str], backend: str = "auto") -> None:
        self.backend = backend
        self.classes = {name: load(name, **own) for name, own in settings_by_policy(names, settings, ASKER).items()}

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
