"""Problems that a model answers step by step: how answers are read, and what the leaderboard makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvdsl.errors import KvdslError
from kvdsl_lab.leaderboard.answers import right, written
from kvdsl_lab.leaderboard.kinds import Lab
from kvdsl_lab.leaderboard.problems import Asking, Problem, read_problems
from kvdsl_lab.leaderboard.reasoning import Reasoning
from tests.cli.harness import run

# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("So 16 - 7 = 9, and 9 * 2 = 18. The answer is \\boxed{18}.", "18"),
        ("First \\boxed{3}, no: \\boxed{\\frac{1}{2}} it is", "\\frac{1}{2}"),
        ("a box in \\boxed{\\text{a \\textbf{box}}}", "\\text{a \\textbf{box}}"),
        ("\\boxed{12}, and then \\boxed{cut off", "12"),
        ("9 * 2 = 18\n#### 18", "18"),
        ("The final answer is: $1,234.50 for 3 people.", "1,234.50"),
        ("Answer: 3/4 of it, out of 8", "3/4"),
        ("We have 5 apples and -7 pears.", "-7"),
        ("It is 18. ", "18"),
        ("I do not know", None),
        ("", None),
    ],
)
def test_the_answer_that_is_read(text: str, answer: str | None) -> None:
    assert written(text) == answer


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ("18", "18"), ("18.0", "18"), ("$18", "18"), ("18 dollars", "18"), ("1,234", "1234"), ("1{,}234", "1234"),
        ("18.", "18"), ("25\\%", "25"),
        ("\\frac{1}{2}", "0.5"), ("\\dfrac12", "\\frac{1}{2}"), ("3/4", "\\frac{3}{4}"), ("-\\frac{2}{4}", "-\\frac12"),
        (".5", "0.5"), ("x = 5", "5"), ("90^\\circ", "90"), ("\\left( 3, \\frac{\\pi}{2} \\right)", "\\left(3,\\frac{\\pi}{2}\\right)"),
        ("\\text{Evelyn}", "Evelyn"), ("\\sqrt2", "\\sqrt{2}"), ("6 \\text{ cm}^2", "6"), ("$p - q$", "p-q"),
    ],
)  # fmt: skip
def test_spellings_of_one_answer(found: str, wanted: str) -> None:
    assert right(found, wanted) and right(wanted, found)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        ("18", "19"), ("1.8", "18"), ("-18", "18"), ("\\frac{1}{2}", "\\frac{1}{3}"), ("1/0", "0"), ("(3, 4)", "(4, 3)"), ("3,4", "34"),
        ("x", "y"), ("2x", "2"), ("\\sqrt{2}", "2"), ("", "0"), ("1e3", "1"),
    ],
)  # fmt: skip
def test_answers_that_differ(found: str, wanted: str) -> None:
    assert not right(found, wanted) and not right(wanted, found)


def test_nothing_is_not_right() -> None:
    assert not right(None, "0")


# -- files -------------------------------------------------------------------------------------------------------------

GSM8K = [{"question": f"What is {n} + 2?", "answer": f"{n} + 2 = <<{n}+2={n + 2}>>{n + 2}\n#### {n + 2}"} for n in range(8)]


def data_file(folder: Path, rows: list[dict[str, str]]) -> Path:
    file = folder / "data.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_files_say_themselves_which_task_they_are_of(tmp_path: Path) -> None:
    rows = [GSM8K[3], {"problem": "Half of 1?", "solution": "It is.", "answer": "\\frac12"}]
    assert read_problems([data_file(tmp_path, rows)]) == {
        "gsm8k": (Problem("What is 3 + 2?", "5"),), "math500": (Problem("Half of 1?", "\\frac12"),),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", r"data.jsonl:1 is not JSON \(.*\): each line"),
        ('{"q": "?"}', "data.jsonl:1 has neither `question` and `answer` .GSM8K. nor `problem` and `answer`"),
        ("[1]", "data.jsonl:1 has neither"),
        ('{"question": "?", "answer": "none"}', "data.jsonl:1 has no number behind `####`"),
    ],
)
def test_other_files_are_refused_with_the_line(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(text)
    with pytest.raises(KvdslError, match=why):
        read_problems([file])


# -- answering ---------------------------------------------------------------------------------------------------------


def lab(model: Any, tokenizer: Any, **asking: Any) -> Lab:
    problems = {"gsm8k": [Problem(row["question"], str(number + 2)) for number, row in enumerate(GSM8K)]}
    return Lab(model, tokenizer, "", 0, 0, Asking(problems, **asking))


END = 1


class Scripted:
    """Stands for a model whose answers are known."""

    def __init__(self, tokenizer: Any, answers: list[str]) -> None:
        self.device, self.tokenizer, self.answers = torch.device("cpu"), tokenizer, answers
        self.generation_config = type("Config", (), {"eos_token_id": END})()

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, pad_token_id: int, **_: Any) -> torch.Tensor:
        written = [self.tokenizer(text)["input_ids"][:max_new_tokens] for text in self.answers]
        longest = max(map(len, written))
        ended = [row + [END] * (longest - len(row)) for row in written]
        return torch.cat([input_ids, torch.tensor(ended)], 1)


def test_what_counts_as_right_long_and_cut_off(tokenizer: Any) -> None:
    told = [f"\\boxed{{{number + 2}}}" for number in range(8)]
    told[1], told[2] = "\\boxed{99}", "3 and " * 60
    scripted = Scripted(tokenizer, told)
    kind, its = Reasoning(rows=8), lab(scripted, tokenizer, new_tokens=40)
    (found,) = kind.finish(its, kind.prepare(its, "gsm8k", 0), [type("Cache", (), {"layers": [], "managed": ()})()])
    assert found.values["accuracy"] == [1, 0, 0, 1, 1, 1, 1, 1]
    assert found.values["cut_off"] == [0, 0, 1, 0, 0, 0, 0, 0]
    assert found.values["answer_tokens"][2] == 40 and max(found.values["answer_tokens"][:2]) < 40


def test_a_problem_answered_several_times_counts_its_share(tokenizer: Any) -> None:
    told = [f"\\boxed{{{number + 2 + wrong}}}" for number in range(8) for wrong in (0, 1)]
    kind, its = Reasoning(rows=8), lab(Scripted(tokenizer, told), tokenizer, samples=2)
    item = kind.prepare(its, "gsm8k", 0)
    assert len(item.ids) == 16 and item.ids[0].equal(item.ids[1])
    (found,) = kind.finish(its, item, [type("Cache", (), {"layers": [], "managed": ()})()])
    assert found.values["accuracy"] == [0.5] * 8


def test_prompts_are_padded_at_the_left(model: Any, tokenizer: Any) -> None:
    its = lab(model, tokenizer)
    item = Reasoning(rows=8).prepare(its, "gsm8k", 0)
    assert (item.mask[:, -1] == 1).all() and (item.mask.diff(dim=1) >= 0).all()
    assert "What is 7 + 2?" in tokenizer.decode(item.ids[7])


def test_too_few_problems_are_said_at_once(model: Any, tokenizer: Any) -> None:
    its = lab(model, tokenizer)
    with pytest.raises(KvdslError, match="2 items of `gsm8k` are 16 problems, and --data has 8: ask for at most 1 --items"):
        Reasoning(rows=8).check(its, "gsm8k", 2)
    with pytest.raises(KvdslError, match="`math500` asks problems out of a file: give one with --data"):
        Reasoning(rows=8).check(its, "math500", 1)
    with pytest.raises(KvdslError, match="tokens exceed the model's limit of 256"):
        Reasoning(rows=8).check(lab(model, tokenizer, new_tokens=250), "gsm8k", 1)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "leaderboard", "--tasks", "gsm8k", "--data", str(data_file(tmp_path, 4 * GSM8K)), "--policies", "h2o_answer,random_answer",
        "--tokens", "8", "--new-tokens", "16", "--items", "1", "--workers", "1", "--out", str(tmp_path / "out"), "--no-plots", "--json",
    ]  # fmt: skip
    made = run(capsys, *arguments).json()
    (column,) = (one for one in made["columns"] if one["measure"] == "accuracy")
    rows = {row["policy"]: row for row in column["rows"]}
    assert {*rows} == {"full", "h2o_answer", "random_answer"}
    for row in rows.values():
        assert {"accuracy", "low", "high", "answer_tokens", "cut_off"} <= {*row} and row["items"] == 32
        assert 0 < row["answer_tokens"] <= 16
    assert rows["h2o_answer"]["note"] is None and rows["h2o_answer"]["bytes"] < rows["full"]["bytes"]
    assert made["new tokens"] == 16 and made["problems sha256"]
    refused = run(capsys, "leaderboard", "--tasks", "gsm8k", "--items", "1", "--out", str(tmp_path / "none"))
    assert refused.code == 2 and "give one with --data" in refused.err
