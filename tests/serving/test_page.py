"""The page of simulated serving shows what is in the committed results."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvdsl_lab.serving.machine import Machine, Work, fitted
from scripts.serving.vllm_simulate import H100, LLAMA, constants, table
from tests.docs.pages import read

PAGE = "docs/records/capacity.md"


def result(name: str) -> Any:
    return json.loads(read(f"results/cpu/{name}.json"))


@pytest.mark.parametrize("scenario", ["smollm2", "llama70b"])
def test_the_page_has_the_results_tables(scenario: str) -> None:
    found = result(f"vllm_simulated_{scenario}")
    for part in (constants(found), *table(found).split("\n\n")):
        assert f"\n\n{part}\n" in read(PAGE)


def test_the_constants_are_those_of_the_measured_steps_and_of_the_data_sheet() -> None:
    measured = result("vllm_steps")["contestants"]
    for name, machine in result("vllm_simulated_smollm2")["machines"].items():
        one = measured[name.split()[0]]
        assert machine == one["machine"]
        again = fitted([Work(*step[:-1]) for step in one["steps"]], [step[-1] for step in one["steps"]])
        works = [Work(1, 1, 20_000_000, 0), Work(8, 8, 60_000_000, 0), Work(1024, 0, 0, 524_800), Work(601, 1, 0, 180_300)]
        for work in works:  # constants that steps do not tell apart may differ, and what comes of them not
            assert again.seconds(work) == pytest.approx(Machine(**machine).seconds(work), rel=0.03)
    assert all(Machine(**one) == H100.machine(LLAMA) for one in result("vllm_simulated_llama70b")["machines"].values())


def test_what_the_page_says_in_words() -> None:
    text = re.sub(r"\s+", " ", read(PAGE))
    for one in result("vllm_simulated_smollm2")["check"]:
        measured, simulated = one["measured"], one["simulated"]
        assert abs(simulated["throughput"] / measured["throughput"] - 1) < 0.04
        assert abs(simulated["tpot"][0] / measured["tpot"][0] - 1) < 0.04
        assert abs(simulated["ttft"][0] / measured["ttft"][0] - 1) < 0.15
        assert measured["preemptions"] == 0
    assert max(one["off"] for one in result("vllm_steps")["contestants"].values()) < 0.035
    rows = {(row["traffic"], row["rate"], row["contestant"]): row for row in result("vllm_simulated_llama70b")["rows"]}
    short, long = (
        {name: rows[traffic, None, name] for name in ("full", "h2o 256")} for traffic in ("conversation", "long answers")
    )
    said = (
        f"throughput is {short['h2o 256']['throughput'] / short['full']['throughput']:.2f}× that",
        f"{long['h2o 256']['throughput']:,.0f} tokens a second against {long['full']['throughput']:,.0f}",
        f"preempted {long['full']['preemptions']:,}",
        f"at {long['h2o 256']['at_once'][0]:,.0f} requests",
        f"a token {1e3 * long['h2o 256']['tpot'][0]:.0f} ms",
        f"at most {long['h2o 256']['at_once'][1]:,} were in the cache: 435 GB hold {long['h2o 256']['blocks'] - 1:,} pages",
    )
    for words in said:
        assert words in text, words
