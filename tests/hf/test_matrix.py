"""The matrix over every causal language model of transformers: each way is right or refused, wherever it can be tried."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from scripts.matrix import __main__ as command
from scripts.matrix.rows import Row, all_rows, carry_out, kind
from scripts.matrix.subject import Subject, native
from scripts.matrix.ways import WAYS
from tests.hf import zoo

pytestmark = pytest.mark.nightly

OF_OURS = ("generate within a budget", "generate behind the inner model")
"""Ways that ask for more than transformers' own cache does."""

PARTS = 8
MOST_NOT_TRIED = 4
"""Classes of a part that may have no tiny model."""

REPORT = Path(__file__).parents[2] / command.REPORT


def bad(row: dict[str, Any]) -> dict[str, str]:
    return {way: outcome for way, outcome in row["ways"].items() if kind(outcome) in command.BAD}


@pytest.mark.skipif(zoo.EARLY, reason="the ways call models as transformers 5 does")
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_transformers_own_cache_is_right_in_every_way(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the matrix finds is no noise of its own."""
    monkeypatch.setattr(Subject, "cache", lambda self, model=None, **options: native(self.model if model is None else model))
    made = carry_out(Row(model_type))
    assert {way: outcome for way, outcome in made["ways"].items() if outcome != "right" and way not in OF_OURS} == {}


class Turned(transformers.DynamicCache):
    """A cache that turns the keys of every second token around."""

    def update(self, key: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        turned = key.clone()
        turned[..., ::2, :] *= -1
        return super().update(turned, *args, **kwargs)


def test_a_cache_that_is_wrong_is_found_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(self: Subject, model: Any = None, **options: Any) -> Turned:
        return Turned(config=(self.model if model is None else model).config)

    monkeypatch.setattr(Subject, "cache", made)
    row = carry_out(Row("llama"))
    assert row["outcome"] in command.BAD
    kept = {way for way in WAYS if kind(row["ways"][way]) != "wrong"}
    assert kept <= {"training", *OF_OURS}  # under gradient checkpointing transformers uses no cache


def test_a_process_that_crashes_or_hangs_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def crashes(row: Row, tell: Any) -> None:
        tell.send((next(iter(WAYS)), "right"))
        if row.model_type == "llama":
            os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(60)

    monkeypatch.setattr(command, "_try", crashes)
    crashed, hung = command.in_processes([Row("llama"), Row("gpt2")], 1, 3)
    second = list(WAYS)[1]
    assert crashed["ways"][second] == "failed: the process ended with -11"
    assert hung["ways"][second] == "failed: not done after 3 s"
    assert crashed["outcome"] == hung["outcome"] == "failed"
    assert crashed["ways"][next(iter(WAYS))] == "right"


@pytest.mark.parametrize("part", range(PARTS))
def test_no_class_is_wrong_or_fails(part: int) -> None:
    """Every so many classes, so that kindred ones, which take alike long, are shared out."""
    command.prepare()
    chosen = all_rows()[part::PARTS]
    rows = list(command.in_processes(chosen, 1, 300))
    assert len(rows) == len(chosen)
    assert all(list(row["ways"]) == list(WAYS) for row in rows)
    assert {row["name"]: bad(row) for row in rows if bad(row)} == {}
    assert sum(row["outcome"] == "not tried" for row in rows) <= MOST_NOT_TRIED


def test_the_committed_report_has_every_class_and_nothing_wrong() -> None:
    report = json.loads(REPORT.read_text(encoding="utf-8"))
    assert report["format_version"] == "1.0"
    assert {row["name"]: bad(row) for row in report["rows"] if bad(row)} == {}
    assert all(list(row["ways"]) == list(WAYS) for row in report["rows"])
    if report["environment"]["transformers"] == transformers.__version__:
        expected = [(row.name, row.model_type, row.class_name) for row in all_rows()]
        assert [(row["name"], row["type"], row["class"]) for row in report["rows"]] == expected
        assert {row["type"] for row in report["rows"]} == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
