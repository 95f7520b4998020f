"""Read prompts and their answers from files, and tell whether an answer is right. Nothing here needs torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdsl.errors import KvdslError
from kvdsl_lab.leaderboard.answers import right, written

_ASKED = ("prompt", "question", "problem")
"""The keys of a JSON line under one of which its prompt stands."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as its user sends it; the right answer and a word for its kind, where they are known."""

    text: str
    answer: str | None = None
    kind: str | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """Read a file of prompts: a JSON object or a plain text a line.

    An object has `prompt` (`question` and `problem` are taken as well), and may have `answer` and `kind`.

    Raises:
        KvdslError: naming the line that is neither.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise KvdslError(f"{path} is not UTF-8 text: give a file with a prompt a line") from error
    found = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise KvdslError(f"{path} has no prompts: give a prompt a line, or JSON objects with `prompt`")
    return found


def _prompt(line: str, where: str) -> Prompt:
    if not line.lstrip().startswith("{"):
        return Prompt(line)
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise KvdslError(f"{where} begins with a brace and is not JSON ({error})") from error
    text = next((row[key] for key in _ASKED if isinstance(row.get(key), str) and row[key].strip()), None)
    if text is None:
        raise KvdslError(f"{where} has no text under `prompt`")
    other = {name: None if row.get(name) is None else str(row[name]) for name in ("answer", "kind")}
    return Prompt(text, **other)


def with_answers(prompts: Sequence[Prompt], path: Path) -> list[Prompt]:
    """Return the prompts with the answers of another file: an answer, or an object with `answer`, a line.

    Raises:
        KvdslError: if there are not as many answers as prompts.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if len(lines) != len(prompts):
        raise KvdslError(f"{path} has {len(lines)} answers for {len(prompts)} prompts: give one a line, in their order")
    answers = [json.loads(line)["answer"] if line.lstrip().startswith("{") else line.strip() for line in lines]
    return [Prompt(one.text, str(answer), one.kind) for one, answer in zip(prompts, answers, strict=True)]


def is_right(text: str, answer: str) -> bool:
    """Whether a text gives an answer: as its last number or box, or word for word if the answer is no number."""
    wanted = written(answer) if "####" in answer else answer
    if wanted is None:
        return False
    is_words = not any(map(str.isdigit, wanted))
    return right(written(text), wanted) or (is_words and wanted.strip().lower() in text.lower())
