"""The lm-evaluation-harness's model `kvdsl`, on requests and on local tasks."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.generation.generate import greedy

pytest.importorskip("lm_eval", reason="lm_eval is not installed: `make test-lm-eval` installs it")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.eval import lm_eval as ours

LONG = "Once upon a time, in a house by the sea, there lived an old captain who had a lantern."
REQUESTS = [
    (LONG, " He lit it"), (LONG, " Nobody"), (LONG, " It"), ("The cat", " sat on the mat and looked at the sea for an hour"),
    ("", "The"), (LONG * 2, " and"), ("A", "b"), (LONG + " He", " lit it"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def harness(kind: Any, model: Any, tokenizer: Any, **given: Any) -> Any:
    if kind is HFLM:
        # With it, the last of REQUESTS is scored at the places of the first, whose text it shares (0.4.13).
        given["logits_cache"] = False
    return kind(pretrained=model, tokenizer=tokenizer, device="cpu", max_length=128, **given)


def instances(kind: str, requests: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, one, number) for number, one in enumerate(requests)]


def asked(lm: Any) -> list[tuple[float, bool]]:
    return lm.loglikelihood(instances("loglikelihood", REQUESTS), disable_tqdm=True)


def close(found: list[tuple[float, bool]], wanted: list[tuple[float, bool]]) -> bool:
    logs = torch.tensor([one for one, _ in found]), torch.tensor([one for one, _ in wanted])
    return torch.allclose(*logs, atol=2e-3, rtol=1e-4) and [one for _, one in found] == [one for _, one in wanted]


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_a_budget_that_holds_all_reproduces_the_stock_numbers(batch_size: int, model: Any, tokenizer: Any) -> None:
    wanted = asked(harness(HFLM, model, tokenizer))
    assert close(asked(harness(ours.KvdslLM, model, tokenizer, policy="h2o", budget=128, batch_size=batch_size)), wanted)
    rolling = instances("loglikelihood_rolling", [(LONG * 8,), ("short",)])
    stock = harness(HFLM, model, tokenizer).loglikelihood_rolling(rolling, disable_tqdm=True)
    found = harness(ours.KvdslLM, model, tokenizer, policy="full", batch_size=batch_size).loglikelihood_rolling(
        rolling, disable_tqdm=True
    )
    assert found == pytest.approx(stock, rel=1e-4)


def one_by_one(
    model: Any, tokenizer: Any, context: str, wanted: str, policy: str, budget: int, tail: int = 0
) -> tuple[float, bool]:
    """The definition: the context but for its tail as the prompt of a cache, then token by token, alone."""
    first = tokenizer(context)["input_ids"] if context else [tokenizer.bos_token_id]
    rest = tokenizer((context or "") + wanted)["input_ids"][len(first) :]
    if not context:
        rest = tokenizer(wanted, add_special_tokens=False)["input_ids"]
    cache: Any = kvdsl.load(policy)(model, budget=budget, backend="torch")
    at = max(1, len(first) - tail)
    feeds = [first[:at], *([token] for token in first[at:] + rest[:-1])]
    total, best = 0.0, True
    with torch.inference_mode():
        for fed, token in zip(feeds, [None] * (len(first) - at) + rest, strict=True):
            logits = model(torch.tensor([fed]), **with_cache(cache), use_cache=True).logits[0, -1]
            if token is not None:
                total += float(logits.log_softmax(-1)[token])
                best = best and int(logits.argmax()) == token
    return total, best


@pytest.mark.parametrize(
    ("policy", "batch_size", "tail"), [("roco", 1, 0), ("roco", 64, 0), ("roco", 64, 5), ("streaming_llm", 2, 2)]
)
def test_under_a_small_budget_every_token_is_predicted_through_the_cache(
    policy: str, batch_size: int, tail: int, model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "PIECE", 3)
    given = {"policy": policy, "budget": 8, "kv_backend": "torch", "batch_size": batch_size, "tail": tail}
    found = asked(harness(ours.KvdslLM, model, tokenizer, **given))
    assert close(found, [one_by_one(model, tokenizer, context, rest, policy, 8, tail) for context, rest in REQUESTS])
    stock = asked(harness(HFLM, model, tokenizer))
    assert not close(found[:1], stock[:1]) and not close(found[3:4], stock[3:4])
    assert close(found[5:6], stock[5:6]) == (tail == 0), (
        "one token is predicted by the prompt's own forward, or by its tail's"
    )


def test_a_rate_where_there_is_no_context(model: Any, tokenizer: Any) -> None:
    """It is of the whole text, whatever stands beside it in a batch, and a window behind another has no other context."""
    requests = instances("loglikelihood", [("", LONG), ("", "The"), (LONG, " He lit it"), ("", LONG + " Nobody")])
    found = [
        harness(ours.KvdslLM, model, tokenizer, policy="roco", budget=0.25, batch_size=size).loglikelihood(
            requests, disable_tqdm=True
        )
        for size in (1, 64)
    ]
    assert close(*found)
    whole = 1 + len(tokenizer(LONG, add_special_tokens=False)["input_ids"])
    assert close(found[0][:1], [one_by_one(model, tokenizer, "", LONG, "roco", whole // 4)])
    rolling = instances("loglikelihood_rolling", [(LONG * 8,)])
    lm = harness(ours.KvdslLM, model, tokenizer, policy="roco", budget=0.25)
    assert lm.loglikelihood_rolling(rolling, disable_tqdm=True)[0] < 0


def ending(tokenizer: Any) -> Any:
    """The harness's own model needs a token that ends texts, which this tokenizer lacks."""
    made = copy.deepcopy(tokenizer)
    made.eos_token = made.bos_token
    return made


def test_texts_are_generated_through_the_cache(model: Any, tokenizer: Any) -> None:
    how = {"max_gen_toks": 6, "until": ["\0"], "do_sample": False}
    requests = instances("generate_until", [(LONG, how), ("The cat", how)])
    lm = harness(ours.KvdslLM, model, tokenizer, policy="h2o", budget=8, kv_backend="torch", batch_size=2)
    found = lm.generate_until(requests, disable_tqdm=True)
    for (text, _), one in zip([request.args for request in requests], found, strict=True):
        cache: Any = kvdsl.load("h2o")(model, budget=8, backend="torch")
        ids = torch.tensor([lm.tok_encode(text)])
        assert one == tokenizer.decode(greedy(model, ids, 6, cache)[0], skip_special_tokens=True)
    stock = harness(HFLM, model, ending(tokenizer), batch_size=2).generate_until(requests, disable_tqdm=True)
    assert found[0] != stock[0]


TASKS = {
    "kv_choice": {
        "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "kv_writing": {
        "output_type": "generate_until", "doc_to_target": "{{choices[answer]}}", "metric_list": [{"metric": "exact_match"}],
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 4, "do_sample": False},
    },
    "kv_rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_target": "{{text}}", "metric_list": [{"metric": "word_perplexity"}],
    },
}  # fmt: skip


@pytest.fixture
def tasks(tmp_path: Path) -> TaskManager:
    """Three local tasks over the same examples, a YAML file (which JSON is) for each."""
    names = ["captain", "mate", "cook", "boy"]
    examples = [
        {"text": f"{LONG} The {name} came on deck. Then came the", "choices": [" " + one for one in names], "answer": at}
        for at, name in enumerate(names)
    ]
    data = tmp_path / "examples.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in examples), encoding="utf-8")
    for name, parts in TASKS.items():
        task = {
            "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test",
            "doc_to_text": "" if name == "kv_rolling" else "{{text}}", **parts,
        }  # fmt: skip
        (tmp_path / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def evaluated(lm: Any, tasks: TaskManager) -> dict[str, Any]:
    found = simple_evaluate(lm, tasks=list(TASKS), task_manager=tasks, bootstrap_iters=0, log_samples=True)
    return found["samples"]


def test_local_tasks(tasks: TaskManager, model: Any, tokenizer: Any) -> None:
    stock = evaluated(harness(HFLM, model, ending(tokenizer)), tasks)
    whole = evaluated(harness(ours.KvdslLM, model, tokenizer, policy="roco", budget=128, batch_size=4), tasks)
    small = evaluated(harness(ours.KvdslLM, model, tokenizer, policy="roco", budget=6, batch_size=4), tasks)
    for name, metric in (("kv_choice", "acc"), ("kv_writing", "exact_match")):
        assert [one[metric] for one in whole[name]] == [one[metric] for one in stock[name]]
    for one, other, changed in zip(stock["kv_rolling"], whole["kv_rolling"], small["kv_rolling"], strict=True):
        assert other["resps"][0][0] == pytest.approx(one["resps"][0][0], rel=1e-4)
        assert changed["resps"][0][0] != pytest.approx(one["resps"][0][0], rel=1e-2)
    assert [one["resps"] for one in small["kv_writing"]] != [one["resps"] for one in stock["kv_writing"]]


def test_the_harness_knows_the_model_and_its_params(model: Any, tokenizer: Any) -> None:
    from lm_eval.api.registry import get_model

    assert get_model("kvdsl") is ours.KvdslLM
    lm = harness(ours.KvdslLM, model, tokenizer, policy="h2o", budget=32, recent=4)
    assert lm.params == {"budget": 32, "recent": 4} and "budget=32" in repr(lm.make_cache())
    assert lm.get_model_info()["kvdsl_policy"] == "h2o"
    for given, message in (
        ({"tail": -1}, "number of tokens"),
        ({"batch_size": "auto"}, "as a number"),
        ({"mixed_precision_dtype": "bfloat16"}, "give `dtype`"),
        ({"policy": "h2o", "bugdet": 8}, "`bugdet` is no param of h2o, .* did you mean `budget`"),
        ({"policy": "h2o", "pretrained": None, "bugdet": 8}, "`bugdet` is no param of h2o, .* did you mean `budget`"),
    ):
        with pytest.raises(KvdslError, match=message):
            ours.KvdslLM(**{"pretrained": model, "tokenizer": tokenizer, "device": "cpu"} | given)


def test_what_is_too_long_loses_its_beginning() -> None:
    requests = [(None, [1, 2, 3], [4, 5]), (None, [1, 2, 3], [6]), (None, [1, 2, 3, 4], [5])]
    assert ours.by_context(requests, 3) == [((2, 3), [(0, [4, 5])]), ((1, 2, 3), [(1, [6])]), ((2, 3, 4), [(2, [5])])]
    groups = ours.by_context(requests, 8)
    assert groups == [((1, 2, 3), [(0, [4, 5]), (1, [6])]), ((1, 2, 3, 4), [(2, [5])])]
    assert [len(batch) for batch in ours.batches(groups, 2)] == [1, 1] and len(list(ours.batches(groups, 3))) == 1
    assert [len(batch) for batch in ours.batches(groups, 3, tail=2)] == [2] and len(
        list(ours.batches(groups, 3, tail=3))
    ) == 2
    with pytest.raises(KvdslError, match="a continuation of 4 tokens"):
        ours.by_context([(None, [1], [1, 2, 3, 4])], 3)


def test_what_is_fed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "PIECE", 3)
    assert list(ours.steps(9)) == [(0, 3), (3, 6), (6, 9)]
    assert list(ours.steps(9, 5)) == [(0, 5), (5, 8), (8, 9)] and list(ours.steps(9, 9)) == [(0, 9)]
    assert list(ours.steps(1)) == [(0, 1)] and list(ours.steps(2, 1)) == [(0, 1), (1, 2)]


def test_a_tail_where_text_is_generated_is_refused(model: Any, tokenizer: Any) -> None:
    requests = instances("generate_until", [(LONG, {"max_gen_toks": 6, "until": ["\0"], "do_sample": False})])
    with pytest.raises(KvdslError, match="`tail` is for log-likelihoods"):
        harness(ours.KvdslLM, model, tokenizer, policy="h2o", budget=8, tail=4).generate_until(requests, disable_tqdm=True)
