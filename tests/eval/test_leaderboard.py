"""The leaderboard: its texts, its measurements that go on, and what it says of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.shipped import found_policies
from kvdsl_lab.assets import book_text
from kvdsl_lab.cli.leaderboard import command, names_of_policies
from kvdsl_lab.eval.abreast import feed
from kvdsl_lab.eval.reading import read
from kvdsl_lab.leaderboard import chat, claim, facts, haystacks, kinds, report, ruler, run, summary, tasks
from kvdsl_lab.leaderboard.questions import Question, lay_out, template

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
    assert run.measure(bench, TODO, 2, tmp_path, {"length": 160}, until=0.0) == second
    with pytest.raises(KvdslError, match="length was 160, now 128"):
        run.measure(bench, TODO, 2, tmp_path, {"length": 128})


class Ticking:
    """A clock that is a second later whenever it is read."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def monotonic(self) -> float:
        self.seconds += 1
        return self.seconds


def test_an_item_that_is_not_finished_in_time_is_dropped(
    bench: run.Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound holds within an item; a later run measures it whole."""
    ticks: list[None] = []
    with monkeypatch.context() as patched:
        patched.setattr(run, "time", clock := Ticking())
        found = run.measure(bench, TODO[:1], 2, tmp_path, {"length": 160}, until=9.0, tick=lambda: ticks.append(None))
    assert (found, ticks) == ([], []) and 9 <= clock.seconds < 12, "the item was begun, and ended at once when time was up"
    assert not bench.lab.model._forward_pre_hooks
    whole = run.measure(bench, TODO[:1], 1, tmp_path, {"length": 160})
    assert {row["policy"] for row in whole} == {*bench.policies.classes}


def test_what_a_line_lacks_is_measured(bench: run.Bench, tmp_path: Path) -> None:
    """A line of before its task measured as much counts as none."""
    first = run.measure(bench, TODO[1:2], 1, tmp_path, {"length": 160})
    lines = tmp_path / "measurements.jsonl"
    whole = lines.read_text()
    rows = [json.loads(line) for line in whole.splitlines()]
    del rows[1]["values"]["rouge_l"]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    again = run.measure(bench, TODO[1:2], 1, tmp_path, {"length": 160})
    assert len(again) == len(first) == 4
    before, now = ({row["policy"]: row.get("values", {}) for row in found} for found in (first, again))
    assert before.keys() == now.keys() and len([own for own in now.values() if own]) == 3
    for policy, own in now.items():
        assert own == {measure: pytest.approx(values, rel=1e-4) for measure, values in before[policy].items()}


def test_codes_by_depth() -> None:
    """Item by item another depth; a task that hides none has none."""
    asked = [
        {"task": task, "item": item, "policy": "h2o", "budget": 0.5, "values": {"known": [float(item < 5)], "later": [0.0]}}
        for task in ("fact", "facts", "niah_single_1")
        for item in range(7)
    ]
    found = summary.by_depth([*asked, {"task": "fact", "item": 7, "policy": "h2o", "budget": 0.5, "refused": "why"}])
    known = {row["depth"]: (row["mean"], row["texts"]) for row in found if row["measure"] == "known"}
    assert known == {0.1: (0.5, 4), 0.3: (0.5, 4), 0.5: (1.0, 2), 0.7: (1.0, 2), 0.9: (1.0, 2)}
    assert all(row["mean"] == 0 for row in found if row["measure"] == "later")


def finished(kind: Any, bench: run.Bench, task: str, pairs: list[run.Pair]) -> list[kinds.Outcome]:
    item = kind.prepare(bench.lab, task, 0)
    make = partial(bench.policies.make, model=bench.lab.model)
    started = [kind.start(bench.lab, item, partial(make, name, budget=budget)) for name, budget in pairs]
    return cast("list[kinds.Outcome]", kind.finish(bench.lab, item, started))


def test_the_full_cache_is_not_behind_itself(bench: run.Bench) -> None:
    found = finished(kinds.Nearness(new_tokens=6), bench, "nearness", [("full", None), ("h2o", 200), ("h2o", 0.1)])
    assert [one.values["kl"][0] < 1e-6 and one.values["same_prefix"] == [6] for one in found] == [True, True, False]
    assert [one.values["rouge_l"][0] for one in found[:2]] == [1, 1] and 0 <= found[2].values["rouge_l"][0] < 1


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_the_second_cache_is_as_if_it_had_read_the_prompt(bench: run.Bench, policy: str, backend: str) -> None:
    kind, lab = kinds.Nearness(), bench.lab
    item, make = kind.prepare(lab, "nearness", 0), kvdsl.load(policy)
    pair, alone = (
        kind.start(lab, item, lambda: make(lab.model, budget=0.5, backend=backend)),
        make(lab.model, budget=0.5, backend=backend),
    )
    read(lab.model, alone, item)
    wanted = feed(lab.model, [alone], item.ids[:, :1])
    for cache in pair:
        assert torch.equal(feed(lab.model, [cache], item.ids[:, :1]), wanted)
        assert all(torch.equal(cache.positions(layer), alone.positions(layer)) for layer in cache.managed)


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


def test_in_a_chat_every_reply_of_the_full_cache_is_compared(bench: run.Bench) -> None:
    kind = chat.Chat(passage=24, reply=5)
    pairs: list[run.Pair] = [("full", None), ("h2o", 400), ("h2o", 16)]
    said = kind.prepare(bench.lab, "chat", 0)
    assert 160 <= sum(turn.shape[1] + 5 for turn in said) < 160 + 80
    full, whole, small = finished(kind, bench, "chat", pairs)
    assert max(full.values["kl"] + whole.values["kl"]) < 1e-6
    assert small.usage.most_held == 16
    # By hand: the full cache's reply, which the other is fed.
    caches = [bench.policies.make(name, bench.lab.model, budget) for name, budget in (("full", None), ("h2o", 16))]
    for turn, kl in zip(said, small.values["kl"], strict=True):
        own, other = (feed(bench.lab.model, [cache], turn).log_softmax(-1)[0] for cache in caches)
        found = []
        for _ in range(5):
            found.append(float((own.exp() * (own - other)).sum()))
            token = own.argmax().view(1, 1)
            own, other = (feed(bench.lab.model, [cache], token).log_softmax(-1)[0] for cache in caches)
        assert kl == pytest.approx(np.mean(found), rel=1e-3, abs=1e-6)


def test_a_turn_is_the_template_around_it(tokenizer: Any) -> None:
    class Talking:
        chat_template = "there is one"

        def apply_chat_template(self, said: Any, **_: Any) -> str:
            return "".join(f"<{one['role']}>{one['content']}</>" for one in said) + "<assistant>"

    roles = ("user", "assistant", "user")
    assert template(Talking(), *roles) == ["<user>", "</><assistant>", "</><user>", "</><assistant>"]
    assert template(tokenizer, *roles) == ["", "\n", "\n\n", "\n"]


def test_at_the_same_bytes_state_costs_tokens(bench: run.Bench) -> None:
    config = bench.lab.model.config
    slot = 2 * 4 * config.hidden_size // config.num_attention_heads + 4
    assert bench.given("h2o", 48) == 48
    bench.plan = replace(bench.plan, same_bytes=True, policies=(*bench.plan.policies, "streaming_llm"))
    assert bench.given("full", None) is None
    assert bench.given("h2o", 48) == int(48 * slot / (slot + 4))
    assert bench.given("h2o", 0.5) == pytest.approx(0.5 * slot / (slot + 4))
    assert bench.given("streaming_llm", 48) == int(48 * slot / (slot + 4))  # its rank


def test_a_copy_of_a_key_is_state(bench: run.Bench) -> None:
    """What keeps a rotated half of every key, and its rank, gets as much less of the budget."""
    bench.plan = replace(bench.plan, same_bytes=True, policies=("equip_streaming",), memory=(("rope", "cached"),))
    config = bench.lab.model.config
    key = 4 * config.hidden_size // config.num_attention_heads
    assert bench.given("equip_streaming", 100) == 100 * (2 * key + 4) // (3 * key + 8)


# -- what is said ------------------------------------------------------------------------------------------------------


def rows(scores: dict[str, list[float]], measure: str = "known", task: str = "fact") -> list[run.Row]:
    return [
        {"task": task, "item": item, "policy": policy, "budget": None if policy == "full" else 0.25,
         "values": {measure: [score]}, "bytes": 20, "bytes_in_use": 10, "token_ms": 1.0, "note": None}
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
    measured = rows({"full": base.tolist(), "worse": (base + 0.2).tolist(), "near": (base + 0.1).tolist()}, "kl", "chat")
    found = summary.table(summary.column(measured, "chat", ["chat"], "kl"), measured)
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


def test_parts_of_a_text_are_no_texts() -> None:
    """Two stretches in which a policy is worse in all of 26 parts are two observations, which tell nothing from chance."""
    base = np.linspace(2, 3, 26).tolist()
    measured = [
        {**row, "values": {"kl": [value + (row["policy"] == "worse") for value in base]}}
        for row in rows({"full": [0, 0], "worse": [0, 0], "near": [0, 0]}, "kl", "chat")
    ]
    column = summary.column(measured, "chat", ["chat"], "kl")
    assert {len(texts) for own in column.scores.values() for texts in own} == {2}
    assert places(summary.table(column, measured)) == {"near": 1, "worse": 1}


def test_a_line_of_a_book_has_several_texts() -> None:
    parts = [1.0, 3.0, 2.0, 2.0, 5.0, 7.0, 0.0, 0.0]  # of an item's four stretches two each
    measured = [{**row, "values": {"loss": parts}} for row in rows({"full": [0.0]}, "loss", "books")]
    (found,) = summary.column(measured, "books", ["books"], "loss").scores["full", None]
    assert found.tolist() == [2, 2, 6, 0]


def test_a_task_that_not_all_were_asked_is_left_out() -> None:
    measured = rows({"full": [1.0] * 8, "one": [0.5] * 8}, task="fact") + rows({"full": [1.0] * 8}, task="vt")
    column = summary.column(measured, "questions: known", ["fact", "vt"], "known")
    assert [len(texts) for texts in column.scores["one", 0.25]] == [8]
    assert summary.table(column, measured)


def test_tasks_that_the_full_cache_fails_tell_nothing() -> None:
    measured = rows({"full": [1.0] * 3}, task="fact") + rows({"full": [0.0] * 3}, task="vt")
    assert summary.telling(measured, ["fact", "vt"], "known") == ["fact"]


def noisy(rng: np.random.Generator, **means: float) -> dict[str, list[float]]:
    """Losses of policies that differ by so much, and by chance, over items that differ by far more."""
    base = rng.normal(3, 1, 60)
    return {"full": base.tolist(), **{name: (base + mean + rng.normal(0, 0.1, 60)).tolist() for name, mean in means.items()}}


def test_a_claim_is_borne_out_where_the_difference_is_real() -> None:
    measured = rows(noisy(np.random.default_rng(0), ours=0.1, worse=0.25, like_it=0.1, ahead=0.0), "kl", "chat")
    found = claim.compare([summary.column(measured, "chat", ["chat"], "kl")], measured, ["ours"])
    told = {one["rival"]: one for one in found}
    assert {rival for rival, one in told.items() if one["sure"]} == {"worse"}
    assert told["worse"]["better"] == pytest.approx([0.15, 0.11, 0.19], abs=0.03)
    assert told["ahead"]["better"][2] < 0 and told["ahead"]["p"] > 0.9
    assert report.claimed(found) == [
        "chat, budget 0.25: `ours` is surely better than 1 of 3; behind like_it, ahead; better than the best of them, `ahead`, by "
        f"{told['ahead']['better'][0]:.3g} ({told['ahead']['better'][1]:.3g} to {told['ahead']['better'][2]:.3g})"
    ]  # fmt: skip


def test_who_holds_more_is_told_apart() -> None:
    """The full cache under another name is no counterexample to a claim about the same bytes; being better than it is no less."""
    measured = rows(noisy(np.random.default_rng(0), ours=0.1, also=0.1, worse=0.3, all_of_it=0.0), "kl", "chat")
    for row in measured:
        row["bytes_in_use"] = {"all_of_it": 410, "worse": 103}.get(row["policy"], 100)
    found = claim.compare([summary.column(measured, "chat", ["chat"], "kl")], measured, ["ours", "also"])
    assert [(one["policy"], one["rival"], one["bytes"], one["sure"]) for one in found] == [
        ("ours", "worse", 1.03, True), ("ours", "all_of_it", 4.1, False), ("also", "worse", 1.03, True), ("also", "all_of_it", 4.1, False)
    ]  # fmt: skip
    ours, also = report.claimed(found)
    assert ours.startswith(
        "chat, budget 0.25: `ours` is surely better than 1 of 1 that hold no more; better than the best of them, `wo"
    )
    assert ours.endswith("; of 1 that hold more all_of_it (4.1 ×) ahead") and "`also` is surely" in also


def test_of_many_comparisons_none_is_sure_by_chance() -> None:
    sure, best = 0, 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        measured = rows(noisy(rng, ours=0, **{f"rival{one}": 0 for one in range(20)}), "kl", "chat")
        column = summary.column(measured, "chat", ["chat"], "kl")
        sure += any(one["sure"] for one in claim.compare([column], measured, ["ours"]))
        signed = summary.Column("", ("chat",), "kl", {pair: [-x for x in own] for pair, own in column.scores.items()})
        flips = summary.signs(signed, seed)
        best += any(
            summary.better(signed, ("ours", 0.25), pair, flips) for pair in column.scores if pair[0].startswith("rival")
        )
    assert sure <= 4 < best  # of 40 a fortieth is one; each comparison by itself deceives far more often


def test_who_was_not_measured_has_no_claim() -> None:
    measured = rows({"full": [1.0] * 8, "one": [1.0] * 8}, "kl", "chat")
    with pytest.raises(KvdslError, match="nothing was measured of `other` beside others"):
        claim.compare([summary.column(measured, "chat", ["chat"], "kl")], measured, ["other"])


def test_the_command_writes_its_tables(tmp_path: Path) -> None:
    given = ["--policies", "streaming_llm", "--tasks", "fact,nearness", "--rates", "0.5", "--length", "160", "--items", "1",
             "--workers", "1", "--no-plots", "--json", "--out", str(tmp_path), "--claim", "window"]  # fmt: skip
    found = CliRunner().invoke(command, given)
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert {row["policy"] for one in result["columns"] for row in one["rows"]} == {"full", "streaming_llm", "window"}
    assert {one["rival"] for one in result["claim"]["comparisons"]} == {"streaming_llm"}
    assert json.loads((tmp_path / "leaderboard.json").read_text()) == result
    page = (tmp_path / "leaderboard.md").read_text()
    assert [row["depth"] for row in result["depths"]] == [0.1] * 6 and "## By depth: later" in page
    assert "nearness: rouge_l" in page
    assert "`streaming_llm` | 0.5" in page and "nearness: kl" in page and "## Is `window` better?" in page


def _die(plan: run.Plan) -> None:
    os._exit(1)


def test_a_process_that_was_killed_is_one_line(bench: run.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_begin", _die)
    with pytest.raises(KvdslError, match="a process that measures has ended, killed or out of memory"):
        list(run.map_units(bench, iter([("fact", 0, [("full", None)], None)]), 2))


def test_a_run_too_short_for_anything_says_what_to_do(
    bench: run.Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdsl.generation.models.check_length", lambda model, tokens: None)  # the fixture's is small
    words = ["--quick", "--minutes", "1e-9", "--length", "128", "--items", "1", "--workers", "1", "--out", str(tmp_path)]
    found = CliRunner().invoke(command, [*words, "--tasks", "books", "--backend", "torch"])
    assert isinstance(found.exception, KvdslError)
    assert "no item finished: give more --minutes" in str(found.exception)


def test_an_unknown_task_is_named() -> None:
    found = CliRunner().invoke(command, ["--tasks", "poetry"])
    assert found.exit_code != 0
    assert isinstance(found.exception, KvdslError)
    assert "there is no task `poetry`; there are books" in str(found.exception)


def test_pieces_of_a_text_do_not_overlap(bench: run.Bench) -> None:
    count = len(bench.lab.ids) // 159
    assert sorted(bench.lab.place("books", number, 159) for number in range(count)) == [159 * at for at in range(count)]
    with pytest.raises(KvdslError, match=f"{count} pieces of 159, and `books` asks for more: give a longer text"):
        bench.lab.place("books", count, 159)
    with pytest.raises(KvdslError, match="fewer --items"):
        kinds.Loss().check(bench.lab, "books", count // 4 + 1)


def test_what_a_cache_may_grow_to_is_not_in_use(bench: run.Bench) -> None:
    """SnapKV has room for what comes behind the prompt; behind it, it holds as many tokens as H2O."""
    snapkv, h2o = finished(kinds.Nearness(new_tokens=3), bench, "nearness", [("snapkv", 40), ("h2o", 40)])
    assert snapkv.bytes > 1.2 * h2o.bytes
    assert 0.9 * h2o.bytes_in_use < snapkv.bytes_in_use <= h2o.bytes_in_use <= h2o.bytes


def test_a_shelf_stands_for_its_policies() -> None:
    """Of the gallery those whom nobody has to give anything."""
    short, gallery = names_of_policies("all"), names_of_policies("gallery")
    assert {"roco", "h2o"} <= {*short} and not {*short} & {*gallery}
    assert "keydiff" in gallery and "kvzap" not in gallery
    assert names_of_policies("found") == [path.stem for path in found_policies()]
    assert names_of_policies("mine.kv") == ["mine.kv"]
