"""Construction error, mask difference and perplexity of selectors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.generation.models import windows
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.eval import sketch
from kvdsl_lab.eval.recording import Recording
from kvdsl_lab.eval.sketch import PAGE, Setting
from tests.cli.harness import run

from .conftest import model_of, saved

TEXT = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. " * 30


@pytest.fixture
def deep(tokenizer: Any) -> Any:
    """A model of four layers, of which the last two select."""
    return model_of(tokenizer, layers=4)


def layer(slots: int = 40, dim: int = 6) -> Recording:
    torch.manual_seed(1)
    query, key = torch.randn(2, 6, slots, dim), torch.randn(2, 2, slots, dim)
    return Recording(AttentionCall(query, key, torch.zeros_like(key), None, dim**-0.5))


# -- the figures, one by one -----------------------------------------------------------------------------------------------


def written_out(found: Recording, prompt: int, tokens: int, dims: int, interval: int) -> tuple[float, float]:
    """Equations 6 and 5 for |q|, token by token."""
    differing, errors = [], []
    rows, heads, group, slots, dim = found.query.shape
    for newest in range(prompt, slots):
        at = newest - (newest - prompt + 1) % interval
        for b in range(rows):
            for h in range(heads):
                size = found.query[b, h, :, at].abs().mean(0)
                chosen = sorted(range(dim), key=lambda d: -float(size[d]))[:dims]
                exact, partial = torch.zeros(2, group, newest + 1)
                for g in range(group):
                    for s in range(newest + 1):
                        terms = found.query[b, h, g, newest] * found.key[b, h, s]
                        exact[g, s], partial[g, s] = terms.sum(), terms[chosen].sum()
                masks = []
                for by in (exact.mean(0), partial.mean(0)):
                    others = sorted(range(newest), key=lambda s: -float(by[s]))[: tokens - 1]
                    masks.append({newest, *others})
                differing.append(len(masks[0] ^ masks[1]) / (newest + 1))
                errors.append(float((exact - partial).abs().mean()) / math.sqrt(dim))
    return sum(differing) / len(differing), sum(errors) / len(errors)


@pytest.mark.parametrize(("tokens", "dims", "interval"), [(5, 2, 4), (1, 3, 1), (12, 5, 7)])
def test_what_the_equations_say(tokens: int, dims: int, interval: int) -> None:
    found = layer(24)
    got = sketch.fidelity([found], 10, 100, Setting("abs_q", dims, tokens, interval))
    assert got == pytest.approx(written_out(found, 10, tokens, dims, interval), abs=1e-6)


@pytest.mark.parametrize("selector", sketch.BY_DIMS)
def test_all_dims_construct_the_scores(selector: str) -> None:
    difference, error = sketch.fidelity([layer()], 20, 10, Setting(selector, 6, 7, 3))
    assert difference == 0
    assert error < 1e-6


@pytest.mark.parametrize("selector", (*sketch.BY_DIMS, sketch.QUEST))
def test_nothing_differs_where_all_tokens_are_chosen(selector: str) -> None:
    pages = 48  # whole pages
    difference, _ = sketch.fidelity([layer()], 20, 10, Setting(selector, 2, pages, 3))
    assert difference == 0


def test_more_dims_construct_better() -> None:
    errors = [sketch.fidelity([layer()], 20, 10, Setting("token_wise", dims, 7, None))[1] for dims in range(1, 7)]
    assert errors == sorted(errors, reverse=True)


def test_quest_chooses_pages() -> None:
    found = layer(4 * PAGE)
    found.key[:, :, PAGE : 2 * PAGE] = 0
    found.key[:, :, PAGE + 3] = 50 * found.query[:, :, :, -1].mean(2)
    bounds = sketch._page_bounds(found.query[..., -1, :], found.key)
    mask = sketch._mask(bounds, 2 * PAGE, PAGE)
    assert mask[..., PAGE : 2 * PAGE].all(), "a page with one good key"
    assert mask[..., 3 * PAGE :].all(), "the newest page"
    assert mask.sum(-1).eq(2 * PAGE).all()


# -- a model ---------------------------------------------------------------------------------------------------------------


def test_what_is_recorded_is_what_attention_gets(deep: Any, tokenizer: Any) -> None:
    ids = windows(tokenizer, TEXT, 30, 2)
    recordings = sketch.record(deep, ids)
    cache: Any = kvdsl.load("full")(deep, backend="torch")
    deep(input_ids=ids, **with_cache(cache), use_cache=True)
    assert len(recordings) == 2
    for found, index in zip(recordings, (2, 3), strict=True):
        assert torch.equal(found.key, cache.layers[index].state.keys[:, :, :30])
        assert found.query.shape == (2, 2, 2, 30, 8)


@pytest.mark.parametrize("selector", ["abs_q", "mean_k", "quest"])
def test_a_selection_of_all_has_the_full_perplexity(selector: str, deep: Any, tokenizer: Any) -> None:
    ids = windows(tokenizer, TEXT, 40, 2)
    full = sketch.text_perplexity(deep, ids, 20, kvdsl.load("full")(deep, backend="torch"), lambda: None)
    losses = torch.nn.functional.cross_entropy(deep(ids).logits[:, 19:-1].transpose(1, 2), ids[:, 20:])
    assert full == pytest.approx(math.exp(losses.item()), rel=1e-4)
    all_of_it = Setting(selector, 4, 64, 4)
    assert sketch.perplexity(deep, ids, 20, all_of_it, "torch", lambda: None) == pytest.approx(full, rel=1e-4)
    few = Setting(selector, 4, 16, 4)
    assert abs(sketch.perplexity(deep, ids, 20, few, "torch", lambda: None) - full) > 1e-3 * full


def test_every_selector_of_the_table_is_a_policy_with_kernels() -> None:
    names = {file.stem for file in sketch.SELECTORS.glob("*.kv")}
    assert names == set(sketch.BY_DIMS) - {"token_wise"}
    for name in names:
        assert kvdsl.load(sketch.SELECTORS / f"{name}.kv").spec.cpu_source.exists()


# -- rows and claims -------------------------------------------------------------------------------------------------------


def test_combinations() -> None:
    made = sketch.settings(["abs_q", "token_wise", "quest"], [2, 4], [8, 16], [1, 64])
    assert len(made) == 8 + 4 + 2
    assert made[-1] == Setting("quest", None, 16, None)
    with pytest.raises(KvdslError, match="no selector `abs`"):
        sketch.settings(["abs"], [2], [8], [1])


def test_claims_need_rows_that_differ_in_one_thing() -> None:
    def row(selector: str, dims: int, mask_diff: float, ppl: float) -> dict[str, Any]:
        return {"selector": selector, "dims": dims, "tokens": 8, "interval": 1, "mask_diff": mask_diff, "ppl": ppl}

    found = sketch.findings([
        row("abs_q", 2, 0.3, 9.0), row("abs_q", 4, 0.2, 8.0), row("abs_q", 8, 0.2, 8.0), row("mean_k", 4, 0.25, 7.0),
    ])  # fmt: skip
    assert found["abs_q below mean_k: mask_diff"] == {"holds": True, "pairs": 1, "held": 1}
    assert found["abs_q below mean_k: ppl"] == {"holds": False, "pairs": 1, "held": 0}
    assert found["abs_q below random_dims: ppl"] == {"holds": False, "pairs": 0, "held": 0}
    assert found["abs_q: mask_diff falls with dims"] == {"holds": False, "pairs": 2, "held": 1}


def test_command(deep: Any, tokenizer: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"eval sketch --model {saved(deep, tokenizer, tmp_path)} --selectors abs_q,token_wise,quest --dims 2,8"
    words += " --tokens 16 --intervals 4 --length 40 --prompt-tokens 20 --stretches 1 --queries 5 --backend torch"
    found = run(capsys, *words.split(), "--json", code=0).json()
    keys = ("selector", "dims", "tokens", "interval", "mask_diff", "construction_error", "ppl")
    assert all(set(keys) == set(row) for row in found["rows"])
    assert [row["selector"] for row in found["rows"]] == ["abs_q", "abs_q", "token_wise", "token_wise", "quest"]
    assert found["rows"][1]["mask_diff"] == 0 and found["rows"][4]["construction_error"] is None
    assert "9 dims is asked for, but keys have 8" in run(capsys, *words.replace("2,8", "9").split(), code=2).err
