"""What perplexities of a few stretches tell, and what they do not."""

from __future__ import annotations

import math

import pytest

from kvdsl_lab.cli.measuring import show
from kvdsl_lab.eval.differences import UNTOLD, with_intervals

FULL = [3.0, 3.4, 2.6, 3.1, 2.9, 3.3, 2.7, 3.0]
ALL_WORSE = [0.05, 0.06, 0.04, 0.05, 0.07, 0.03, 0.05, 0.06]
BOTH_WAYS = [-0.08, 0.06, -0.07, 0.05, -0.06, 0.04, -0.05, 0.05]


def row(policy: str, losses: list[float], **place: int) -> dict[str, object]:
    ppl = math.exp(sum(losses) / len(losses))
    return {
        "policy": policy,
        "budget": None if policy == "full" else 32,
        **place,
        "ppl": ppl,
        "tokens": 99,
        "losses": losses,
    }


def plus(differences: list[float], by: float = 1.0) -> list[float]:
    return [loss + by * more for loss, more in zip(FULL, differences, strict=False)]


def test_what_every_stretch_says_is_told() -> None:
    full, worse, better = with_intervals([row("full", FULL), row("a", plus(ALL_WORSE)), row("b", plus(ALL_WORSE, -1))])
    assert full["behind_full"] is full["against_full"] is None
    assert full["low"] < full["ppl"] < full["high"]
    assert worse["against_full"].startswith("5.3 % worse (4.") and better["against_full"].startswith("5 % better (4.")
    mean, low, high = worse["behind_full"]
    assert low < mean < high and mean == pytest.approx(100 * math.expm1(sum(ALL_WORSE) / 8), abs=1e-3)


def test_a_smaller_perplexity_is_not_yet_better() -> None:
    _, found, same = with_intervals([row("full", FULL), row("a", plus(BOTH_WAYS)), row("b", FULL)])
    assert found["ppl"] < row("full", FULL)["ppl"]
    assert found["behind_full"][0] < 0 < found["behind_full"][2]
    assert (found["against_full"], same["against_full"]) == (UNTOLD, "the same")


def test_of_few_stretches_nothing_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    rows = with_intervals([row("full", FULL[:5]), row("a", plus([0.5] * 5))])
    assert [(one["low"], one["high"]) for one in rows] == [(None, None)] * 2
    assert rows[1]["against_full"] == f"{UNTOLD} from 5 stretches: take 6 or more"
    show(rows)
    out = capsys.readouterr().out
    assert "against full" in out and "losses" not in out


def test_without_the_full_cache_there_are_intervals() -> None:
    (found,) = with_intervals([row("a", FULL)])
    assert "against_full" not in found and found["low"] < found["ppl"] < found["high"]


def test_parts_of_stretches_are_compared_with_the_same_part() -> None:
    parts = [row("full", FULL, first=1, last=8), row("full", plus([1.0] * 8), first=9, last=16)]
    parts += [row("a", plus(ALL_WORSE), first=1, last=8), row("a", plus([1.0] * 8), first=9, last=16)]
    *full, worse, same = (one["against_full"] for one in with_intervals(parts))
    assert full == [None, None] and worse.startswith("5.3 % worse") and same == "the same"
