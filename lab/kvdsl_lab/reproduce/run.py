"""Running a paper's cells: what is measured is saved after each, and a run goes on where the last one stopped.

`OUT/NAME.json` is the result and the memory of it:

    {"format_version": "1.0", "environment": {...}, "paper": "sparcas", "title": ..., "setup": {...}, "finished": true, "seconds": 812.4,
     "experiments": [{"name", "title", "source", "says", "rows": [...], "cells": [{"name", "rows": 6, "seconds": 3.2}],
                      "findings": [{"claim", "holds", "measured"}], "figures": ["sparcas/table2a.png", ...]}]}

Cells say how many of the rows are theirs, in order. An experiment's claims are held against its rows as soon as it is complete. Another
setup makes another result: the old one is kept beside it. An experiment is measured in one environment, and names it (`environment`) if
that is not the file's, which is the last run's: what a run on another machine was not asked for stays as it was measured.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvdsl.errors import KvdslError
from kvdsl.files import write_whole
from kvdsl_lab.reproduce.experiment import Experiment, Paper, Row, Setup


def load_paper(name: str) -> Paper:
    """The paper of `PAPERS`."""
    paper: Paper = importlib.import_module(f"kvdsl_lab.reproduce.{name}").PAPER
    return paper


@dataclass(frozen=True)
class Measured:
    """A cell that has been run."""

    rows: list[Row]
    seconds: float
    environment: Mapping[str, Any]


Done = dict[tuple[str, str], Measured]
"""By experiment and cell."""


def reproduce(
    paper: Paper,
    setup: Setup,
    out: Path,
    head: Mapping[str, Any],
    *,
    only: Collection[str] = (),
    fresh: bool = False,
    drawn: bool = True,
    tick: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Run what has not been run yet, and give the whole result. Only `OUT/NAME.json` is written.

    Args:
        head: what the result begins with: its format's version and the environment.
        only: names of experiments to run; what was measured of the others stays. None: all of them.
        fresh: forget what was measured of these before.
        drawn: whether the result names figures, which `plots.draw_all` then draws.
        tick: told the name of every cell before it begins.

    Raises:
        KvdslError: if a result of before cannot be read, or there is no such experiment.
    """
    chosen = experiments(paper, only)
    path = out / f"{paper.name}.json"
    head = {**head, "paper": paper.name, "title": paper.title, "setup": setup.facts(paper.reads_text)}
    done = _earlier(path, head, {one.name for one in chosen}, fresh)
    if path.exists() and not done:
        os.replace(path, _previous(path))
    out.mkdir(parents=True, exist_ok=True)
    for experiment, cell in ((one, cell) for one in chosen for cell in one.cells(setup)):
        tick(f"{experiment.source}: {cell.name}")
        if (experiment.name, cell.name) in done:
            continue
        begun = time.perf_counter()
        rows = cell.run(setup)
        seconds = round(time.perf_counter() - begun, 2)
        done[experiment.name, cell.name] = Measured(rows, seconds, head["environment"])
        _save(path, _result(paper, setup, head, done))
    result = _result(paper, setup, head, done, drawn)
    _save(path, result)
    return result


def experiments(paper: Paper, only: Collection[str]) -> list[Experiment]:
    """Those with these names, or all.

    Raises:
        KvdslError: for a name that none has.
    """
    names = [one.name for one in paper.experiments]
    unknown = [name for name in only if name not in names]
    if unknown:
        raise KvdslError(f"{paper.name} has no experiment `{unknown[0]}`; it has {', '.join(names)}")
    return [one for one in paper.experiments if not only or one.name in only]


def count(paper: Paper, setup: Setup, only: Collection[str] = ()) -> int:
    """How many cells there are."""
    return sum(1 for one in experiments(paper, only) for _ in one.cells(setup))


# -- the result --------------------------------------------------------------------------------------------------------


def _result(paper: Paper, setup: Setup, head: Mapping[str, Any], done: Done, drawn: bool = False) -> dict[str, Any]:
    names = {one.name: [cell.name for cell in one.cells(setup)] for one in paper.experiments}
    run = [done.get((one, cell)) for one, cells in names.items() for cell in cells]
    finished = None not in run
    return {
        **head, "finished": finished, "seconds": round(sum(cell.seconds for cell in run if cell is not None), 1),
        "experiments": [
            _part(one, names[one.name], done, paper.name, drawn) | _elsewhere(one, done, head["environment"])
            for one in paper.experiments
        ],
    }  # fmt: skip


def _part(experiment: Experiment, cells: Sequence[str], done: Done, paper: str, drawn: bool) -> dict[str, Any]:
    """One experiment as far as it has come; what it finds, and its figures, when all of it is measured."""
    run = {name: done[experiment.name, name] for name in cells if (experiment.name, name) in done}
    rows, complete = [row for cell in run.values() for row in cell.rows], len(run) == len(cells)
    stem = f"{paper}/{experiment.name}"
    return {
        "name": experiment.name, "title": experiment.title, "source": experiment.source, "says": experiment.says, "rows": rows,
        "cells": [{"name": name, "rows": len(cell.rows), "seconds": cell.seconds} for name, cell in run.items()],
        "findings": [asdict(one) for one in experiment.findings(rows)] if complete else [],
        "figures": [f"{stem}.png", f"{stem}.svg"] if drawn and complete and experiment.plot else [],
    }  # fmt: skip


def _elsewhere(experiment: Experiment, done: Done, here: Mapping[str, Any]) -> dict[str, Any]:
    """The environment in which an experiment was measured, if it is another one."""
    others = [one.environment for (name, _), one in done.items() if name == experiment.name and one.environment != here]
    return {"environment": others[0]} if others else {}


def _save(path: Path, result: Mapping[str, Any]) -> None:
    """Write the file as a whole, so that a run that is killed meanwhile leaves the one before."""
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
    write_whole(path, text + "\n")


# -- what was measured before ------------------------------------------------------------------------------------------


def _earlier(path: Path, head: Mapping[str, Any], chosen: Collection[str], fresh: bool) -> Done:
    """The cells of a run with the same setup, but for those of `chosen` experiments that were measured in another environment, or
    are wanted `fresh`.

    What another setup left, or goes, is kept beside it.
    """
    if not path.exists():
        return {}
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        if any(result[name] != value for name, value in head.items() if name != "environment"):
            return {}
        cells = _cells(result)
    except (ValueError, KeyError, TypeError) as error:
        raise KvdslError(
            f"{path} is no result of `kvdsl reproduce`; move it away, or give another folder with --out"
        ) from error
    here = set() if fresh else {at for at, one in cells.items() if one.environment == head["environment"]}
    found = {at: one for at, one in cells.items() if at in here or at[0] not in chosen}
    if found and len(found) < len(cells):
        shutil.copyfile(path, _previous(path))
    return found


def _previous(path: Path) -> Path:
    return path.with_suffix(".previous.json")


def _cells(result: Mapping[str, Any]) -> Done:
    done: Done = {}
    for experiment in result["experiments"]:
        at, environment = 0, experiment.get("environment", result["environment"])
        for cell in experiment["cells"]:
            rows = experiment["rows"][at : at + cell["rows"]]
            done[experiment["name"], cell["name"]] = Measured(rows, cell["seconds"], environment)
            at += cell["rows"]
    return done
