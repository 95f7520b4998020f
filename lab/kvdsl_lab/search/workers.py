"""A judge in several processes, each with a thread and a model of its own: Python, between two kernels, then has all cores as well."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvdsl.errors import KvdslError
from kvdsl.ir.nodes import Policy
from kvdsl_lab.processes import end_with_parent
from kvdsl_lab.search.judge import Judge

if TYPE_CHECKING:
    from kvdsl_lab.search.run import Plan


class Workers:
    """Judges as `judge.Judge` does, of which every process has one; `with Workers(plan, 2) as workers`.

    Args:
        plan: what they make theirs of.
    """

    def __init__(self, plan: Plan, count: int) -> None:
        self.cases = plan.cases
        self._count, self._theirs = count, 0.0
        self._pool = ProcessPoolExecutor(
            count, mp_context=multiprocessing.get_context("spawn"), initializer=_begin, initargs=(plan,)
        )
        with _all_there():
            self.rungs, self.choice = self._pool.submit(_told).result()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def errors(self, policies: Sequence[Policy], rung: int) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in policies]
        with _all_there():
            asked = [self._pool.submit(_errors, list(policies[first :: self._count]), rung) for first in range(self._count)]
            for first, answer in enumerate(asked):
                found[first :: self._count], seconds = answer.result()
                self._theirs += seconds
        return found

    def processor_time(self) -> float:
        """Seconds that this process and the others have had."""
        return time.process_time() + self._theirs


@contextmanager
def _all_there() -> Iterator[None]:
    try:
        yield
    except BrokenProcessPool as error:
        raise KvdslError(
            "a process that judges has ended, perhaps for want of memory: give fewer --workers; the search goes on where it was"
        ) from error


_judge: Judge | None = None
"""A worker's own."""


def _begin(plan: Plan) -> None:
    global _judge
    import torch

    from kvdsl_lab.search.run import Material, judge_of

    end_with_parent()
    torch.set_num_threads(1)
    _judge = judge_of(plan, Material.of(plan))


def _told() -> tuple[tuple[str, ...], str | None]:
    assert _judge is not None
    return _judge.rungs, _judge.choice


def _errors(policies: Sequence[Policy], rung: int) -> tuple[list[list[float]], float]:
    assert _judge is not None
    begun = _judge.processor_time()
    errors = _judge.errors(policies, rung)
    return errors, _judge.processor_time() - begun
