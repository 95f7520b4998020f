"""Recorded attention, the consistency of scores, and the deviation of attention over a token's life."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvdsl.errors import KvdslError
from kvdsl.generation.models import windows
from kvdsl.runtime.backend import AttentionCall
from kvdsl_lab.eval import consistency, persistence
from kvdsl_lab.eval.recording import Recording, record
from tests.cli.harness import run

from .conftest import model_of, saved

TEXT = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. " * 10


@pytest.fixture
def shallow(tokenizer: Any) -> Any:
    """A model of one layer: what it attends with does not depend on what was evicted."""
    return model_of(tokenizer, layers=1)


# -- recording -------------------------------------------------------------------------------------------------------------


def test_recorded_attention_is_the_models_own(model: Any, tokenizer: Any) -> None:
    ids = windows(tokenizer, TEXT, 20, 2)
    recordings = record(model, ids)
    model.set_attn_implementation("eager")
    own = model(ids, output_attentions=True).attentions
    for found, attn in zip(recordings, own, strict=True):
        wanted = attn.unflatten(1, (2, 2)).mean(2)
        torch.testing.assert_close(found.attention(0, 20), wanted, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(found.attention(7, 9), wanted[..., 7:9, :9], atol=1e-6, rtol=1e-4)
    assert [len(one.value) for one in recordings[0].rows()] == [1, 1]


def test_a_windows_queries_see_no_further() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 2, 6, 4), torch.randn(1, 1, 6, 4)
    attn = Recording(AttentionCall(query, key, key, None, 0.5, window=3)).attention(0, 6)[0, 0]
    behind = torch.arange(6)[:, None] - torch.arange(6)
    assert torch.equal(attn > 0, (behind >= 0) & (behind < 3))
    assert torch.allclose(attn.sum(-1), torch.ones(6))


# -- consistency -----------------------------------------------------------------------------------------------------------


def formula(score: str, rows: list[np.ndarray], tokens: list[int]) -> np.ndarray:
    """Section 4.1's scores of `tokens`, from what queries gave the tokens that they saw; a row is NaN where it saw none."""
    seen = np.array([[row[t] for t in tokens] for row in rows])
    if score == "aas":
        return np.nansum(seen, 0)
    if score == "aqas":
        means = np.array([np.nanmean(row) for row in rows])[:, None]
        return np.nansum(seen > means, 0)
    return seen[-1] if score == "ltas" else np.nanmean(seen, 0)


def highest(values: np.ndarray, tokens: list[int], count: int) -> set[int]:
    """The tokens with the highest values, of equals the newer."""
    return set(sorted(tokens, key=lambda t: (values[tokens.index(t)], t))[-count:])


def similarity(score: str, found: Recording, head: int, budget: int) -> float:
    """The mean Jaccard similarity of one head of the first stretch, by brute force: softmax over what is kept, evict, compare."""
    query, key = (x[0, head].double().numpy() for x in (found.query, found.key))
    length = key.shape[0]
    kept: list[int] = []
    local, whole, each = [], [], []
    for t in range(length):
        kept.append(t)
        for rows, tokens in ((local, kept), (whole, list(range(t + 1)))):
            logit = query[:, t] @ key[tokens].T * key.shape[1] ** -0.5
            weight = np.exp(logit - logit.max(-1, keepdims=True))
            row = np.full(length, np.nan)
            row[tokens] = (weight / weight.sum(-1, keepdims=True)).mean(0)
            rows.append(row)
        if len(kept) > budget:
            keep = highest(formula(score, local, kept), kept, budget)
            kept = [token for token in kept if token in keep]
        if t >= budget:
            best = highest(formula(score, whole, list(range(t + 1))), list(range(t + 1)), budget)
            each.append(len(best & set(kept)) / len(best | set(kept)))
    return float(np.mean(each))


@pytest.mark.parametrize("score", consistency.SCORES)
def test_consistency_by_brute_force(score: str, shallow: Any, tokenizer: Any) -> None:
    ids = windows(tokenizer, TEXT, 24, 1)
    (found,) = record(shallow, ids)
    (row,) = consistency.consistencies(shallow, ids, [score], [0.5], backend="torch")
    assert row["tokens"] == 12
    assert row["jaccard"] == pytest.approx(np.mean([similarity(score, found, head, 12) for head in range(2)]), abs=1e-4)


def test_jaccard_by_hand() -> None:
    score = torch.tensor([[[3.0, 1.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0]]])
    kept = torch.tensor([[[0, 2, -1], [-1, 0, 1]]], dtype=torch.int32)
    # {0, 2} and {0, 3} have one of three in common; of equals the newer rank higher, and {0, 1} and {2, 3} share nothing.
    assert consistency.jaccard(kept, score, 2).tolist() == pytest.approx([(1 / 3 + 0) / 2])


def test_what_is_asked_for_must_make_sense(shallow: Any, tokenizer: Any) -> None:
    ids = windows(tokenizer, TEXT, 10, 1)
    with pytest.raises(KvdslError, match="no score `max`"):
        consistency.consistencies(shallow, ids, ["max"])
    with pytest.raises(KvdslError, match="keeps 0 of 10"):
        consistency.consistencies(shallow, ids, ["mas"], [0.05])


def test_claims_about_consistency() -> None:
    rows = [{"score": name, "budget": 0.3, "jaccard": value} for name, value in (("mas", 0.9), ("aas", 0.7), ("ltas", 0.6))]
    found = consistency.findings(rows)
    assert found["mas above aas"] == {"holds": True, "budgets": 1, "held": 1}
    assert found["ltas above aas"] == {"holds": False, "budgets": 1, "held": 0}
    assert not any("aqas" in claim for claim in found)


# -- persistence -----------------------------------------------------------------------------------------------------------


def test_deviations_are_those_of_numpy() -> None:
    torch.manual_seed(0)
    attn = torch.rand(2, 9, 9).tril()
    got = persistence.deviations(attn, 5)
    assert got.shape == (2, 5, 5)
    for head in range(2):
        for token in range(5):
            for count in range(1, 6):
                wanted = np.std(attn[head, token : token + count, token].double().numpy())
                assert float(got[head, token, count - 1]) == pytest.approx(wanted, abs=1e-9)


def test_summary_by_hand() -> None:
    found = persistence.summary(torch.tensor([[0.0, 4.0, 2.0, 1.0], [0.0, 1.0, 2.0, 3.0]]))
    assert found == {"peak": 2, "brief": 1.0, "falling": 1.0, "left": 0.25, "curve": [0, 2.5, 2.0, 2.0]}
    assert persistence.summary(torch.tensor([[0.0, 1.0]]))["falling"] is None


def test_lives(model: Any, tokenizer: Any) -> None:
    ids = windows(tokenizer, TEXT, 20, 3)
    rows = persistence.lives(model, ids, 8)
    assert [(row["layer"], row["head"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(row["tokens"] == 3 * 13 and len(row["curve"]) == 8 for row in rows)
    one = persistence.deviations(record(model, ids)[1].attention(0, 20)[:, 1], 8)
    assert rows[3]["curve"] == pytest.approx(one.flatten(0, 1).mean(0).tolist(), rel=1e-3)
    with pytest.raises(KvdslError, match="a life of 20"):
        persistence.lives(model, ids, 20)


def test_claims_about_persistence() -> None:
    found = persistence.findings([{"brief": 0.9, "falling": 0.8}, {"brief": 0.4, "falling": None}])
    assert [one["held"] for one in found.values()] == [1, 1]
    assert not any(one["holds"] for one in found.values())


# -- commands --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(shallow: Any, tokenizer: Any, tmp_path: Any) -> str:
    return saved(shallow, tokenizer, tmp_path)


def test_commands(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", "consistency", "--model", folder, "--length", "16", "--stretches", "2", "--backend", "torch"]
    found = run(capsys, *words, "--scores", "mas,aas", "--budgets", "0.5", "--json", code=0).json()
    assert all({"score", "budget", "jaccard"} <= set(row) for row in found["rows"])
    assert [row["score"] for row in found["rows"]] == ["mas", "aas"] and found["findings"]["mas above aas"]["budgets"] == 1
    assert "ltas" in run(capsys, *words, "--scores", "ltas", "--budgets", "0.5", code=0).out
    words[1] = "persistence"
    found = run(capsys, *words, "--life", "8", "--json", code=0).json()
    assert {"layer", "head", "peak", "brief", "falling", "left", "curve"} <= set(found["rows"][0])
    assert "peak within 50 queries" in run(capsys, *words, "--life", "8", code=0).out


@pytest.mark.parametrize(
    ("words", "message"),
    [("consistency --budgets 64", "ratios of a stretch"), ("consistency --scores x", "no score `x`"),
     ("persistence --life 600", "a life of 600"), ("consistency --budgets a", "`a` is no budget")],
)  # fmt: skip
def test_mistakes(words: str, message: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, "eval", *words.split(), "--model", folder, "--length", "16", code=2)
    assert message in shown.err and not shown.out
