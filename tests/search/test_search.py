"""Whole searches, on the reference model."""

from __future__ import annotations

import json
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from kvdsl.cli import main
from kvdsl.compiler import compile_file
from kvdsl.errors import KvdslError
from kvdsl_lab.search.judge import TASKS, Attention, Case, Judge, NextToken, Recorded, Task, recorded
from kvdsl_lab.search.proof import Contestant, Proof, Row, agreement, ranks
from kvdsl_lab.search.report import behind, proof_rows
from kvdsl_lab.search.run import Material, Plan, judge_of, seeds
from kvdsl_lab.search.space import Bounds
from kvdsl_lab.search.store import Store
from kvdsl_lab.search.workers import Workers
from tests.cli.harness import run


@pytest.fixture(scope="module")
def text() -> Recorded:
    from kvdsl import load_model
    from kvdsl.generation.models import windows
    from kvdsl.generation.text import read_text

    model, tokenizer = load_model()
    return recorded(model, windows(tokenizer, read_text(None), 80, 2), 99)


def texts(*budgets: int) -> list[Case]:
    return [Case("text", budget) for budget in budgets]


def test_a_judge(text: Recorded) -> None:
    judge = Judge(texts(12, 24, 79), (Attention(text),))
    errors = dict(zip(("h2o", "random"), judge.errors([seeds()[name] for name in ("h2o", "random")], 0), strict=True))
    for found in errors.values():
        assert found == sorted(found, reverse=True), "more tokens, less error"
        assert found[-1] < 0.1 < found[0]
    assert errors["h2o"][0] < errors["random"][0]
    assert judge.errors([seeds()["vatp_h2o"]], 0)[0][:2] == [float("inf")] * 2, "it protects more than 12 and 24 tokens"


def test_the_error_by_hand(text: Recorded) -> None:
    """A window is attention over the newest tokens."""
    budget, call = 16, text.call
    heads, tokens = call.key.shape[1:3]
    behind = torch.arange(tokens)[:, None] - torch.arange(tokens)
    query = call.query.unflatten(1, (heads, -1))
    logit = torch.einsum("bhgqd,bhkd->bhgqk", query, call.key) * call.scaling
    seen = (behind >= 0) & (behind <= budget)  # the newest, and as many as stay after a settle
    out = torch.einsum("bhgqk,bhkd->bqhgd", logit.masked_fill(~seen, -torch.inf).softmax(-1), call.value).flatten(2, 3)
    distance, size = ((x[:, budget : 2 * budget] ** 2).sum((1, 2, 3)) for x in (out - text.out, text.out))
    wanted = float((distance / size).sqrt().mean())
    assert Judge(texts(budget), (Attention(text),)).errors([seeds()["window"]], 0)[0][0] == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("deep", [2, 99], ids=["with kernels", "in memory"])
def test_the_next_tokens_distribution(deep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a window's mask over the whole text; more tokens, less error; the full cache has none."""
    monkeypatch.setattr("kvdsl_lab.search.judge._DEEP", deep)
    monkeypatch.setattr(
        "kvdsl_lab.search.judge.cache_folder_at", lambda _: nullcontext()
    )  # the driver is built there already
    from kvdsl import load_model
    from kvdsl.generation.models import windows
    from kvdsl.generation.text import read_text

    model, tokenizer = load_model()
    ids, budget = windows(tokenizer, read_text(None), 40, 2), 8
    judge = Judge(texts(budget, 39), (NextToken(model, ids),))
    refused, (some, none), others = judge.errors([seeds()[name] for name in ("vatp_h2o", "window", "h2o")], 0)
    assert abs(none) < 1e-6 < some
    behind = torch.arange(40)[:, None] - torch.arange(40)
    mask = torch.zeros(40, 40).masked_fill((behind < 0) | (behind > budget), -torch.inf).expand(2, 1, -1, -1)
    with torch.inference_mode():
        full, seen = (
            model(input_ids=ids, **more, use_cache=False).logits.log_softmax(-1) for more in ({}, {"attention_mask": mask})
        )
    wanted = (full.exp() * (full - seen)).sum(-1)[:, budget : budget + 24].mean()
    assert some == pytest.approx(float(wanted), rel=1e-3)
    assert refused[0] == float("inf"), "it protects more than 8 tokens"
    assert others == pytest.approx(judge.errors([seeds()["h2o"]], 0)[0], rel=1e-4, abs=1e-6)


def test_behind_a_long_prompt(text: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window sees the newest, and the prompt's end is there when the first token behind it is read; nothing is lost within it."""
    monkeypatch.setitem(TASKS, "prompt", Task(4, 6))
    from kvdsl import load_model
    from kvdsl.generation.models import windows
    from kvdsl.generation.text import read_text

    model, tokenizer = load_model()
    case, window = Case("prompt", 16), seeds()["window"]
    ids = windows(tokenizer, read_text(None), 80, 2)
    judge = Judge((case, Case("text", 79)), (Attention(text), NextToken(model, ids)))
    assert (case.prompt, case.tokens) == (64, 70)
    for rung in (0, 1):
        ((found, none),) = judge.errors([window], rung)
        assert abs(none) < 1e-5 < found
    behind = torch.arange(70)[:, None] - torch.arange(70)
    seen = (behind >= 0) & ((behind <= 16) | (torch.arange(70)[:, None] < 64))
    mask = torch.zeros(70, 70).masked_fill(~seen, -torch.inf).expand(2, 1, -1, -1)
    with torch.inference_mode():
        full, cut = (
            model(input_ids=ids[:, :70], **more, use_cache=False).logits.log_softmax(-1)
            for more in ({}, {"attention_mask": mask})
        )
    wanted = (full.exp() * (full - cut)).sum(-1)[:, 64:].mean()
    assert judge.errors([window], 1)[0][0] == pytest.approx(float(wanted), rel=1e-3)


def test_agreement() -> None:
    errors = {"a": 0.1, "b": 0.2, "c": 0.3}
    assert agreement(errors, {"a": 4.0, "b": 4.1, "c": 5.0}) == 1
    assert agreement(errors, {"a": 5.0, "b": 4.1, "c": 4.0}) == -1
    assert agreement(errors, {"a": 5.0}) is None


SEARCH = ("search", "--budget", "8", "--evaluations", "36", "--minutes", "600", "--texts", "2", "--stretches", "2", "--finalists", "1",
          "--threads", "1")  # fmt: skip


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A whole search: its folder, and what it said."""
    folder, said = tmp_path_factory.mktemp("searched"), StringIO()
    with redirect_stdout(said):
        assert main([*SEARCH, "--out", str(folder), "--json"]) == 0
    return folder, json.loads(said.getvalue())


@pytest.mark.nightly  # test_evolve.py has the search with a judge that takes no time
def test_the_command(searched: tuple[Path, dict[str, Any]]) -> None:
    folder, result = searched
    found, best = result["finalists"][0], result["seeds"][0]
    assert found["error"] < best["error"], "better than its seeds by its own measure"
    assert result["best"] == {"policy": "found_1", "file": str(folder / "found_1.kv"), "objective": found["error"]}
    assert result["evaluated"] == result["counts"]["tried"] and len(found["errors"]) == 2, "both tasks"
    assert result["counts"]["tried"] >= 36
    assert compile_file(folder / "found_1.kv").policy.name == "Found1"
    assert {row["name"] for row in result["proof"]} >= {"found_1", "h2o", "roco"}
    assert 0 < sum(move["climbed"] for move in result["moves"]) <= result["cheap_step"]["policies"]
    page = (folder / "search.md").read_text()
    assert f"found_1 | {found['error']:.4f}" in page and "On unseen text" in page


@pytest.mark.nightly  # test_evolve.py has who is chosen
def test_the_command_chooses_on_another_text(
    searched: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvdsl_lab.assets import all_books

    (tmp_path / "other.txt").write_text(all_books()[-20_000:], encoding="utf-8")
    _, here = searched
    other = [*SEARCH, "--choose-on", str(tmp_path / "other.txt"), "--no-plots", "--out", str(tmp_path / "there"), "--json"]
    there = run(capsys, *other).json()
    assert there["curve"] == here["curve"], "it searches as without"
    assert len(here["agreement"]) == 2
    assert there["agreement"][2]["rung"] == "the next token's distribution, in 2 other texts"
    assert {one["name"]: one["error"] for one in there["seeds"]} != {one["name"]: one["error"] for one in here["seeds"]}
    assert "a text that was not searched on" in " ".join((tmp_path / "there" / "found_1.kv").read_text().split())
    (tmp_path / "other.txt").write_text("Another one. " * 2_000, encoding="utf-8")
    refused = run(capsys, *other)
    assert refused.code == 2 and "is of another search: choice sha256 was" in refused.err


def test_the_command_goes_on(searched: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    folder, one = searched
    (folder / "found_9.kv").write_text("of an earlier choice")
    other = run(capsys, *SEARCH, "--out", str(folder), "--json").json()
    for name in ("finalists", "proof", "counts", "curve"):
        assert one[name] == other[name], name
    assert not (folder / "found_9.kv").exists()
    assert (folder / "search.png").stat().st_size > 1000
    ours = next(row for row in one["proof"] if row["name"] == "found_1")
    said = run(capsys, *SEARCH, "--out", str(folder)).out
    assert (
        f"found_1 at 8, unseen text: too few stretches to tell from the best seed, {ours['behind'][0]:+.4f} nats a token"
        in said
    )
    refused = run(capsys, *SEARCH, "--seed", "1", "--out", str(folder))
    assert refused.code == 2 and "is of another search: seed was 0" in refused.err


def test_several_processes_judge_as_one_does() -> None:
    plan = Plan(None, None, None, (16,), ("text",), Bounds(), stretches=1, texts=2)
    policies = list(seeds().values())[:3]
    judge = judge_of(plan, Material.of(plan))
    with Workers(plan, 2) as workers:
        assert (workers.cases, workers.rungs, workers.choice) == (judge.cases, judge.rungs, judge.choice)
        begun = workers.processor_time()
        for rung in (0, 1):
            alone = judge.errors(policies, rung)
            found = workers.errors(policies, rung)
            assert found == [pytest.approx(errors, rel=1e-4) for errors in alone]
        assert workers.errors(policies[:1], 0) == [pytest.approx(judge.errors(policies[:1], 0)[0], rel=1e-4)]
        assert workers.processor_time() > begun
        for process in workers._pool._processes.values():
            process.kill()
        with pytest.raises(KvdslError, match="a process that judges has ended"):
            workers.errors(policies, 0)


class Known:
    """Of `ours` a nat less than of others; the first stretches are easy."""

    def loss(self, key: str, text: str, budget: int, stretch: int) -> float:
        return 3 + stretch - (key[:4] == "ours")


def proven(stretches: int, ours: int = 1) -> list[Row]:
    contestants = [Contestant(f"ours {number}", f"ours {number}", "ours.kv", False) for number in range(ours)]
    proof = Proof(None, torch.zeros(stretches, 1), "a text", cast("Store", Known()))
    return list(proof.rows([*contestants, Contestant("h2o", "h2o", "h2o", True)], [64]))


@pytest.mark.parametrize(("stretches", "better"), [(8, True), (20, True), (5, None)])
def test_a_stretch_is_one_observation(stretches: int, better: bool | None) -> None:
    """Better in all of 5 stretches is better 5 times, which chance does once in 32."""
    ours, _ = proven(stretches)
    assert ours.better is better and ours.loss == pytest.approx(2 + (stretches - 1) / 2)
    assert ours.behind == (pytest.approx(-1), *((pytest.approx(-1),) * 2 if better else (None, None)))
    assert behind(proof_rows([ours])[0]) == ("-1.0000 (-1.0000 to -1.0000)" if better else "-1.0000")


@pytest.mark.parametrize(("compared", "better"), [(6, True), (7, None)])
def test_how_many_are_compared_says_how_many_stretches_it_takes(compared: int, better: bool | None) -> None:
    """Of 8 stretches chance agrees in all once in 256."""
    assert [row.better for row in proven(8, compared)] == [better] * compared + [False]


def test_ranks_are_shared() -> None:
    assert ranks([0.3, 0.1, 0.3, 0.2]).tolist() == [2.5, 0, 2.5, 1]
    names = "abcd"
    equal, rising = dict.fromkeys(names, 0.1), dict(zip(names, (1.0, 2.0, 3.0, 4.0), strict=True))
    assert agreement(equal, rising) is None and agreement(rising, rising) == 1
    tied = dict(zip(names, (1.0, 1.0, 2.0, 2.0), strict=True))
    assert agreement(tied, rising) == pytest.approx(2 / 5**0.5, abs=1e-4)


def test_a_text_that_is_too_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "short.txt").write_text("Once upon a time there was a king. " * 30)
    said = run(capsys, "search", "--text", str(tmp_path / "short.txt"), "--budget", "64", "--out", str(tmp_path / "out"))
    assert said.code == 2 and "too few for 26 stretches of 320 that do not overlap" in said.err
    assert not (tmp_path / "out").exists()


def test_a_task_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "search", "--task", "text,poems")
    assert said.code == 2 and "unknown task `poems`; the tasks are text, prompt" in said.err
