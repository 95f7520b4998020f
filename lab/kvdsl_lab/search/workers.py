"""A judge in several processes, each with a thread and a model of its own: Python, between two kernels, then has all cores as well."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING

from kvdsl.ir.nodes import Policy
from kvdsl_lab.search.judge import Case, Judge, Rung

if TYPE_CHECKING:
    from kvdsl_lab.search.run import Plan


class Workers:
    """Judges as `judge.Judge` does, of which it has one in every process; `with Workers(judge, plan, 2) as workers`.

    Args:
        judge: this process's own, which says what the cases and rungs are.
        plan: what the others make theirs of.
    """

    def __init__(self, judge: Judge, plan: Plan, count: int) -> None:
        self.cases: tuple[Case, ...] = judge.cases
        self.rungs: tuple[Rung, ...] = judge.rungs
        self._count, self._theirs = count, 0.0
        self._pool = ProcessPoolExecutor(
            count, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(plan,)
        )

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def errors(self, policies: Sequence[Policy], rung: int) -> list[list[float]]:
        """See `Judge.errors`."""
        asked = [self._pool.submit(_errors, list(policies[first :: self._count]), rung) for first in range(self._count)]
        found: list[list[float]] = [[] for _ in policies]
        for first, answer in enumerate(asked):
            errors, seconds = answer.result()
            found[first :: self._count] = errors
            self._theirs += seconds
        return found

    def processor_time(self) -> float:
        """Seconds that this process and the others have had."""
        return time.process_time() + self._theirs


_judge: Judge | None = None
"""A worker's own."""


def _begin(plan: Plan) -> None:
    global _judge
    import torch

    from kvdsl_lab.search.run import Material, judge_of

    torch.set_num_threads(1)
    _judge = judge_of(plan, Material.of(plan))


def _errors(policies: Sequence[Policy], rung: int) -> tuple[list[list[float]], float]:
    assert _judge is not None
    begun = _judge.processor_time()
    errors = _judge.errors(policies, rung)
    return errors, _judge.processor_time() - begun
