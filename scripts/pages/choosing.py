"""The tables of docs/choosing.md and docs/records/quality.md, made from the results of leaderboards."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from statistics import mean
from typing import Any

from scripts.pages.markdown import ROOT, table

BOARD = ROOT / "results" / "leaderboard"


@dataclass(frozen=True)
class _Measured:
    """A column of the leaderboard at one budget, as the page shows it."""

    head: str
    folder: str
    column: str
    budget: float
    shown: str = "mean"
    digits: int = 2

    def cells(self) -> dict[str, str]:
        """By policy: what it is, with its interval and place."""
        found = json.loads((BOARD / self.folder / "leaderboard.json").read_text(encoding="utf-8"))
        rows = next(one["rows"] for one in found["columns"] if one["name"] == self.column)
        return {row["policy"]: self._cell(row) for row in rows if row["budget"] in (None, self.budget)}

    def _cell(self, row: dict[str, Any]) -> str:
        if self.shown == "bytes":
            return f"{row['bytes'] / 2**20:.1f}"
        whole = row["policy"] == "full"
        if row["note"] and not whole:  # it did nothing: no number under its name
            return str(row["note"]).partition(",")[0]
        if self.shown == "count":
            return f"{row['mean'] * row['items']:.0f}"
        if self.shown == "behind_full":
            return "0" if whole else f"{self._interval(*row['behind_full'])}, {row['place']}"
        return self._interval(row["mean"], row["low"], row["high"]) + ("" if whole else f", {row['place']}")

    def _interval(self, mean: float, low: float, high: float) -> str:
        return "{:.{d}f} ({:.{d}f} to {:.{d}f})".format(mean, low, high, d=self.digits)


QUALITY = (
    _Measured("a book, 256 tokens: nats more", "books", "books", 256, "behind_full", 3),
    _Measured("behind a prompt, a quarter: KL", "questions", "nearness: kl", 0.25, digits=3),
    _Measured("asked in the prompt, a quarter", "questions", "questions: known", 0.25),
    _Measured("half", "questions", "questions: known", 0.5),
    _Measured("asked later, a quarter", "questions", "questions: later", 0.25),
    _Measured("half", "questions", "questions: later", 0.5),
    _Measured("cache at a quarter, MiB", "questions", "questions: known", 0.25, "bytes"),
)


def quality_table() -> str:
    """Policies by what they keep of SmolLM2's quality."""
    return _beside(QUALITY, first=-1)


EVERYBODY = (
    _Measured("behind a prompt: KL", "gallery", "nearness: kl", 0.25, digits=3),
    _Measured("of six codes, asked for in the prompt", "gallery", "fact: known", 0.25, "count"),
    _Measured("later", "gallery", "fact: later", 0.25, "count"),
    _Measured("MiB", "gallery", "nearness: kl", 0.25, "bytes"),
)


def everybody_table() -> str:
    """The short list and the gallery, the nearest to the full cache first."""
    return _beside(EVERYBODY)


CODES = (
    _Measured("one code, a quarter", "depth", "fact: known", 0.25),
    _Measured("half", "depth", "fact: known", 0.5),
    _Measured("one of eight, a quarter", "depth", "facts: known", 0.25),
    _Measured("half", "depth", "facts: known", 0.5),
    _Measured("one code, asked later, a quarter", "depth", "fact: later", 0.25),
    _Measured("cache at a quarter, MiB", "depth", "fact: known", 0.25, "bytes"),
)


def codes_table() -> str:
    """Policies by how many of twenty hidden codes they find."""
    return _beside(CODES)


LONGER = (
    _Measured("behind a prompt: KL", "longer", "nearness: kl", 0.25, digits=3),
    _Measured("asked in the prompt", "longer", "questions: known", 0.25),
    _Measured("asked later", "longer", "questions: later", 0.25),
    _Measured("cache, MiB", "longer", "questions: known", 0.25, "bytes"),
)


def longer_table() -> str:
    """Policies behind prompts of 4,096 tokens."""
    return _beside(LONGER)


ANSWERS = (
    _Measured("right answers", "answers", "gsm8k: accuracy", 64),
    _Measured("tokens of an answer", "answers", "gsm8k: answer_tokens", 64, digits=0),
    _Measured("cut off at 320 tokens", "answers", "gsm8k: cut_off", 64),
    _Measured("cache, MiB", "answers", "gsm8k: accuracy", 64, "bytes"),
)


def answers_table() -> str:
    """Scores by the problems that a model solves when they choose which tokens of its answer stay."""
    return _beside(ANSWERS)


def _beside(shown: Sequence[_Measured], first: int = 0) -> str:
    """Columns side by side, the policies in the order of one of them, and then who is in others alone."""
    columns = [one.cells() for one in shown]
    policies = dict.fromkeys(policy for cells in (columns[first], *columns) for policy in cells)
    lines = (
        (f"`{Path(policy.rpartition(':')[2]).stem}`", *(cells.get(policy, "–") for cells in columns)) for policy in policies
    )
    return table(("policy", *(one.head for one in shown)), lines)


def depths_table() -> str:
    """The same at a quarter by how deep the code stands, one and one of eight together."""
    result = json.loads((BOARD / "depth" / "leaderboard.json").read_text(encoding="utf-8"))
    rows = [row for row in result["depths"] if row["measure"] == "known" and row["budget"] in (None, 0.25)]
    depths = sorted({row["depth"] for row in rows})
    by = {(row["policy"], row["depth"]): row["mean"] for row in rows}
    policies = [policy for policy in CODES[0].cells() if (policy, depths[0]) in by]
    lines = ((f"`{policy}`", *(f"{by[policy, depth]:.2f}" for depth in depths)) for policy in policies)
    return table(("policy", *(f"{depth:.0%} of the way in" for depth in depths)), lines)


BITS = (("model", 64), ("int8", 64), ("int8/int4", 64), ("int4", 64), ("int8", 119), ("int8/int4", 153), ("int4", 204))
"""Records of perplexities: the cache's `kv_dtype`, and the budget."""


def bits_table() -> str:
    """Perplexities by bits and budget, and of how many stretches each is lower than that of the first."""
    losses = {}
    for column, (kv_dtype, budget) in enumerate(BITS):
        record = _in_bits(kv_dtype, budget)
        losses |= {(row["policy"], column): row["losses"] for row in record["rows"]}
    policies = dict.fromkeys(policy for policy, _ in losses)

    def cell(policy: str, column: int) -> str:
        own, first = losses.get((policy, column)), losses[policy, 0]
        if own is None:
            return "–"
        better = sum(x < y for x, y in zip(own, first, strict=True))
        return f"{exp(mean(own)):.2f}" + (f" ({better} of {len(own)})" if column else "")

    heads = (f"{_named(kv_dtype)}, {budget}" for kv_dtype, budget in BITS)
    lines = ((f"`{policy}`", *(cell(policy, column) for column in range(len(BITS)))) for policy in policies)
    return table(("policy", *heads), lines)


def facts_table() -> str:
    """Facts found by bits and budget, of both tasks together."""
    found: dict[str, list[str]] = {}
    heads = []
    for kv_dtype, budget in (BITS[0], *BITS[4:]):
        record = _in_bits(kv_dtype, budget, "facts_")
        trials = [record["trials"] * len(row["depths"]) for row in record["rows"]]
        right = defaultdict(float)
        for row, count in zip(record["rows"], trials, strict=True):
            right[row["policy"]] += row["accuracy"] * count
        for policy, number in right.items():
            found.setdefault(policy, []).append(f"{number:.0f}")
        heads.append(f"{_named(kv_dtype)}, {budget}")
    return table(("policy", *heads), ((f"`{policy}`", *numbers) for policy, numbers in found.items()))


PROBLEMS = (("model", 64), ("int8", 98), ("int8/int4", 113), ("int4", 134))
"""Records of problems answered: the cache's `kv_dtype`, and the tokens of an answer that take as many bytes."""


def problems_table() -> str:
    """Problems of GSM8K answered rightly, by bits and budget of the answer."""
    found: dict[str, list[str]] = {}
    for kv_dtype, budget in PROBLEMS:
        [rows] = [
            column["rows"] for column in _in_bits(kv_dtype, budget, "gsm8k_")["columns"] if column["measure"] == "accuracy"
        ]
        for row in rows:
            found.setdefault(row["policy"], []).append(f"{row['mean'] * row['items']:.0f} of {row['items']}")
    heads = [f"{_named(kv_dtype)}, {budget}" for kv_dtype, budget in PROBLEMS]
    return table(("policy", *heads), ((f"`{policy}`", *numbers) for policy, numbers in found.items()))


def _in_bits(kv_dtype: str, budget: int, kind: str = "") -> Any:
    """Return a record of `results/kv_dtype`."""
    name = f"{kind}{kv_dtype.replace('/', '-')}_{budget}.json"
    return json.loads((ROOT / "results" / "kv_dtype" / name).read_text(encoding="utf-8"))


def _named(kv_dtype: str) -> str:
    return "the model’s dtype" if kv_dtype == "model" else kv_dtype


CHOOSING: dict[str, Callable[[], str]] = {
    "answers": answers_table,
    "bits": bits_table,
    "facts": facts_table,
    "problems": problems_table,
}
QUALITY_RECORD: dict[str, Callable[[], str]] = {
    "quality": quality_table,
    "everybody": everybody_table,
    "codes": codes_table,
    "depths": depths_table,
    "longer": longer_table,
}
