"""Problems with answers, read from files: GSM8K's and MATH-500's, one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvdsl.errors import KvdslError
from kvdsl_lab.leaderboard.answers import written


@dataclass(frozen=True)
class Problem:
    """What is asked, and the right answer."""

    text: str
    answer: str


@dataclass(frozen=True)
class Asking:
    """What is asked of a model that reasons, and how it answers.

    Attributes:
        problems: by task.
        new_tokens: how many tokens an answer may have; a longer one is cut off there.
        samples: answers to each problem, of which the share of right ones counts; 1 is greedy.
        temperature: of the draws where there are several.
    """

    problems: Mapping[str, Sequence[Problem]] = field(default_factory=dict)
    new_tokens: int = 320
    samples: int = 1
    temperature: float = 0.7


def read_problems(paths: Sequence[Path]) -> dict[str, tuple[Problem, ...]]:
    """Return the problems of some files by task: `gsm8k` has `question` and `answer`, `math500` has `problem` and `answer`.

    Raises:
        KvdslError: naming the file and line that is of neither form.
    """
    found: dict[str, list[Problem]] = {}
    for path in paths:
        for number, line in enumerate(_lines(path), start=1):
            if line.strip():
                task, problem = _problem(line, f"{path}:{number}")
                found.setdefault(task, []).append(problem)
    return {task: tuple(problems) for task, problems in found.items()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise KvdslError(f"{path} is not UTF-8 text: give a JSONL file of problems") from error


def _problem(line: str, where: str) -> tuple[str, Problem]:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise KvdslError(f"{where} is not JSON ({error}): each line of a file of problems is one JSON object") from error
    texts: Mapping[str, Any] = row if isinstance(row, dict) else {}
    for task, key in (("gsm8k", "question"), ("math500", "problem")):
        if isinstance(texts.get(key), str) and isinstance(texts.get("answer"), str):
            answer = written(texts["answer"]) if task == "gsm8k" else texts["answer"]
            if answer is None:
                raise KvdslError(f"{where} has no number behind `####` in its answer")
            return task, Problem(texts[key], answer)
    raise KvdslError(f"{where} has neither `question` and `answer` (GSM8K) nor `problem` and `answer` (MATH-500)")
