"""Every shipped policy keeps and attends to what it did when `kept.json` was recorded (`python scripts/kept record`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvdsl.shipped import all_policies
from scripts.kept.record import compare
from scripts.kept.texts import TEXTS

FILE = Path(__file__).with_name("kept.json")
RECORDS: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
STEMS = sorted(RECORDS)
CHUNKS = [STEMS[start::8] for start in range(8)]


def test_every_policy_is_recorded() -> None:
    assert sorted(path.stem for path in all_policies()) == STEMS


@pytest.mark.parametrize("stem", STEMS)
def test_a_record_tells_of_something(stem: str) -> None:
    """A policy evicts or selects in the longest of its texts, or the record would not show what it does.

    `full` never evicts, and `drop_thinking` only when a turn ends, which no text has: its own tests have turns.
    """
    told = RECORDS[stem]["texts"]["176"]
    everything = told["forwards"][0] == "0..159" and not any(told["forwards"][1:])
    assert (everything and "reads" not in told) == (stem in ("full", "drop_thinking"))


def test_the_interpreter_and_torch() -> None:
    """Of an eighth, in the shortest text; the nightly test runs all."""
    assert compare({stem: RECORDS[stem] for stem in CHUNKS[0]}, ["torch"], ["48"]) == {}


@pytest.mark.nightly
@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda chunk: chunk[0])
def test_every_text_on_every_backend(chunk: list[str]) -> None:
    """In processes of their own: Triton's interpreter has to be asked for before Triton is imported."""
    command = [sys.executable, "scripts/kept", "compare", str(FILE), *chunk]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=FILE.parents[2], env=dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


# -- the comparison itself ---------------------------------------------------------------------------------------------


def _changed(stem: str, **change: Any) -> list[str]:
    """What the comparison says of a policy whose shortest text was recorded otherwise."""
    told = RECORDS[stem]["texts"]["48"] | change
    return compare({stem: RECORDS[stem] | {"texts": {"48": told}}}, ["torch"], ["48"])[stem]


def test_another_token_is_found_and_named() -> None:
    forwards = RECORDS["h2o"]["texts"]["48"]["forwards"]
    assert len(TEXTS["48"]) == len(forwards)
    found = _changed("h2o", forwards=[*forwards[:3], "42", *forwards[4:]])
    assert [line.split(": ")[0] for line in found] == ["text 48, interpreter", "text 48, torch"]
    assert all("forward 3 (43 tokens so far), head 0 of 2" in line and "keeps 42" in line for line in found)


def test_another_selection_is_found() -> None:
    reads = RECORDS["sparcas"]["texts"]["48"]["reads"].split()
    found = _changed("sparcas", reads=" ".join([*reads[:-1], "00000000"]))
    assert len(found) == 1 and "forward 8: attends to other tokens" in found[0]


@pytest.mark.nightly
def test_lost_kernels_are_found() -> None:
    """A policy that had kernels and has none any more."""
    record = RECORDS["magicpig"] | {"texts": {}}
    assert "cpu" not in record["served"]
    found = compare({"magicpig": record | {"served": ["torch", "cpu"]}}, ["torch", "cpu"], [])
    assert found == {"magicpig": ["has lost its kernels for cpu"]}
