"""Perplexity, fidelity and retrieval."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from kvdsl.assets import book_text
from kvdsl.errors import KvdslError
from kvdsl.generation.generate import greedy
from kvdsl.generation.models import encode, windows
from kvdsl_lab.assets import load_reference_model
from kvdsl_lab.eval import fidelity, perplexity, retrieval
from kvdsl_lab.eval.caches import Policies
from kvdsl_lab.eval.names import parse_budgets, parse_policies

TEXT = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. " * 30


def policies(*names: str) -> Policies:
    return Policies(names, {}, "torch")


def plain_losses(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(ids).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


# -- perplexity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 39, 100])
def test_losses_through_a_cache_that_keeps_all_are_the_model_s_own(model, tokenizer, chunk):
    ids = windows(tokenizer, TEXT, 40, 2)
    wanted = plain_losses(model, ids)
    ticks: list[int] = []
    cache = policies("roco").make("roco", model, 64)
    found = perplexity.token_losses(model, ids, cache, chunk, lambda: ticks.append(1))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)
    assert len(ticks) == perplexity.steps(40, chunk)


def test_a_small_budget_evicts_token_by_token(model, tokenizer):
    ids = windows(tokenizer, TEXT, 40, 2)
    cache = policies("window").make("window", model, 8)
    perplexity.token_losses(model, ids, cache, 1)
    held = cache.positions(0)
    assert held[held >= 0].min() == 39 - 8
    assert int((held >= 0).sum(-1).max()) == 8


@pytest.mark.parametrize("chunk", [1, 7])
def test_a_rate_is_of_the_stretch_however_it_is_fed(model, tokenizer, chunk):
    ids = windows(tokenizer, TEXT, 41, 2)
    rate, tokens = (policies("window").make("window", model, budget) for budget in (0.5, 20))
    found = perplexity.token_losses(model, ids, rate, chunk)
    assert found.equal(perplexity.token_losses(model, ids, tokens, chunk))
    assert rate.positions(0).equal(tokens.positions(0))


def test_a_rate_is_of_the_prompt_however_it_is_fed(model, tokenizer):
    ids = windows(tokenizer, TEXT, 40, 2)
    caches = [policies("h2o").make("h2o", model, budget) for budget in (0.5, 20)]
    one, other = (greedy(model, ids, 3, cache, 7) for cache in caches)
    assert one.equal(other)
    assert caches[0].positions(0).equal(caches[1].positions(0))


def test_perplexity_rows(model, tokenizer):
    ids = windows(tokenizer, TEXT, 24, 2)
    rows = perplexity.perplexities(model, ids, policies("full", "window"), [8, 64], 5)
    assert [(row["policy"], row["budget"]) for row in rows] == [("full", None), ("window", 8), ("window", 64)]
    assert all(row["tokens"] == 46 for row in rows)
    wanted = math.exp(plain_losses(model, ids).double().mean())
    assert [rows[0]["ppl"], rows[2]["ppl"]] == pytest.approx([wanted, wanted], rel=1e-3)
    assert rows[1]["ppl"] != rows[0]["ppl"]


def test_perplexity_by_part_of_the_text(model, tokenizer):
    """Every token is in one row; together they are the whole."""
    ids, known = windows(tokenizer, TEXT, 24, 2), policies("window")
    whole = perplexity.perplexities(model, ids, known, [8])[0]
    rows = perplexity.perplexities(model, ids, known, [8], by=10)
    assert [(row["first"], row["last"], row["tokens"]) for row in rows] == [(1, 10, 20), (11, 20, 20), (21, 23, 6)]
    mean = sum(math.log(row["ppl"]) * row["tokens"] for row in rows) / 46
    assert mean == pytest.approx(math.log(whole["ppl"]), abs=1e-4)
    wanted = plain_losses(model, ids)[:, :7].double().mean()  # nothing is evicted yet
    assert perplexity.perplexities(model, ids, known, [8], by=7)[0]["ppl"] == pytest.approx(math.exp(wanted), rel=1e-3)


# -- fidelity ----------------------------------------------------------------------------------------------------------


def test_a_cache_that_keeps_all_is_wholly_faithful(model, tokenizer):
    pytest.importorskip("sacrebleu")
    pytest.importorskip("rouge_score")
    ids = windows(tokenizer, TEXT, 30, 2)
    rows = fidelity.fidelities(model, tokenizer, ids, 10, policies("roco"), [100, 8])
    keys = ["policy", "budget", "rouge1", "rouge2", "rougeL", "bleu", "same_prefix_tokens"]
    assert list(rows[0]) == [*keys, "evicted", "most_held", "note"]
    assert rows[0]["same_prefix_tokens"] == 10
    assert rows[1]["same_prefix_tokens"] < 10


def test_text_scores():
    pytest.importorskip("sacrebleu")
    pytest.importorskip("rouge_score")
    same = fidelity.text_scores(["the quick brown fox jumps"], ["the quick brown fox jumps"])
    assert same == {"rouge1": 1.0, "rouge2": 1.0, "rougeL": 1.0, "bleu": 100.0}
    half = fidelity.text_scores(["the quick red dog"], ["the quick brown fox"])
    assert half["rouge1"] == 0.5 and half["bleu"] < 50


# -- retrieval ---------------------------------------------------------------------------------------------------------


def test_trials_hold_the_fact_at_its_depth(tokenizer):
    long = TEXT * 4
    for one in retrieval.make_trials(tokenizer, long, 300, 2, seed=1):
        assert one.prompts.shape == (2, 300)
        for prompt, answer in zip(one.prompts.tolist(), one.answers, strict=True):
            assert prompt[0] == tokenizer.bos_token_id
            ids = encode(tokenizer, answer)
            starts = [at for at in range(300) if prompt[at : at + len(ids)] == ids]
            assert starts and starts[-1] + len(ids) < 300, "the answer stands in the text, and not at its end"
            assert all(abs(start / 300 - one.depth) < 0.12 for start in starts), "depths are 0.25 apart"


class Spaced:
    """A tokenizer that writes a space before a text, as SentencePiece does, and has no BOS."""

    bos_token_id = None

    def __call__(self, text, **_):
        return {"input_ids": [0, *(ord(letter) for letter in text)]}

    def decode(self, ids):
        return "".join(" " if index == 0 else str(index) for index in ids)


def test_a_tokenizer_without_a_bos(tokenizer):
    (one, *_) = retrieval.make_trials(Spaced(), TEXT * 4, 700, 1, pairs=2)
    assert one.prompts.shape == (1, 700) and one.new_tokens == 1 + len(one.answers[0])


def test_accuracy_counts_whole_answers(monkeypatch):
    prompts = torch.zeros(3, 4, dtype=torch.int64)
    trials = retrieval.Trials("pass-key", 0.5, prompts, ("12", "13", "12"), 3, Spaced())
    monkeypatch.setattr(retrieval, "greedy", lambda model, ids, *_: torch.tensor([[0, 1, 2]] * len(ids)))
    assert retrieval.accuracy(None, trials, lambda: None, None, batch=2) == pytest.approx(2 / 3)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_cache_that_breaks_a_model_finds_nothing(backend):
    """The shipped model finds pass-keys in prompts that a policy keeps, whatever leaves of its answers; a window has lost most of them."""
    model, tokenizer = load_reference_model()
    trials = [one for one in retrieval.make_trials(tokenizer, book_text(), length=512, count=2) if one.task == "pass-key"]

    def found(policy: str, budget: int = 512) -> float:
        (row,) = retrieval.retrievals(model, trials, Policies((policy,), {}, backend), [budget])
        return row["accuracy"]

    right = {
        policy: found(policy, budget) for policy, budget in (("full", 512), ("h2o_answer", 2), ("h2o", 256), ("window", 128))
    }
    assert right["full"] >= 0.9 and right["h2o_answer"] >= 0.9 and right["h2o"] >= 0.7 and right["window"] <= 0.4, right


def test_retrieval_rows(model, tokenizer):
    trials = retrieval.make_trials(tokenizer, TEXT * 4, 200, 1)
    rows = retrieval.retrievals(model, trials, policies("full", "window"), [32])
    assert [(row["policy"], row["budget"], row["task"]) for row in rows] == [
        ("full", None, "pass-key"), ("full", None, "key-value"), ("window", 32, "pass-key"), ("window", 32, "key-value"),
    ]  # fmt: skip
    assert all(0 <= row["accuracy"] <= 1 and len(row["by_depth"]) == 5 for row in rows)


def test_the_asked_for_pair_stands_at_the_depth():
    task = retrieval.make_task("key-value", np.random.default_rng(0), 0.25, 4)
    name = task.questions[0][0].strip()
    assert [at for at, text in task.facts if name in text] == [0.25]
    assert len(task.facts) == 4


# -- what goes in ------------------------------------------------------------------------------------------------------


def test_short_texts_are_refused(tokenizer):
    with pytest.raises(KvdslError, match="fewer than"):
        windows(tokenizer, "Too short.", 400, 1)
    assert len(windows(tokenizer, TEXT, 40, 200)) == 200
    with pytest.raises(KvdslError, match="too few for 200 stretches of 40 that do not overlap"):
        windows(tokenizer, TEXT, 40, 200, apart=True)
    with pytest.raises(KvdslError, match="fewer than"):
        retrieval.make_trials(tokenizer, "Too short.", 400, 1)
    with pytest.raises(KvdslError, match="longer prompts"):
        retrieval.make_trials(tokenizer, TEXT, 64, 1, pairs=48)


def test_stretches_lie_evenly_and_begin_with_bos(tokenizer):
    ids = windows(tokenizer, TEXT, 50, 3)
    whole = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert ids.shape == (3, 50) and set(ids[:, 0].tolist()) == {tokenizer.bos_token_id}
    assert ids[0, 1:].tolist() == whole[:49] and ids[2, 1:].tolist() == whole[-49:]


@pytest.mark.parametrize(
    ("text", "wanted"), [("128", [128]), ("128, 0.25", [128, 0.25]), ("64,64.0", [64, 64]), ("1,1.0,1e2", [1, 1.0, 100])]
)
def test_budgets(text, wanted):
    assert parse_budgets(text) == wanted
    assert [type(one) for one in parse_budgets(text)] == [type(one) for one in wanted]


@pytest.mark.parametrize("text", ["", "0", "-1", "abc", "nan", "inf", "64,,128", "1.5", "64.5"])
def test_no_budgets(text):
    with pytest.raises(KvdslError, match="is no budget"):
        parse_budgets(text)


def test_policy_names():
    assert parse_policies("roco, h2o,roco") == ["roco", "h2o"]
    with pytest.raises(KvdslError, match="no policy"):
        parse_policies(" , ")
