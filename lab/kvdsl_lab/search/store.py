"""What is known of every policy of a search, in one SQLite file: its text, where it came from, what it costs, how it was judged.

    search     name, value              what the rest depends on: model, text, budgets, bounds, seeds, and so on
    policy     key, text, move, parents, state_bytes, nodes
    judged     key, rung, task, error, seconds      a task at a budget, such as `text 128`; processor time, a share of all tasks
    proven     name, text, budget, stretch, loss    nats a token

A search that was stopped goes on with the same file: what stands in it is not measured again. Every entry is written when it is known.
`user_version` is the number of the rules by which the search was begun.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvdsl.errors import KvdslError
from kvdsl_lab.search.space import Size

RULES = 2
"""Raise it with whatever makes another sequence of the same seed: canonical forms, moves, who survives."""

_TABLES = """
create table if not exists search (name text primary key, value text not null);
create table if not exists policy (
  key text primary key, text text not null, move text not null, parents text not null, state_bytes integer, nodes integer
);
create table if not exists judged (key text, rung integer, task text, error real, seconds real, primary key (key, rung, task));
create table if not exists proven (
  name text, text text, budget integer, stretch integer, loss real not null, primary key (name, text, budget, stretch)
);
"""


def geometric_mean(errors: Sequence[float]) -> float:
    """Over the cases: a tenth less counts as much in each."""
    return math.exp(sum(math.log(max(error, 1e-12)) for error in errors) / len(errors))


class Store:
    """One file; `with Store(path, facts) as store`."""

    def __init__(self, path: Path, facts: Mapping[str, Any], *, fresh: bool = False) -> None:
        """Opens or makes it.

        Raises:
            KvdslError: if the file is of another search, or none at all.
        """
        if fresh:
            path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        try:
            self._database = sqlite3.connect(path, isolation_level=None)
            self._database.executescript(_TABLES)
            known = dict(self._database.execute("select name, value from search"))
            (rules,) = self._database.execute("pragma user_version").fetchone()
        except sqlite3.DatabaseError as error:
            raise KvdslError(f"{path} cannot be used ({error}); give another --out, or --fresh") from error
        if known and rules != RULES:
            raise KvdslError(
                f"{path} was begun by a kvdsl whose search goes another way; go on with that one, or give another --out, or --fresh to "
                "forget it"
            )
        told = {name: json.dumps(value) for name, value in facts.items()}
        differing = [name for name in told if name in known and known[name] != told[name]]
        if differing:
            raise KvdslError(
                f"{path} is of another search: {', '.join(f'{name} was {known[name]}' for name in differing)}; "
                "give the same options, another --out, or --fresh to forget it"
            )
        self._database.execute(f"pragma user_version = {RULES}")
        self._database.executemany("insert or ignore into search values (?, ?)", told.items())

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    # -- policies ------------------------------------------------------------------------------------------------------

    def size(self, key: str) -> tuple[bool, Size | None]:
        """Whether the policy is known, and what it costs; None if it was not let in."""
        row = self._database.execute("select state_bytes, nodes from policy where key = ?", (key,)).fetchone()
        return row is not None, None if row is None or row[0] is None else Size(*row)

    def add(self, key: str, text: str, move: str, parents: Sequence[str], size: Size | None) -> None:
        """A policy that was not known."""
        costs = (None, None) if size is None else (size.state_bytes, size.nodes)
        self._database.execute(
            "insert or ignore into policy values (?, ?, ?, ?, ?, ?)", (key, text, move, " ".join(parents), *costs)
        )

    def origin(self, key: str) -> tuple[str, list[str]]:
        """The move that a policy came from, and its parents' keys."""
        move, parents = self._database.execute("select move, parents from policy where key = ?", (key,)).fetchone()
        return move, parents.split()

    def counts(self) -> dict[str, float]:
        """How many policies were tried and let in, how often one was judged (on each rung once), and the processor hours of that."""
        tried, admitted = self._database.execute("select count(*), count(state_bytes) from policy").fetchone()
        (judged,) = self._database.execute("select count(*) from (select distinct key, rung from judged)").fetchone()
        return {"tried": tried, "admitted": admitted, "judged": judged, "processor_hours": round(self.hours(), 3)}

    def hours(self, rung: int | None = None) -> float:
        """Of processors, that judging took; on one rung, or on all."""
        (seconds,) = self._database.execute(
            "select total(seconds) from judged where ? is null or rung = ?", (rung, rung)
        ).fetchone()
        return float(seconds) / 3600

    # -- judgements ----------------------------------------------------------------------------------------------------

    def errors(self, key: str, rung: int, cases: Sequence[str]) -> list[float] | None:
        """What was found in each case, if all of it was."""
        found = dict(self._database.execute("select task, error from judged where key = ? and rung = ?", (key, rung)))
        return [found[case] for case in cases] if all(case in found for case in cases) else None

    def judge(self, key: str, rung: int, cases: Sequence[str], errors: Sequence[float], seconds: float) -> None:
        """What was found, and how much processor time that took."""
        rows = [(key, rung, case, error, round(seconds / len(cases), 3)) for case, error in zip(cases, errors, strict=True)]
        self._database.execute("begin")
        self._database.executemany("insert or replace into judged values (?, ?, ?, ?, ?)", rows)
        self._database.execute("commit")

    def means(self, rung: int) -> dict[str, float]:
        """By key the geometric mean of what was found on a rung; without those of which an error is infinite."""
        found: dict[str, list[float]] = {}
        for key, error in self._database.execute("select key, error from judged where rung = ?", (rung,)):
            found.setdefault(key, []).append(error)
        return {key: geometric_mean(errors) for key, errors in found.items() if all(map(math.isfinite, errors))}

    def lineage(self) -> list[tuple[str, str, list[str], bool]]:
        """Of every policy its key, the move that it came from, its parents' keys, and whether it was let in."""
        rows = self._database.execute("select key, move, parents, state_bytes is not null from policy order by rowid")
        return [(key, move, parents.split(), bool(admitted)) for key, move, parents, admitted in rows]

    # -- proof ---------------------------------------------------------------------------------------------------------

    def loss(self, name: str, text: str, budget: int, stretch: int) -> float | None:
        """A stretch's loss under a policy, nats a token, if it was measured."""
        row = self._database.execute(
            "select loss from proven where name = ? and text = ? and budget = ? and stretch = ?",
            (name, text, budget, stretch),
        ).fetchone()
        return None if row is None else float(row[0])

    def prove(self, name: str, text: str, budget: int, stretch: int, loss: float) -> None:
        """What was measured."""
        row = (name, text, budget, stretch, loss)
        self._database.execute("insert or replace into proven values (?, ?, ?, ?, ?)", row)
