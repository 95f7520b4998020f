"""The leaderboard: its texts, its measurements that go on, and what it says of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from click.testing import CliRunner

from kvdsl.errors import KvdslError
from kvdsl_lab.assets import book_text
from kvdsl_lab.cli.leaderboard import command
from kvdsl_lab.leaderboard import facts, haystacks, kinds, ruler, run, summary, tasks
from kvdsl_lab.leaderboard.questions import Question, lay_out

BOOK = haystacks.sentences(book_text()[:60_000])


def material(seed: int = 0, tokens: int = 900) -> ruler.Material:
    return ruler.Material(np.random.default_rng(seed), BOOK, tokens, lambda text: len(text.split()))


# -- texts -------------------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[ruler.Material], Question]] = {**ruler.TASKS, "facts": lambda made: facts.fact(made, 3, among=8)}


@pytest.mark.parametrize("name", MAKERS)
def test_a_text_is_as_long_as_asked_and_holds_the_answers(name: str) -> None:
    found = MAKERS[name](material())
    assert 800 < len(found.text.split()) <= 900
    assert found.answers
    assert all(answer in found.text for answer in found.answers)
    assert not any(answer in found.question + found.opening for answer in found.answers)
    assert found.score(" and ".join(found.answers)) == 1
    assert found.score("nothing") == 0


@pytest.mark.parametrize("name", MAKERS)
def test_an_item_is_the_same_every_time_and_another_seed_another(name: str) -> None:
    one, again, other = (MAKERS[name](material(seed)) for seed in (0, 0, 1))
    assert one == again
    assert one.answers != other.answers


def test_a_fact_stands_at_its_depth() -> None:
    for number, depth in enumerate(facts.DEPTHS):
        found = facts.fact(material(), number)
        assert found.depth == depth
        assert found.text.index("The secret code") / len(found.text) == pytest.approx(
            depth, abs=0.12
        )  # sentences differ in length


def test_common_words_are_common() -> None:
    found = ruler.common_words(material())
    words = [word.rstrip(".") for word in found.text.split()]
    assert min(words.count(answer) for answer in found.answers) == 30
    others = set(words) - set(found.answers) - {"the", "that", "most", "often", "words", "some", "appear", "others", "than"}
    assert max(words.count(other) for other in others if other.isalpha() and other.islower()) == 3


def test_a_text_too_short_for_the_task_is_refused() -> None:
    with pytest.raises(KvdslError, match="too few for this task"):
        ruler.TASKS["vt"](material(tokens=60))


def test_text_and_question_are_the_template_between_them(tokenizer: Any) -> None:
    class Chat:
        chat_template = "there is one"

        def apply_chat_template(self, chat: Any, **_: Any) -> str:
            return f"<user>{chat[0]['content']}</user><model>"

        def __call__(self, text: str, **kwargs: Any) -> Any:
            return tokenizer(text, **kwargs)

    question = Question("A long text.", "What?", "It is", ["this"], 4)
    text, asked = lay_out(Chat(), question)
    assert tokenizer.decode(text) + tokenizer.decode(asked) == "<user>A long text.\n\nWhat?</user><model>It is"


# -- running -----------------------------------------------------------------------------------------------------------


def start(monkeypatch: pytest.MonkeyPatch, model: Any, tokenizer: Any) -> run.Bench:
    monkeypatch.setattr("kvdsl.generation.models.load_model", lambda name, dtype: (model, tokenizer))
    plan = run.Plan(None, None, book_text()[:60_000], 160, 0, ("full", "h2o", "snapkv", "pyramidkv"), (0.5,), (48,), "torch")
    return run.Bench(plan)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, model: Any, tokenizer: Any) -> run.Bench:
    return start(monkeypatch, model, tokenizer)


TODO = [tasks.TASKS[name] for name in ("books", "nearness", "fact")]


@pytest.mark.slow
def test_a_run_goes_on_and_a_policy_that_cannot_is_said(
    bench: run.Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = run.measure(bench, TODO, 1, tmp_path, {"length": 160})
    assert {(row["task"], row["policy"]) for row in first} == {
        (task.name, p) for task in TODO for p in bench.policies.classes
    }
    refused = [row for row in first if "refused" in row]
    assert {(row["task"], row["policy"]) for row in refused} >= {("nearness", "pyramidkv")}
    assert {row["policy"] for row in refused} == {"pyramidkv"}
    assert "budget" in refused[0]["refused"]
    lines = tmp_path / "measurements.jsonl"
    lines.write_text(lines.read_text()[:-30])  # killed while it wrote
    asked: list[tuple[str, int, int]] = []
    measured = bench.measure
    monkeypatch.setattr(bench, "measure", lambda *unit: (asked.append((unit[0], unit[1], len(unit[2]))), measured(*unit))[1])
    second = run.measure(bench, TODO, 2, tmp_path, {"length": 160})
    assert asked == [("fact", 0, 1), *((task.name, 1, 4) for task in TODO)]
    key = lambda row: (row["task"], row["item"], row["policy"])  # noqa: E731
    values = {key(row): row.get("values") for row in second}
    assert {key(row): row.get("values") for row in first}.items() <= values.items()
    assert run.measure(bench, TODO, 2, tmp_path, {"length": 160}, minutes=1e-9) == second
    with pytest.raises(KvdslError, match="length was 160, now 128"):
        run.measure(bench, TODO, 2, tmp_path, {"length": 128})


def finished(kind: Any, bench: run.Bench, task: str, pairs: list[run.Pair]) -> list[kinds.Outcome]:
    item = kind.prepare(bench.lab, task, 0)
    make = partial(bench.policies.make, model=bench.lab.model)
    started = [kind.start(bench.lab, item, partial(make, name, budget=budget)) for name, budget in pairs]
    return cast("list[kinds.Outcome]", kind.finish(bench.lab, item, started))


def test_the_full_cache_is_not_behind_itself(bench: run.Bench) -> None:
    found = finished(kinds.Nearness(new_tokens=6), bench, "nearness", [("full", None), ("h2o", 200), ("h2o", 0.1)])
    assert [one.values["kl"][0] < 1e-6 and one.values["same_prefix"] == [6] for one in found] == [True, True, False]


def test_losses_are_those_of_the_evaluation(bench: run.Bench) -> None:
    from kvdsl_lab.eval.perplexity import token_losses

    kind = kinds.Loss(part=32, rows=2)
    pairs: list[run.Pair] = [("full", None), ("h2o", 16)]
    for found, (name, budget) in zip(finished(kind, bench, "books", pairs), pairs, strict=True):
        alone = [
            token_losses(bench.lab.model, row[None], bench.policies.make(name, bench.lab.model, budget), 1)[0]
            for row in kind.prepare(bench.lab, "books", 0)
        ]
        assert found.values["loss"] == pytest.approx(
            [float(part.mean()) for row in alone for part in row.split(32)], rel=1e-5
        )
        assert found.usage.most_held == (16 if budget else 159)


def test_answers_are_those_that_each_cache_gives_alone(bench: run.Bench) -> None:
    kind, pairs = tasks.TASKS["fact"].kind, list(bench.pairs(tasks.TASKS["fact"]))[:3]
    together = finished(kind, bench, "fact", pairs)
    for one, pair in zip(together, pairs, strict=True):
        alone = finished(kind, bench, "fact", [pair])[0]
        assert (one.values, one.bytes, one.usage.most_held) == (alone.values, alone.bytes, alone.usage.most_held)


# -- what is said ------------------------------------------------------------------------------------------------------


def rows(scores: dict[str, list[float]], measure: str = "known", task: str = "fact") -> list[run.Row]:
    return [
        {"task": task, "item": item, "policy": policy, "budget": None if policy == "full" else 0.25,
         "values": {measure: [score]}, "bytes": 10, "token_ms": 1.0, "note": None}
        for policy, own in scores.items() for item, score in enumerate(own)
    ]  # fmt: skip


def places(found: list[run.Row]) -> dict[str, int]:
    return {row["policy"]: row["place"] for row in found if row["policy"] != "full"}


def test_places_are_told_only_from_chance() -> None:
    rng = np.random.default_rng(0)
    base = rng.random(20)
    scores = {"full": base + 1, "good": base + 0.5 + rng.normal(0, 0.05, 20), "like it": base + 0.5 + rng.normal(0, 0.05, 20),
              "bad": base}  # fmt: skip
    measured = rows({policy: own.tolist() for policy, own in scores.items()})
    found = summary.table(summary.column(measured, "fact", ["fact"], "known"), measured)
    assert places(found) == {"good": 1, "like it": 1, "bad": 3}
    bad = next(row for row in found if row["policy"] == "bad")
    assert bad["behind_full"] == pytest.approx([1, 1, 1])  # paired: what the items differ by is not in it
    assert bad["mean"] == pytest.approx(base.mean(), abs=1e-4)
    assert bad["low"] < bad["mean"] < bad["high"]


def test_less_loss_is_a_better_place() -> None:
    base = np.linspace(2, 3, 10)
    measured = rows({"full": base.tolist(), "worse": (base + 0.2).tolist(), "near": (base + 0.1).tolist()}, "loss", "books")
    found = summary.table(summary.column(measured, "books", ["books"], "loss"), measured)
    assert places(found) == {"near": 1, "worse": 2}
    assert next(row for row in found if row["policy"] == "worse")["behind_full"][0] == pytest.approx(0.2)


def test_few_items_tell_nothing() -> None:
    measured = rows({"full": [1.0] * 5, "one": [1.0] * 5, "other": [0.0] * 5})
    found = summary.table(summary.column(measured, "fact", ["fact"], "known"), measured)
    assert places(found) == {"one": 1, "other": 1}
    assert all(row["low"] is None for row in found)


def test_items_that_not_all_were_asked_do_not_count() -> None:
    measured = rows({"full": [1.0] * 8, "one": [1.0] * 8, "other": [0.0] * 7})
    found = summary.column(measured, "fact", ["fact"], "known")
    assert {len(items) for own in found.scores.values() for items in own} == {7}


def test_tasks_that_the_full_cache_fails_tell_nothing() -> None:
    measured = rows({"full": [1.0] * 3}, task="fact") + rows({"full": [0.0] * 3}, task="vt")
    assert summary.telling(measured, ["fact", "vt"], "known") == ["fact"]


def test_the_command_writes_its_tables(tmp_path: Path) -> None:
    given = ["--policies", "streaming_llm", "--tasks", "fact,nearness", "--rates", "0.5", "--length", "160", "--items", "1",
             "--workers", "1", "--no-plots", "--json", "--out", str(tmp_path)]  # fmt: skip
    found = CliRunner().invoke(command, given)
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert {row["policy"] for one in result["columns"] for row in one["rows"]} == {"full", "streaming_llm"}
    assert json.loads((tmp_path / "leaderboard.json").read_text()) == result
    page = (tmp_path / "leaderboard.md").read_text()
    assert "`streaming_llm` | 0.5" in page and "nearness: kl" in page


def test_an_unknown_task_is_named() -> None:
    found = CliRunner().invoke(command, ["--tasks", "poetry"])
    assert found.exit_code != 0
    assert isinstance(found.exception, KvdslError)
    assert "there is no task `poetry`; there are books" in str(found.exception)
