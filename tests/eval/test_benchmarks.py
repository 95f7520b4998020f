"""LongBench and RULER: metrics worked out by hand, files in the published formats, prompts, and runs that go on."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from kvdsl.errors import KvdslError
from kvdsl_lab.assets import reference_weights, weights_of
from kvdsl_lab.cli.eval import command as evaluate
from kvdsl_lab.eval.benchmarks import longbench, metrics, ruler, run
from kvdsl_lab.eval.benchmarks.tasks import Example, Task
from kvdsl_lab.eval.caches import Policies

# -- metrics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "wanted", "score"),
    [
        ("The cat sat.", "a cat sat", 1),  # case, punctuation and articles do not count
        ("the black cat", "cat", 2 * (1 / 2) * 1 / (1 / 2 + 1)),  # 1 of 2 words right, 1 of 1 found
        ("to be or to do", "to be to", 2 * (3 / 5) * 1 / (3 / 5 + 1)),  # `to` counts twice
        ("U.S.", "us", 1),  # punctuation leaves nothing in its place
        ("no idea", "42", 0),
        ("", "", 0),
    ],
)
def test_token_f1(found: str, wanted: str, score: float) -> None:
    assert metrics.token_f1(found, wanted) == pytest.approx(score)


@pytest.mark.parametrize(
    ("found", "wanted", "score"),
    [
        ("the cat sat on the mat", "the cat sat on the mat", 1),
        # `the gunman`, or `police`, but not both in order: 2 words of 4, and of 4
        ("police kill the gunman", "the gunman police killed", 2 / 4),
        ("Police killed", "police killed", 1 / 2),  # case counts
        # a b | c d against c a | b d: `a`, `b`, `c` and `d` by pairs of sentences: 4 of 4
        ("a b. c d.", "c a. b d", 1),
        # of `a a` and `a b`, as long as each other, the package finds the first: 1 distinct word of 2, and of 3
        ("a a b", "a b a c", 2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3)),
        ("", "a", 0), ("...", "a", 0), ("x y", "a", 0),
    ],
)  # fmt: skip
def test_rouge_l(found: str, wanted: str, score: float) -> None:
    assert metrics.rouge_l(found, wanted) == pytest.approx(score, abs=1e-7)


def test_which_of_several_longest_subsequences() -> None:
    assert metrics.longest_common_subsequence(["a", "b", "c"], ["a", "c", "b"]) == ["a", "c"]
    assert metrics.longest_common_subsequence(["a", "c", "b"], ["a", "b", "c"]) == ["a", "b"]
    assert metrics.longest_common_subsequence([], ["a"]) == []


@pytest.mark.parametrize(
    ("found", "score"),
    [
        ("Question: location", 1),
        ("location or date", 1 / 2),
        ("nothing", 0),
    ],
)
def test_classification(found: str, score: float) -> None:
    classes = ["location", "date", "city or town"]
    assert metrics.classification(found, "location", classes) == pytest.approx(score)


def test_classes_that_are_part_of_the_wanted_one() -> None:
    classes = ["city", "state", "city or state", "date"]
    # named: city, state, city or state. `city` goes, and the script then passes over `state`: 1 of 2 that are left
    assert metrics.classification("city or state", "city or state", classes) == pytest.approx(1 / 2)
    assert metrics.classification("city or state", "city or state", ["city", "date", "city or state"]) == 1
    assert metrics.classification("city or state", "date", classes) == 0


def test_numbers() -> None:
    assert metrics.count("There are 7, no 8, no 7", "7") == pytest.approx(2 / 3)
    assert metrics.count("seven", "7") == 0 and metrics.count("17", "7") == 0
    assert metrics.retrieval("Paragraph 12", "Paragraph 12") == 1 and metrics.retrieval("段落3和4", "段落3") == 1 / 2
    with pytest.raises(KvdslError, match="names no paragraph"):
        metrics.retrieval("Paragraph 1", "the first")


@pytest.mark.parametrize(
    ("found", "wanted", "score"),
    [
        ("return a + b\nreturn None", "return a + b", 1),
        ("\n# adds\n// adds\n```\nabcd", "abxd", 0.75),  # 2 · 3 / 8
        ("abc", "abcde", 0.75), ("ab", "abc", 0.8), ("a", "xyzxyz", 0), ("# only", "x", 0), ("", "", 1),
        ("abcdefg", "xbcdefg", 0.86),  # 2 · 6 / 14 = 0.857 in whole percents
    ],
)  # fmt: skip
def test_edit_similarity(found: str, wanted: str, score: float) -> None:
    assert metrics.edit_similarity(found, wanted) == score


def test_string_matches() -> None:
    assert metrics.string_match_all("It is 12 and 34.", ["12", "56", "34", "78"]) == 1 / 2
    assert metrics.string_match_all("PARIS\x00", ["Paris"]) == 1
    assert metrics.string_match_part("in Paris", ["London", "paris"]) == 1 and metrics.string_match_part("", ["x"]) == 0
    assert metrics.string_match_all("one\x07two", ["one\ntwo"]) == 1, "what cannot be printed is a line's end"


def test_chinese_words_are_jiebas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jieba", None)
    for metric in ("f1_zh", "rouge_l_zh"):
        with pytest.raises(KvdslError, match="pip install jieba"):
            metrics.check_installed(metric)
    metrics.check_installed("f1")
    monkeypatch.setitem(sys.modules, "jieba", SimpleNamespace(cut=lambda text, cut_all: text.split("/")))
    # 我, 住, 北京 against 北京: 1 of 3 right, 1 of 1 found; the full stop is no word
    assert metrics.token_f1_chinese("我/住/北京/。", "北京") == pytest.approx(2 * (1 / 3) / (1 / 3 + 1))
    # the segments 我 住 北京 against 我 在 北京: 2 of 3, and of 3
    assert metrics.rouge_l_chinese("我/住/北京", "我/在/北京") == pytest.approx(2 / 3, abs=1e-7)
    # full-width marks and quotes go, but LongBench's list has no opening 《, which stays as a word: 1 of 2, 1 of 1
    assert metrics.token_f1_chinese("“/《/Ａ/》/”/！", "ａ") == pytest.approx(2 * (1 / 2) / (1 / 2 + 1))


# -- files -------------------------------------------------------------------------------------------------------------


def write(path: Path, *lines: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def longbench_line(context: str, question: str, answers: list[str], words: int = 10, classes: Any = None) -> dict[str, Any]:
    return {
        "input": question, "context": context, "answers": answers, "length": words, "dataset": "d", "language": "en",
        "all_classes": classes, "_id": f"id-{question}",
    }  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder as LongBench publishes it: two tasks, and the prompts of its repository."""
    folder = tmp_path / "LongBench"
    classes = ["date", "location"]
    write(folder / "data" / "trec.jsonl", longbench_line("Where? location", "When?", ["date"], classes=classes),
          longbench_line("When? date", "Where?", ["location"], classes=classes))  # fmt: skip
    write(folder / "data" / "hotpotqa_e.jsonl", longbench_line("Ann lives in Rome.", "Where does Ann live?", ["Rome"], 3999),
          longbench_line("Bob lives in Oslo.", "Where does Bob live?", ["in Oslo", "Norway"], 4000),
          longbench_line("Eve.", "Who?", ["Eve"], 9000))  # fmt: skip
    write(folder / "data" / "notes.jsonl", {"of": "something else"})
    write(folder / "config" / "dataset2prompt.json", {"trec": "{context}\nQ: {input}\nA:", "hotpotqa": "{context} {input}"})
    return folder


def test_longbench_is_read_as_it_is_published(data: Path) -> None:
    trec, hotpot = longbench.load(data)
    assert (trec.name, trec.metric, trec.new_tokens, trec.chat) == ("trec", "classification", 64, False)
    assert (hotpot.name, hotpot.metric, hotpot.new_tokens, hotpot.chat) == ("hotpotqa_e", "f1", 32, True)
    assert [one.prompt for one in trec.examples] == ["Where? location\nQ: When?\nA:", "When? date\nQ: Where?\nA:"]
    assert trec.examples[0].facts == {
        "answers": ["date"],
        "all_classes": ["date", "location"],
        "length": 10,
        "_id": "id-When?",
    }
    assert trec.score("\n a date\nor location", trec.examples[0]) == 1, "only the first line counts"
    assert hotpot.score("he is in Oslo", hotpot.examples[1]) == pytest.approx(2 * (2 / 4) / (2 / 4 + 1)), "the best of both"
    assert hotpot.by_length([0.5, 1, 0]) == {"0-4k": 50, "4-8k": 100, "8k+": 0}
    assert [task.name for task in longbench.load(data / "data", ["hotpotqa_e"], limit=2)] == ["hotpotqa_e"]
    assert len(longbench.load(data, ["hotpotqa_e"], limit=2)[0].examples) == 2


def test_every_longbench_task_has_a_metric() -> None:
    assert len(longbench.KINDS) == 21
    assert {kind.metric for kind in longbench.KINDS.values()} == {*metrics.LONGBENCH, "classification"}


def test_ruler_is_read_as_its_script_writes_it(tmp_path: Path) -> None:
    line = {"index": 812, "input": "A needle. What?", "outputs": ["12", "34"], "length": 200, "answer_prefix": " They are"}
    write(tmp_path / "niah_multivalue" / "validation.jsonl", line, {**line, "input": "Another. What?"})
    write(tmp_path / "qa_1.jsonl", {"index": 0, "input": "Q?", "outputs": ["a", "b"], "length": 9})
    write(tmp_path / "other" / "validation.jsonl", {"x": 1})
    niah, qa = ruler.load(tmp_path)
    assert (niah.name, niah.new_tokens, qa.name, qa.new_tokens) == ("niah_multivalue", 128, "qa_1", 32)
    assert [one.prompt for one in niah.examples] == ["A needle. What? They are", "Another. What? They are"]
    assert niah.examples[0].record() != niah.examples[1].record(), "the index does not tell lines apart, the prompt does"
    assert niah.score("12 only", niah.examples[0]) == 1 / 2 and qa.score("b", qa.examples[0]) == 1


def test_files_that_are_not_as_published(data: Path, tmp_path: Path) -> None:
    trec = data / "data" / "trec.jsonl"
    trec.write_bytes(b'{"input": "\xff"}')
    with pytest.raises(KvdslError, match="line 1 is no JSON"):
        longbench.load(data, ["trec"])
    for line, message in (
        ("{", "line 1 is no JSON"), ("[]", "no JSON object"), ('{"input": ""}', "line 1 has no `context`"), ("", "is empty"),
        (json.dumps({**longbench_line("c", "q", []), "answers": "x"}), "should be a list of texts"),
    ):  # fmt: skip
        trec.write_text(line, encoding="utf-8")
        with pytest.raises(KvdslError, match=message):
            longbench.load(data, ["trec"])
    with pytest.raises(KvdslError, match="did you mean `trec`"):
        longbench.load(data, ["trek"])
    with pytest.raises(KvdslError, match=r"holds none of RULER's files"):
        ruler.load(data)
    (data / "config" / "dataset2prompt.json").write_text('{"hotpotqa": "{context} {question}"}')
    with pytest.raises(KvdslError, match=r"hotpotqa_e .* does not fit: 'question'"):
        longbench.load(data, ["hotpotqa_e"])
    (data / "config" / "dataset2prompt.json").unlink()
    with pytest.raises(KvdslError, match="--prompts"):
        longbench.load(data)


# -- prompts -----------------------------------------------------------------------------------------------------------


class Letters:
    """A tokenizer whose tokens are letters, after a `^` that begins every text and is special."""

    chat_template = "<{}>"

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in ("^" if add_special_tokens else "") + text]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, ids)).replace("^", "" if skip_special_tokens else "^")

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool, tokenize: bool) -> str:
        return f"^<<{messages[0]['content']}>>"


def asking(made_for: int | None, max_length: int | None = None, chat: bool = False) -> run.Asking:
    config = SimpleNamespace(max_position_embeddings=made_for)
    return run.Asking(SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config)), Letters(), max_length, chat)


@pytest.mark.parametrize(
    ("asked", "prompt"),
    [
        (asking(None), "^abcdefghij"),
        (asking(15), "^abcdefghij"),
        (asking(None, 6), "^abhij"),  # `^ab` and `hij`
        (asking(None, 5), "^aij"),  # halves of 2
        (asking(10, 100), "^abhij"),  # 6 and 4 new ones
        (asking(None, 6, chat=True), "^<<abhij>>"),  # cut first, as LongBench does, then put into the template
        (asking(12, None, chat=True), "^<<aij>>"),  # of 8 tokens, 5 are the template's
    ],
)
def test_prompts_are_cut_in_the_middle(asked: run.Asking, prompt: str) -> None:
    task = Task("t", "f1", lambda text, example: 0.0, 4, [], chat=True)
    found = asked.ids(task, Example("abcdefghij", {}))
    assert "".join(map(chr, found)) == prompt


def test_a_prompt_that_is_not_to_be_cut_is_refused() -> None:
    """RULER hides its needle somewhere in the middle."""
    task = Task("niah", "f1", lambda text, example: 0.0, 4, [])
    asked = replace(asking(14), cuts=False)
    assert len(asked.ids(task, Example("abcdefghi", {}))) == 10
    with pytest.raises(KvdslError, match="a prompt of niah has 11 tokens, and its answer 4, but the model was made for 14"):
        asked.ids(task, Example("abcdefghij", {}))


def test_weights_are_told_from_others_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"one")
    before = weights_of(str(tmp_path))
    assert weights_of(str(tmp_path)) == before
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert weights_of(str(tmp_path)) != before
    assert weights_of(None) == reference_weights() and weights_of("org/model", "c0ffee") == "c0ffee"


def test_no_room_for_a_prompt() -> None:
    task = Task("t", "f1", lambda text, example: 0.0, 4, [], chat=True)
    with pytest.raises(KvdslError, match="leaves no room"):
        asking(5).ids(task, Example("abcdefghij", {}))


def test_a_prediction_may_end_with_its_line(model: Any, tokenizer: Any) -> None:
    """`samsum`: the text ends with the newline token, but does not begin with it."""
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"][-1]
    with_newline = SimpleNamespace(given=[])
    real = model.generate

    def note(*args: Any, **kwargs: Any) -> Any:
        with_newline.given.append((kwargs.get("eos_token_id"), kwargs.get("min_new_tokens")))
        return real(*args, **kwargs)

    model.generate = note
    for one_line in (True, False):
        task = Task("t", "f1", lambda text, example: 0.0, 3, [], one_line=one_line)
        cache = Policies(["full"], {}, "torch").make("full", model, None)
        assert isinstance(run.Asking(model, tokenizer).answer(task, Example("Once upon", {}), cache), str)
    assert with_newline.given == [([newline], 1), (None, None)]


# -- runs --------------------------------------------------------------------------------------------------------------


def numbered(count: int) -> Task:
    examples = [Example(f"prompt {at}", {"answers": [str(at)]}) for at in range(count)]
    return Task("t", "f1", lambda text, example: float(text in example.facts["answers"]), 4, examples)


def test_a_killed_run_loses_one_example(tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(task: Task, example: Example, cache: Any) -> str:
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(example.prompt)
        return f"line\u2028 of {example.prompt}"

    with pytest.raises(KeyboardInterrupt):
        run.predict(SimpleNamespace(answer=answer), numbered(4), lambda: None, tmp_path)
    with (tmp_path / "t.jsonl").open("a") as file:
        file.write('{"pred": "killed while wri')
    asked.clear()
    ticks: list[None] = []
    later = SimpleNamespace(answer=lambda task, example, cache: asked.append(example.prompt) or "later")
    found = run.predict(later, numbered(4), lambda: None, tmp_path, lambda: ticks.append(None))
    assert asked == ["prompt 2", "prompt 3"] and len(ticks) == 4
    assert found == ["line\u2028 of prompt 0", "line\u2028 of prompt 1", "later", "later"]
    assert run.predict(None, numbered(4), lambda: None, tmp_path) == found, "nothing is asked again"
    assert run.predict(None, numbered(3), lambda: None, tmp_path) == found[:3]


def test_predictions_of_other_examples_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", {"pred": "x", **Example("another", {"answers": ["0"]}).record()})
    with pytest.raises(KvdslError, match="line 1 answers another example"):
        run.earlier(path, numbered(1))
    path.write_text("[]\n")
    with pytest.raises(KvdslError, match="line 1 is no prediction"):
        run.earlier(path, numbered(1))


def test_a_folder_belongs_to_one_run(tmp_path: Path) -> None:
    run.claim(tmp_path / "p", {"model": "a", "chat": True}, fresh=False)
    run.claim(tmp_path / "p", {"model": "a", "chat": True}, fresh=False)
    mine = write(tmp_path / "p" / "t.jsonl", {})
    with pytest.raises(KvdslError, match=r"model was a, now b"):
        run.claim(tmp_path / "p", {"model": "b", "chat": True}, fresh=False)
    others = write(tmp_path / "no_run" / "t.jsonl", {})
    for name in ("p", "no_run"):
        run.claim(tmp_path / name, {"model": "b", "chat": True}, fresh=True)
    assert not mine.exists() and others.exists(), "only a run's own files are forgotten"


# -- commands ----------------------------------------------------------------------------------------------------------


def invoke(*words: str) -> Any:
    return CliRunner().invoke(evaluate, [str(word) for word in words])


def test_longbench_command(data: Path, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    words = ["longbench", "--data", data, "--policies", "full,roco", "--budgets", "8", "--model", tiny,
             "--backend", "torch", "--out", out]  # fmt: skip
    real = run.Asking.answer
    known = iter(["date", "location", "Rome", "the city of Oslo", "?"])
    monkeypatch.setattr(run.Asking, "answer", lambda self, task, example, cache: next(known))
    done = invoke(*words[:4], "full", *words[5:], "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["format_version"] == "1.0" and found["environment"]["dtype"] == "float32" and found["chat"] is False
    assert [(row["task"], row["score"], row["examples"]) for row in found["rows"]] == [
        ("trec", 100, 2),
        ("hotpotqa_e", 46.67, 3),
    ]
    # 1, `city of oslo` against `in oslo`: 2 · (1/3) · (1/2) / (1/3 + 1/2) = 0.4, and 0
    assert found["rows"][1]["by_length"] == {"0-4k": 100, "4-8k": 40, "8k+": 0}
    assert found["averages"] == [{"policy": "full", "budget": None, "tasks": 2, "score": 73.34}]
    assert json.loads((out / "longbench.json").read_text()) == found

    monkeypatch.setattr(run.Asking, "answer", real)
    done = invoke(*words, "--json")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    assert [(row["policy"], row["budget"]) for row in rows] == [("full", None)] * 2 + [("roco", 8)] * 2
    assert rows[:2] == found["rows"], "what was answered is not asked again"
    published = [json.loads(line) for line in (out / "roco-8" / "trec.jsonl").read_text().splitlines()]
    assert [set(one) >= {"pred", "answers", "all_classes", "length"} for one in published] == [True, True]

    done = invoke(*words)
    assert done.exit_code == 0 and "hotpotqa_e" in done.stdout and "73.34" in done.stdout
    done = invoke(*words, "--max-length", "20")
    assert done.exit_code != 0 and "max_length was None, now 20" in str(done.exception)
    done = invoke(*words, "--set", "protect=3")
    assert done.exit_code != 0 and "compiled policy was" in str(done.exception)
    done = invoke(*words, "--chat")
    assert done.exit_code != 0 and "no chat template" in done.output


def test_ruler_command(tiny: str, tmp_path: Path) -> None:
    write(tmp_path / "data" / "vt" / "test.jsonl", {"index": 3, "input": "VAR A = 1", "outputs": [""], "length": 40})
    words = ["ruler", "--data", tmp_path / "data", "--policy", "h2o", "--budgets", "8", "--model", tiny]
    done = invoke(*words, "--backend", "torch", "--out", tmp_path / "out", "--split", "test", "--limit", "1", "--json")
    assert done.exit_code == 0, done.output
    row = json.loads(done.stdout)["rows"][0]
    held = {"evicted": True, "most_held": 8, "note": None}
    assert row == {
        "policy": "h2o",
        "budget": 8,
        "task": "vt",
        "metric": "string_match_all",
        "score": 100.0,
        "examples": 1,
        **held,
    }
    assert json.loads((tmp_path / "out" / "h2o-8" / "vt.jsonl").read_text())["index"] == 3
