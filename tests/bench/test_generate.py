"""Whole models in turns: what is generated, what is counted, and the shapes with random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvdsl.errors import KvdslError
from kvdsl.generation.generate import greedy
from kvdsl_lab.assets import reference_model_path
from kvdsl_lab.bench import generate, measure
from kvdsl_lab.bench.contenders import Contender, contenders
from kvdsl_lab.bench.generate import Times, bench_generate
from kvdsl_lab.bench.names import NATIVE, RECOMPUTE, STATIC
from kvdsl_lab.bench.shapes import SHAPES, parse_shape, shaped_model
from kvdsl_lab.bench.texts import Text
from kvdsl_lab.eval.caches import Policies
from tests.cli.harness import run


@pytest.fixture(scope="module")
def model() -> Any:
    return shaped_model("tiny:2")


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(128, (2, 40), generator=torch.Generator().manual_seed(1))


def test_what_is_timed_is_greedy_generation(model: Any, ids: torch.Tensor) -> None:
    with torch.inference_mode():
        text = Text(model, DynamicCache(config=model.config))
        assert text.read(ids) > 0
        found = [text.newest]
        for _ in range(5):
            text.go_on()
            found.append(text.newest)
    assert torch.equal(torch.cat(found, 1), greedy(model, ids, 6, DynamicCache(config=model.config)))


def test_a_cache_with_room_for_the_text(model: Any, ids: torch.Tensor) -> None:
    (static,) = contenders([STATIC], {}, [8], model, "torch", room=46)
    with torch.inference_mode():
        text = static.begin(model)
        text.read(ids)
        found = [text.newest]
        for _ in range(5):
            text.go_on()
            found.append(text.newest)
    assert torch.equal(torch.cat(found, 1), greedy(model, ids, 6, DynamicCache(config=model.config)))
    assert [layer.keys.shape[2] for layer in text.cache.layers] == [46, 46]


def test_a_window_is_computed_anew_for_every_token(model: Any, ids: torch.Tensor) -> None:
    (whole, narrow) = contenders([RECOMPUTE], {}, [100, 8], model, "torch")
    with torch.inference_mode():
        wide, few = whole.begin(model), narrow.begin(model)
        found = []
        for text in (wide, few):
            text.read(ids)
            found.append(text.newest)
        assert torch.equal(found[1], model(input_ids=ids[:, -8:]).logits[:, -1].argmax(-1, keepdim=True))
        few.go_on()
        seen = torch.cat([ids, found[1]], 1)[:, -8:]
        assert torch.equal(few.newest, model(input_ids=seen).logits[:, -1].argmax(-1, keepdim=True))
        found = [found[0]]
        for _ in range(3):
            wide.go_on()
            found.append(wide.newest)
    assert torch.equal(torch.cat(found, 1), greedy(model, ids, 4, DynamicCache(config=model.config)))


def test_rows(model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "peak_bytes", lambda run: [run(), 7][1])
    wanted = contenders([NATIVE, "h2o", "full"], {"recent": "4"}, [8, 16], model, "torch")
    ticks: list[int] = []
    rows = bench_generate(model, ids, 6, wanted, repeats=2, warmup=1, tick=lambda: ticks.append(1))
    assert [(row["policy"], row["budget"]) for row in rows] == [(NATIVE, None), ("h2o", 8), ("h2o", 16), ("full", None)]
    assert len(ticks) == generate.steps(wanted, 2, 1)
    kept = 2 * 2 * 2 * 2 * 16 * 4  # keys and values, layers, rows, KV heads, head size, float32
    for row in rows:
        assert (row["batch"], row["prompt_tokens"], row["new_tokens"], row["peak_bytes"]) == (2, 40, 6, 7)
        assert 0 < row["tpot_ms_q1"] <= row["tpot_ms"] <= row["tpot_ms_q3"] and row["ttft_ms"] > 0
        assert row["tokens_per_s"] == pytest.approx(2e3 / row["tpot_ms"], rel=1e-3)
        assert row["full_cache_bytes"] == kept * 45  # the last token is never fed
    assert rows[0]["vs_first"] == 1 and rows[0]["cache_bytes"] == kept * 45
    assert rows[1]["cache_bytes"] < rows[2]["cache_bytes"] < rows[0]["cache_bytes"]


def test_ratios_are_taken_token_by_token() -> None:
    found = generate.figures(Times([9.0], [4.0, 1.0, 10.0], 3, 2, 1), Times([18.0], [8.0, 1.0, 1.0]), batch=4)
    assert (found["ttft_ms"], found["tpot_ms"], found["tokens_per_s"], found["vs_first"], found["ttft_vs_first"]) == (
        9,
        4,
        1000,
        1,
        2,
    )
    assert (found["peak_bytes"], found["cache_bytes"], found["full_cache_bytes"]) == (3, 2, 1)


def test_contenders_take_turns_token_by_token(model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[int, int]] = []
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    read = Text.read

    def noting(self: Text, tokens: torch.Tensor) -> float:
        order.append((caches.index(self.cache), tokens.shape[1]))
        return read(self, tokens)

    monkeypatch.setattr(Text, "read", noting)
    wanted = [Contender(str(index), None, lambda cache=cache: cache) for index, cache in enumerate(caches)]
    with torch.inference_mode():
        generate.Race(model, ids, 4, wanted).round([Times(), Times()], turn=1)
    assert order == [(1, 40), (0, 40), (0, 1), (1, 1), (1, 1), (0, 1), (0, 1), (1, 1)]


RACE = ["shift:equip_h2o", "fresh:equip_h2o", "equip_h2o", "shift:streaming_llm", NATIVE, STATIC, RECOMPUTE]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_shares_of_a_tokens_time(model: Any, ids: torch.Tensor, backend: str) -> None:
    wanted = contenders(RACE, {}, [16], model, backend, room=46)
    rows = bench_generate(model, ids, 6, wanted, repeats=1)
    shares = {row["policy"]: row["shares"] for row in rows}
    known = {name: {share for share, value in found.items() if value is not None} for name, found in shares.items()}
    for found in shares.values():
        given = [share for share in found.values() if share is not None]
        assert all(0 < share < 1 for share in given) and sum(given) <= 1
    in_place = {"attention", "head"} | ({"update"} if backend == "cpu" else set())
    assert known == {
        "shift:equip_h2o": {"attention", "update", "rotation", "head"},
        "fresh:equip_h2o": {"attention", "update", "rotation", "head"},
        "equip_h2o": in_place,
        "shift:streaming_llm": {"attention", "update", "rotation", "head"},
        NATIVE: {"attention", "update", "head"},
        STATIC: {"attention", "head"},
        RECOMPUTE: {"attention", "head"},
    }
    assert not any(module._forward_hooks for module in model.modules()), "hooks should be gone"


def test_rows_share_a_prompt(model: Any, ids: torch.Tensor) -> None:
    """Each goes on with another token, as if it had read the prompt itself."""
    for one in contenders([*(name for name in RACE if name != STATIC), "streaming_llm"], {}, [16], model, "torch"):
        with torch.inference_mode():
            shared, own = one.begin(model), one.begin(model)
            shared.read(ids[:1])
            shared.share(3)
            own.read(ids[:1].expand(3, -1))
            assert len(set(shared.newest.flatten().tolist())) == 3 and torch.equal(shared.newest[:1], own.newest[:1])
            own.newest = shared.newest
            for _ in range(5):
                shared.go_on()
                own.go_on()
                torch.testing.assert_close(shared._logits, own._logits, atol=1e-4, rtol=1e-4)
    rows = bench_generate(model, ids[:1], 3, contenders(["h2o", "shift:h2o"], {}, [16], model, "torch"), rows=4, repeats=1)
    assert [row["batch"] for row in rows] == [4, 4]
    kept = 2 * 2 * 4 * 2 * 16 * 4  # keys and values, layers, rows, KV heads, head size, float32
    assert all(row["full_cache_bytes"] == kept * 42 for row in rows)


def test_a_setting_goes_to_the_policies_that_have_it() -> None:
    made = Policies(["full", "h2o", "sparcas"], {"tokens": "32"})
    assert [cache.spec.stem for cache in made.classes.values()] == ["full", "h2o", "sparcas"]
    with pytest.raises(Exception, match="has no param `tokns`"):
        Policies(["full", "h2o"], {"tokns": "32"})


def test_shapes() -> None:
    assert parse_shape("llama-2-7b:2") == ("llama-2-7b", 2) and parse_shape("llama-2-13b") == ("llama-2-13b", 40)
    for wrong in ("llama-2", "tiny:", "tiny:0", "tiny:5", "tiny:two"):
        with pytest.raises(KvdslError, match=r"shape|layers"):
            parse_shape(wrong)
    for name, shape in SHAPES.items():
        assert shape["hidden_size"] % shape["num_attention_heads"] == 0, name


def test_random_weights_are_those_of_the_seed(model: Any) -> None:
    def weights(made: Any) -> torch.Tensor:
        return made.model.layers[1].self_attn.k_proj.weight

    assert model.config.num_hidden_layers == 2 and weights(model).shape == (32, 64)
    assert torch.equal(weights(model), weights(shaped_model("tiny:2")))
    assert not torch.equal(weights(model), weights(shaped_model("tiny:2", seed=1)))
    assert weights(shaped_model("tiny:2", "bf16")).dtype == torch.bfloat16


COMMAND = ("bench", "generate", "--shape", "tiny:2", "--prompt-tokens", "24", "--new-tokens", "3", "--repeats", "1")


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    policies = ("--policies", "transformers,h2o,shift:h2o", "--set", "budget=8")
    words = (*COMMAND, *policies, "--batch", "2", "--share-prompt", "--backend", "torch")
    found = run(capsys, *words, "--json", code=0).json()
    assert found["format_version"] == "1.0" and found["environment"]["dtype"] == "float32"
    keys = {
        "policy",
        "budget",
        "ttft_ms",
        "ttft_ms_q1",
        "tpot_ms",
        "tpot_ms_q3",
        "tokens_per_s",
        "shares",
        "peak_bytes",
        "cache_bytes",
    }
    assert all(keys <= set(row) for row in found["rows"]) and found["rows"][1]["budget"] == 8
    shown = run(capsys, *words, code=0).out
    assert "tiny:2 in float32" in shown and "shift:h2o" in shown and "of a token's time" in shown


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--shape", "tiny", "--model", str(reference_model_path())), "--model or --shape"),
        (("--shape", "huge"), "there is no shape `huge`"),
        (("--shape", "tiny", "--text", __file__), "random tokens"),
        (("--shape", "tiny", "--prompt-tokens", "5000"), "limit of 4096"),
        (("--shape", "tiny", "--policies", ","), "no policy is named"),
        (("--shape", "tiny", "--policies", "roco,shift:roco"), "written for h2o, equip_h2o"),
        (("--shape", "tiny", "--policies", "fresh:nothing"), "there is no policy `nothing`"),
        (("--shape", "tiny", "--policies", "static,h2o", "--share-prompt"), "leave out `static`"),
        (("--shape", "tiny", "--policies", "kvpress:SnapKVPress"), "needs kvpress, which is not installed"),
    ],
)
def test_what_cannot_be(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str) -> None:
    assert told in run(capsys, "bench", "generate", *words, code=2).err
