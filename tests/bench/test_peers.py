"""`benchmarks/peers.py`: what is compared is what it says, and the documents show what was measured. kvpress itself is not needed."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvdsl.environment import version
from kvdsl.generation.models import load_model, windows
from kvdsl.generation.text import read_text
from kvdsl.loading import load
from kvdsl_lab.eval.perplexity import perplexities

ROOT = Path(__file__).resolve().parents[2]
RESULTS = {name: ROOT / "results" / "cpu" / f"{name}.json" for name in ("peers", "peers_memory")}


@pytest.fixture(scope="module")
def peers() -> Any:
    """The modules of the benchmark, which are not part of a package."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("peers")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def contestants() -> Any:
    return sys.modules["contestants"]


def racer(peers: Any, policy: str, by: str, rounds: list[dict[str, Any]], error: str | None = None) -> Any:
    """A racer that has run already."""
    found = object.__new__(peers.Racer)
    found.one = contestants().Contestant("decode", policy, by, f"{by}'s", 1)
    found.rounds, found.error = rounds, error
    return found


def a_round(ttft: float, tpot: list[float], peak: int, loss: float) -> dict[str, Any]:
    return {"ttft_ms": ttft, "tpot_ms": tpot, "peak_bytes": peak, "losses": [loss, loss], "cache_bytes": 7}


# -- results -----------------------------------------------------------------------------------------------------------


def test_rows_compare_round_by_round(peers: Any) -> None:
    ours = racer(peers, "tova", "kvdsl", [a_round(10, [1, 2, 9], 100, 0.0), a_round(20, [4, 4, 4], 100, 1.0)])
    other = racer(peers, "tova", "kvpress", [a_round(20, [4, 4, 8], 50, 0.0), a_round(20, [2, 2, 2], 50, 0.0)])
    broken = racer(peers, "snapkv", "kvpress", [], "AssertionError: too short")
    mine, theirs, failed = peers.rows([ours, other, broken], contestants().Task(8, 20, 3))
    assert mine["ppl"] == pytest.approx(2.718281828**0.5, abs=1e-4)
    assert (mine["tpot_ms"], theirs["tpot_ms"], theirs["ttft_ms"]) == (3, 3, 20)
    assert "tpot_vs_kvdsl" not in mine
    assert (theirs["tpot_vs_kvdsl"], theirs["tpot_vs_kvdsl_q1"], theirs["tpot_vs_kvdsl_q3"]) == (1.25, 0.875, 1.625)
    assert (theirs["ttft_vs_kvdsl"], theirs["peak_vs_kvdsl"]) == (1.5, 0.5)
    assert failed["error"] == "AssertionError: too short" and "tpot_ms" not in failed
    assert peers.beaten([mine, theirs, failed], "time") == []
    assert peers.beaten([mine, theirs, failed], "memory") == ["decode: kvpress's every 1"]


def test_an_error_is_a_line_of_the_table(peers: Any) -> None:
    broken = racer(peers, "snapkv", "kvpress", [], "AssertionError: too short")
    for measures, columns in (("time", 6), ("memory", 5)):
        shown = peers.table({"measures": measures, "rows": peers.rows([broken], contestants().Task(8, 20, 3))}, "decode")
        assert "| snapkv | kvpress: kvpress's | fails: AssertionError: too short |" in shown
        assert {line.count("|") for line in shown.splitlines()} == {columns + 1}


@pytest.mark.parametrize("name", RESULTS)
def test_the_documents_show_what_was_measured(peers: Any, name: str) -> None:
    found = json.loads(RESULTS[name].read_text(encoding="utf-8"))
    shown = (ROOT / "docs" / "records" / "peers.md").read_text(encoding="utf-8")
    for race in dict.fromkeys(row["race"] for row in found["rows"]):
        assert peers.table(found, race) in shown, f"run benchmarks/peers.py --table {RESULTS[name].relative_to(ROOT)}"


# -- contestants -------------------------------------------------------------------------------------------------------


def test_every_press_has_a_policy_that_works_on_the_prompt_only(peers: Any) -> None:
    for one in contestants().CONTESTANTS:
        if one.by == "kvdsl" and one.race != "bits":
            spec = load(one.what).spec
            assert spec.when == ("prefill" if one.race == "prompt" else "both"), one
            assert spec.cpu_source.exists(), one
    compared = {one.policy for one in contestants().CONTESTANTS if one.by == "kvpress"} - {"snapkv"}
    assert compared <= {one.policy for one in contestants().CONTESTANTS if one.by == "kvdsl"}


def test_presses_keep_as_many_tokens_as_the_budget(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kvpress:
        def __getattr__(self, name: str) -> Any:
            return lambda **settings: settings

    monkeypatch.setitem(sys.modules, "kvpress", Kvpress())  # type: ignore[arg-type]
    one = contestants().Contestant("prompt", "tova", "kvpress", "TOVAPress")
    for prompt in range(2, 400, 7):
        for budget in range(1, prompt, 11):
            ratio = contestants()._press(one, contestants().Task(budget, prompt, 2))["compression_ratio"]
            assert int(prompt * (1 - ratio)) == budget  # as kvpress counts


def test_what_everybody_reads_is_scored_as_eval_does(peers: Any) -> None:
    contestant = importlib.import_module("contestant")
    model, tokenizer = load_model(None)
    ids = windows(tokenizer, read_text(None), 41, 1)
    task = contestants().Task(budget=100, prompt=1, new=39)
    ours = contestants().Contestant("decode", "window", "kvdsl", "window", 1)
    found = contestant.one_round(ours, model, ids, task)
    losses = torch.tensor(found["losses"]).double()

    class Full:
        pairs = staticmethod(lambda budgets: [("full", None)])
        make = staticmethod(lambda name, model, budget: load("full")(model))

    expected = perplexities(model, ids, Full(), [])[0]["ppl"]
    assert (len(losses), len(found["tpot_ms"])) == (40, 39)
    assert float(losses.mean().exp()) == pytest.approx(expected, rel=1e-4)
    assert found["cache_bytes"] > 0 and found["peak_bytes"] > 0


def test_bytes_of_caches_in_fewer_bits(peers: Any) -> None:
    contestant = importlib.import_module("contestant")
    model, tokenizer = load_model(None)
    ids, task = windows(tokenizer, read_text(None), 45, 1), contestants().Task(40, 41, 3)
    held = {
        one.what: contestant.one_round(one, model, ids, task)["cache_bytes"]
        for one in contestants().CONTESTANTS
        if one.race == "bits" and "HQQ" not in one.what and "quanto" not in one.what
    }
    plain, layers = held["DynamicCache"], model.config.num_hidden_layers
    assert (
        held["QuantizedCache, fp8"] == plain / 4 + 2 * 4 * layers
    )  # and a scale for all keys of a layer, and one for values
    assert held["full, int4"] < held["full, int8"] == held["full, fp8"] < plain


@pytest.mark.parametrize("cache", ["DynamicCache, sliding", "StaticCache, sliding"])
def test_transformers_sliding_caches_are_the_window_policy(peers: Any, cache: str) -> None:
    """Of the same size: a window of n tokens, the newest included, is a budget of n - 1 before it comes."""
    contestant = importlib.import_module("contestant")
    model, tokenizer = load_model(None)
    ids = windows(tokenizer, read_text(None), 61, 1)
    theirs = contestant.one_round(
        contestants().Contestant("decode", "window", "transformers", cache), model, ids, contestants().Task(20, 40, 20)
    )
    ours = contestant.one_round(
        contestants().Contestant("decode", "window", "kvdsl", "window"), model, ids, contestants().Task(19, 40, 20)
    )
    load("window").release(model)
    torch.testing.assert_close(torch.tensor(theirs["losses"]), torch.tensor(ours["losses"]), atol=2e-4, rtol=0)


@pytest.mark.skipif(version("kvpress") is not None, reason="kvpress is installed here")
def test_without_kvpress_it_says_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "peers.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr == "Error: kvpress is not installed here: `make peers` makes an environment with it and runs this\n"
