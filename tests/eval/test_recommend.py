"""`kvdsl recommend`: what it reads, what fits into some bytes, what it finds and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvdsl.assets import book_text
from kvdsl.errors import KvdslError
from kvdsl.generation.generate import greedy
from kvdsl_lab.cli.recommend import size, spread
from kvdsl_lab.eval.caches import Policies
from kvdsl_lab.leaderboard.kinds import bytes_in_use
from kvdsl_lab.recommend.contest import Found, Room, measured, verdict
from kvdsl_lab.recommend.prompts import Prompt, is_right, read_prompts, with_answers
from tests.cli.harness import run


def file_of(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


# -- what is read ------------------------------------------------------------------------------------------------------


def test_prompts_are_lines_or_objects(tmp_path: Path) -> None:
    lines = (
        "Who wrote it?",
        "",
        '{"prompt": "One", "answer": 7, "kind": "sums"}',
        '{"question": "Two", "answer": "so #### 3"}',
    )
    assert read_prompts(file_of(tmp_path, *lines)) == [
        Prompt("Who wrote it?"), Prompt("One", "7", "sums"), Prompt("Two", "so #### 3"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("", " "), "has no prompts"),
        (("One", "{One"), ":2 begins with a brace and is not JSON"),
        (('{"text": "One"}',), ":1 has no text under `prompt`"),
        (('{"prompt": " "}',), ":1 has no text under `prompt`"),
    ],
)
def test_what_is_no_prompt_is_named(tmp_path: Path, lines: tuple[str, ...], said: str) -> None:
    with pytest.raises(KvdslError, match=said):
        read_prompts(file_of(tmp_path, *lines))


def test_answers_of_another_file(tmp_path: Path) -> None:
    prompts = [Prompt("One"), Prompt("Two", None, "sums")]
    assert with_answers(prompts, file_of(tmp_path, "7", '{"answer": "Paris"}')) == [
        Prompt("One", "7"), Prompt("Two", "Paris", "sums"),
    ]  # fmt: skip
    with pytest.raises(KvdslError, match="has 1 answers for 2 prompts"):
        with_answers(prompts, file_of(tmp_path, "7"))


def test_answers_are_numbers_or_words() -> None:
    assert (
        is_right("so it is 18", "18") and is_right("so 18", "9 * 2 = 18 #### 18") and is_right("In paris, I think.", "Paris")
    )
    assert not is_right("so it is 19, and not 18.5", "18") and not is_right("In Rome", "Paris") and not is_right("", "18")


def test_sizes() -> None:
    assert [size(text) for text in ("4096", "1.5GB", "64MiB", "2 kib")] == [4096, 1_500_000_000, 64 * 2**20, 2048]
    for text in ("", "0", "-1", "many", "12 parsecs", "0.2"):
        with pytest.raises(KvdslError, match="is not a number of bytes"):
            size(text)


def test_prompts_are_spread_over_the_file() -> None:
    prompts = [Prompt(str(number)) for number in range(10)]
    assert [one.text for one in spread(prompts, 4)] == ["0", "2", "5", "7"]
    assert spread(prompts, 20) == prompts


# -- what fits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o", "snapkv", "h2o_answer", "adakv"])
def test_the_largest_budget_that_fits(model: Any, policy: str) -> None:
    """One more does not; what evicts prompts only has room for its answer, and what keeps prompts for these."""
    policies = Policies(["full", policy], {})
    room = Room(model, policies, [60, 100], 30)
    whole = room.fit("full", 10**9)
    most = whole.bytes // 2 if policy != "h2o_answer" else whole.bytes * 9 // 10
    fit = room.fit(policy, most)
    assert fit.why_not is None and fit.budget is not None and fit.bytes <= most < whole.bytes
    assert room.fit(policy, fit.bytes - 1).budget == fit.budget - 1
    cache = policies.make(policy, model, fit.budget)
    greedy(model, torch.arange(100)[None] + 5, 31, cache)
    assert 0.95 * fit.bytes <= bytes_in_use(cache) <= fit.bytes + 64  # a row has some numbers of its own


def test_what_does_not_fit_says_why(model: Any) -> None:
    policies = Policies(["full", "streaming_llm", "h2o_answer", "quest"], {})
    room = Room(model, policies, [100], 30)
    whole = room.fit("full", 10**9).bytes
    assert "has no budget to lower" in str(room.fit("full", whole - 1).why_not)
    assert "has no budget to lower" in str(room.fit("quest", whole - 1).why_not)
    assert "even with `budget` 1" in str(room.fit("h2o_answer", whole // 2).why_not)
    assert "protects 5 tokens" in str(room.fit("streaming_llm", whole // 130 * 3).why_not)


# -- what is measured --------------------------------------------------------------------------------------------------


def test_policies_write_answers_where_the_right_one_is_known(model: Any, tokenizer: Any) -> None:
    policies, text = Policies(["full", "window"], {}), " ".join(book_text().split()[:40])
    prompts = [Prompt(text), Prompt(text, "no such words")]
    (_, unknown), (_, known) = measured(model, tokenizer, policies, {"window": 16}, prompts, 6, lambda: True)
    assert [row[1] for row in unknown.values()] == [None, None] and [row[1] for row in known.values()] == [0, 0]
    assert unknown["window"][0] == pytest.approx(known["window"][0], rel=1e-3) and unknown["window"][0] > 0


# -- what is said ------------------------------------------------------------------------------------------------------


def found(**losses: list[float]) -> dict[str, Found]:
    return {name: Found(own) for name, own in losses.items()}


def test_who_is_told_from_the_best() -> None:
    near = [0.1, 0.2, 0.1, 0.3, 0.2, 0.1, 0.2, 0.1]
    told = verdict(
        found(far=[one + 1 for one in near], near=near, beside=[one + 0.2 * (-1) ** at for at, one in enumerate(near)])
    )
    assert told.best == "near" and told.alike == ("beside",)
    assert [row["policy"] for row in told.rows] == ["near", "beside", "far"] and [row["alike"] for row in told.rows] == [
        True,
        True,
        False,
    ]
    assert all(row["low"] <= row["loss"] <= row["high"] for row in told.rows)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = book_text().split()
    lines = [json.dumps({"prompt": " ".join(words[at : at + 60]), "kind": "book"}) for at in range(0, 60 * 7, 60)]
    asked = [
        "recommend",
        "--prompts",
        str(file_of(tmp_path, *lines)),
        "--policies",
        "h2o,recent_answer,snapkv,quest",
        "--new-tokens",
        "8",
    ]
    full = run(capsys, *asked, "--bytes", "1GiB", "--json").json()
    assert full["advice"]["policy"] == "full" and full["rows"] == [] and "under the full cache" in full["advice"]["reason"]
    limit = int(full["advice"]["reason"].partition("takes ")[2].partition(" bytes")[0].replace(",", "")) // 2
    made = run(capsys, *asked, "--bytes", str(limit), "--json").json()
    rows = {row["policy"]: row for row in made["rows"]}
    assert {*rows} == {"h2o", "snapkv"} and {one["policy"] for one in made["refused"]} == {"recent_answer", "quest"}
    for row in rows.values():
        assert row["low"] <= row["loss"] <= row["high"] and row["loss"] > 0 and row["bytes"] <= limit + 512
    advice, best = made["advice"], min(rows, key=lambda name: rows[name]["loss"])
    assert advice["policy"] == best and advice["params"] == rows[best]["params"] and made["kinds"][0]["policy"] == best
    assert (
        advice["generate"] == f"kvdsl run --policy {best} --set budget={advice['params']['budget']}"
        and advice["serve"] is None
    )
    shown = run(capsys, *asked, "--bytes", str(limit))
    assert (
        f"Take {best}: it lost least on 7 prompts" in shown.out
        or f"Take {best}: no difference can be told on 7" in shown.out
    )
    nothing = run(capsys, *asked, "--bytes", "1000")
    assert nothing.code == 2 and "give more --bytes" in nothing.err
