"""The constants with which `kvdsl build --report` estimates `attend`: `python -m scripts.gpu.fit` prints them, and how far they are off.

`results/nvidia_h200/cuts.jsonl` has the times of cuts, `attend_code.jsonl` beside it what their machine code says, compiled from the commit
and by the Triton that its first line names. Constants come from two thirds of the cuts by least squares of relative errors, none below 0;
the others are held out, each at all batch sizes. Cuts that spill much are left out. `settle`, `look` and `choose` are not fitted: which of
their loops run depends on the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Any
from zlib import crc32

import torch

from kvdsl.runtime.gpu.loops import Loop
from kvdsl.runtime.gpu.report import CHIPS, FEW_SPILLS, Fitted, resident, terms
from scripts.gpu import ROOT

FOLDER = ROOT / "results" / "nvidia_h200"
CHOSEN = 512
"""Slots that SparCas attends to."""


@dataclass(frozen=True)
class Time:
    """A measurement: the terms of `Fitted`, and microseconds; `held`: whether it is held out."""

    terms: tuple[float, ...]
    us: float
    held: bool


@dataclass(frozen=True)
class Rival:
    """A simpler model, and its errors on what is held out."""

    name: str
    median: float
    worst: float


@dataclass(frozen=True)
class Made:
    """What was fitted; `counts`: measurements fitted to and held out."""

    fitted: Fitted
    rivals: tuple[Rival, ...]
    counts: tuple[int, int]


def times() -> list[Time]:
    """All measurements of `attend` whose cut spills little."""
    code = {(one["policy"], one["cut"], one["block"]): one for one in _lines("attend_code.jsonl")[1:]}
    chip, found = CHIPS["cuda:90"], []
    for row in (row for row in _lines("cuts.jsonl") if row.get("kernel") == "attend"):
        one = code[row["policy"], row["cut"], row["block"]]
        if one["spills"] > FEW_SPILLS:
            continue
        slots = CHOSEN if row["policy"] == "sparcas" else row["live"]
        bits = one["loop_bytes"] // 4  # per lane of a warp's 32
        loop = Loop("attend", one["loop_instructions"], {bits: 1}, 0, 0, one["loop_trips"])
        most = resident(chip, one["registers"], one["shared"], one["warps"], 32)
        iterations = math.ceil(math.ceil(slots / row["grid"][0]) / row["block"])
        own = terms(chip, loop, one["instructions"], one["chain"], one["warps"], most, math.prod(row["grid"]), iterations)
        found.append(Time(own, row["us"], crc32((row["policy"] + row["cut"]).encode()) % 3 == 0))
    return found


def made() -> Made:
    """Fit."""
    every = times()
    constants = [float(f"{constant:.3g}") for constant in _fit(every, range(5))]
    off = (round(error, 3) for error in _errors(constants, every))
    rivals = (("bytes", (4,)), ("launch and bytes", (0, 4)))
    held = sum(time.held for time in every)
    return Made(
        Fitted(*constants, *off),
        tuple(Rival(name, *_errors(_fit(every, which), every)) for name, which in rivals),
        (len(every) - held, held),
    )


def _fit(every: Iterable[Time], which: Sequence[int]) -> list[float]:
    """The constants of these terms, the others 0: of all subsets without a negative one the best."""
    seen = [time for time in every if not time.held]
    best, found = math.inf, [0.0] * 5
    for some in (some for count in range(1, len(which) + 1) for some in combinations(which, count)):
        matrix = torch.tensor([[time.terms[n] / time.us for n in some] for time in seen], dtype=torch.float64)
        own = torch.linalg.lstsq(matrix, torch.ones(len(seen), 1, dtype=torch.float64)).solution[:, 0]
        off = float((matrix @ own - 1).square().sum())
        if off < best and float(own.min()) >= 0:
            best, found = off, [float(own[some.index(n)]) if n in some else 0.0 for n in range(5)]
    return found


def _errors(constants: list[float], every: Iterable[Time]) -> tuple[float, float]:
    """Relative errors on what is held out: the median, and the worst."""
    off = [abs(sum(map(math.prod, zip(constants, time.terms, strict=True))) / time.us - 1) for time in every if time.held]
    return median(off), max(off)


def _lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


if __name__ == "__main__":
    print(made())
