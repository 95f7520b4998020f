"""Measuring: item by item over all tasks, so that whenever a run stops every policy has been asked the same.

`OUT/measurements.jsonl` has a line for every task, item, policy and budget:

    {"task": "fact", "item": 0, "policy": "h2o", "compiled": "1f0c…", "budget": 0.25, "values": {"known": [1.0], "later": [0.0]},
     "bytes": 3981312, "bytes_in_use": 3981312, "token_ms": 31.2, "held": 356, "note": null}

or, where a policy cannot be had with that budget, `refused` in place of what was measured. `OUT/run.json` has what else the lines
depend on.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from kvdsl.budget import is_rate
from kvdsl.compiler import analyse, find_policy
from kvdsl.errors import KvdslError
from kvdsl.explain.facts import facts, laid_out
from kvdsl.runtime.hf.models import large_biases, managed_windows
from kvdsl.runtime.hf.versions import text_config
from kvdsl_lab.eval.benchmarks.run import claim
from kvdsl_lab.eval.caches import Policies
from kvdsl_lab.leaderboard.kinds import Lab, Outcome
from kvdsl_lab.leaderboard.problems import Asking
from kvdsl_lab.leaderboard.tasks import TASKS, Task
from kvdsl_lab.processes import end_with_parent

TIMED = 2
"""Items of every task behind which a token is timed, which takes longer than what is asked."""

Row = dict[str, Any]
Pair = tuple[str, "float | None"]
"""A policy and its budget."""


@dataclass(frozen=True)
class Plan:
    """What is to be measured; it travels to other processes.

    Attributes:
        model, dtype: as for `load_model`.
        book: a text.
        length: tokens of an item's text.
        policies: names of shipped policies, or files.
        rates, tokens: budgets of prompts, and of tasks that decode.
        backend: what runs the policies.
        same_bytes: whether a policy gets so much less of a budget that it takes no more bytes than keys, values and positions do.
        memory: how caches lie in memory, as `kvdsl.load` takes it.
        asking: what a model that reasons is asked.
    """

    model: str | None
    dtype: str | None
    book: str
    length: int
    seed: int
    policies: tuple[str, ...]
    rates: tuple[float, ...]
    tokens: tuple[float, ...]
    backend: str
    same_bytes: bool = False
    memory: tuple[tuple[str, str], ...] = ()
    asking: Asking = field(default_factory=Asking)

    def budgets(self, task: Task) -> tuple[float, ...]:
        """Those of a task."""
        return self.tokens if task.while_decoding else self.rates


class Bench:
    """A model and policies, ready to measure a plan's items."""

    def __init__(self, plan: Plan) -> None:
        from kvdsl.generation.models import load_model
        from kvdsl_lab.eval.linear import widened

        model, tokenizer = load_model(plan.model, plan.dtype)
        self.plan = plan
        self.lab = Lab(widened(model), tokenizer, plan.book, plan.length, plan.seed, plan.asking)
        self.policies = Policies(plan.policies, dict(plan.memory), plan.backend)

    def compiled(self, policy: str) -> str:
        """Which text of the policy, compiled by which compiler, in which memory: the digest that its package is named by, and that."""
        package = self.policies.classes[policy].__module__.partition(".")[0].rpartition("_")[2]
        return " ".join((package, *(value for _, value in self.plan.memory)))

    def pairs(self, task: Task) -> list[Pair]:
        """Every policy with every budget of the task."""
        return list(self.policies.pairs(self.plan.budgets(task)))

    def given(self, policy: str, budget: float | None) -> float | None:
        """The budget that a policy gets where the plan says this one."""
        if budget is None or not self.plan.same_bytes:
            return budget
        whole, state = self._slots[policy]
        return budget * (whole - state) / whole if is_rate(budget) else max(1, int(budget) * (whole - state) // whole)

    @cached_property
    def _slots(self) -> dict[str, tuple[int, int]]:
        """By policy, what a slot of all layers takes, and of that what a window's does without, in bytes."""
        model, memory = self.lab.model, dict(self.plan.memory)
        config, dtype = text_config(model), str(model.dtype).removeprefix("torch.")
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kv_dtype, layers = memory.get("kv_dtype", "model"), managed_windows(model)
        unrounded = large_biases(model, layers) if kv_dtype != "model" else {}
        stored = Counter("model" if layer in unrounded else kv_dtype for layer in layers)
        told = {}
        for name in self.plan.policies:
            policy = analyse(find_policy(name)).policy
            rope = memory.get("rope") if policy.positions == "compact" else None
            ones = [(facts(laid_out(policy, rope=rope), head_dim, dtype, kind), count) for kind, count in stored.items()]
            whole = sum((one.bytes_per_token + one.rotated_half) * count for one, count in ones)
            told[name] = whole, sum(one.beyond_a_window * count for one, count in ones)
        return told

    def measure(self, name: str, number: int, pairs: Sequence[Pair], until: float | None = None) -> list[Row]:
        """An item under these policies; nothing if that was not done at `until` (`time.monotonic()`)."""
        try:
            with _ending(self.lab.model, until):
                return self._measured(name, number, pairs)
        except _TimeIsUp:
            return []

    def _measured(self, name: str, number: int, pairs: Sequence[Pair]) -> list[Row]:
        task, started = TASKS[name], {}
        item = task.kind.prepare(self.lab, name, number)
        found: dict[Pair, Row] = {}
        for policy, budget in pairs:
            make_cache = partial(self.policies.make, policy, self.lab.model, self.given(policy, budget))
            try:
                started[policy, budget] = task.kind.start(self.lab, item, make_cache)
            except KvdslError as error:
                found[policy, budget] = {"refused": str(error)}
        outcomes = task.kind.finish(self.lab, item, list(started.values())) if started else []
        found |= {pair: _row(outcome, timed=number < TIMED) for pair, outcome in zip(started, outcomes, strict=True)}
        return [
            {"task": name, "item": number, "policy": policy, "compiled": self.compiled(policy), "budget": budget,
             **found[policy, budget]}
            for policy, budget in pairs
        ]  # fmt: skip


class _TimeIsUp(Exception):
    """Ends an item between two forwards of the model."""


@contextmanager
def _ending(model: Any, until: float | None) -> Iterator[None]:
    """Within, a forward that begins after `until` raises `_TimeIsUp`."""

    def check(*_: Any) -> None:
        if until is not None and time.monotonic() >= until:
            raise _TimeIsUp

    hook = model.register_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


def _row(found: Outcome, *, timed: bool) -> Row:
    """What a line has of an outcome."""
    values = {measure: [round(value, 6) for value in parts] for measure, parts in found.values.items()}
    return {
        "values": values, "bytes": found.bytes, "bytes_in_use": found.bytes_in_use,
        "token_ms": round(found.token_ms(), 3) if timed else None, "held": found.usage.most_held, "note": found.usage.note,
    }  # fmt: skip


# -- what was measured before ------------------------------------------------------------------------------------------


class Measurements:
    """The lines of a folder. One that was cut off is dropped."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "measurements.jsonl"
        self.rows: list[Row] = []
        if self._path.exists():
            data = self._path.read_bytes()
            whole = data[: data.rfind(b"\n") + 1]
            if len(whole) < len(data):
                os.truncate(self._path, len(whole))
            try:
                self.rows = [json.loads(line) for line in whole.decode().splitlines()]
            except ValueError as error:
                raise KvdslError(f"{self._path} cannot be read ({error}); give another --out, or --fresh") from error

    def add(self, rows: Sequence[Row]) -> None:
        """Append lines, in one write."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
        self.rows += rows

    def missing(self, bench: Bench, task: Task, number: int) -> list[Pair]:
        """The policies and budgets of which something is unknown at an item; what another text of a policy gave does not count."""
        known = {
            (row["policy"], row["budget"], row["compiled"])
            for row in self.rows
            if row["task"] == task.name and row["item"] == number and _whole(row)
        }
        return [
            (policy, budget) for policy, budget in bench.pairs(task) if (policy, budget, bench.compiled(policy)) not in known
        ]


# -- running -----------------------------------------------------------------------------------------------------------


def measure(
    bench: Bench,
    tasks: Sequence[Task],
    items: int,
    out: Path,
    facts: Mapping[str, Any],
    *,
    workers: int = 1,
    until: float | None = None,
    fresh: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> list[Row]:
    """All lines of the plan's policies and budgets, those of before included.

    Args:
        items: of every task.
        facts: what the lines depend on besides: a folder of other facts is not gone on with.
        workers: processes, each with a thread and a model of its own; 1 is this process.
        until: end then (`time.monotonic()`): an item that is not finished is dropped.
        tick: called for every item of a task.

    Raises:
        KvdslError: if the folder belongs to another run, or the text has too little for so many items.
    """
    for task in tasks:
        task.kind.check(bench.lab, task.name, items)
    claim(out, facts, fresh=fresh)
    known = Measurements(out)
    todo = _todo(bench, known, tasks, items, until, tick)
    for rows in map_units(bench, todo, workers):
        if rows:
            known.add(rows)
            tick()
    current = {
        (name, policy, budget, bench.compiled(policy))
        for name, task in TASKS.items()
        for policy, budget in bench.pairs(task)
    }
    return [
        row for row in known.rows if (row["task"], row["policy"], row["budget"], row["compiled"]) in current and _whole(row)
    ]


def _whole(row: Row) -> bool:
    """Whether a line has all that its task measures today."""
    return "refused" in row or {*TASKS[row["task"]].kind.measures} <= {*row["values"]}


Unit = tuple[str, int, list[Pair], "float | None"]
"""What `Bench.measure` takes."""


def _todo(
    bench: Bench, known: Measurements, tasks: Sequence[Task], items: int, until: float | None, tick: Callable[[], None]
) -> Iterator[Unit]:
    for number in range(items):
        for task in tasks:
            pairs = known.missing(bench, task, number)
            if not pairs:
                tick()
            elif until is None or time.monotonic() < until:
                yield task.name, number, pairs, until


def map_units(bench: Bench, units: Iterator[Unit], workers: int) -> Iterator[list[Row]]:
    """The rows of every unit, as they come."""
    if workers == 1:
        yield from (bench.measure(*unit) for unit in units)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(bench.plan,)) as pool:
        running: set[Future[list[Row]]] = set()
        try:
            for unit in units:
                running.add(pool.submit(_measure, unit))
                while len(running) >= workers:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    yield from (future.result() for future in done)
            while running:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        except BrokenProcessPool as error:
            raise KvdslError(
                "a process that measures has ended, killed or out of memory: what came so far is kept, and the same command goes on; fewer "
                "--workers take less memory"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


_bench: Bench | None = None
"""A worker's own."""


def _begin(plan: Plan) -> None:
    global _bench
    import torch

    end_with_parent()
    torch.set_num_threads(1)
    _bench = Bench(plan)


def _measure(unit: Unit) -> list[Row]:
    assert _bench is not None
    return _bench.measure(*unit)
