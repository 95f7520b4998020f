"""What a benchmark consists of: tasks, of which each has examples, read from files with a JSON object in every line."""

from __future__ import annotations

import difflib
import hashlib
import json
import statistics
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kvdsl.errors import KvdslError

Row = dict[str, Any]


@dataclass(frozen=True)
class Example:
    """A prompt, and what is known about it.

    Attributes:
        facts: what stands in the file, under its published names, but for the long texts; it is written beside the prediction.
    """

    prompt: str
    facts: Mapping[str, Any]

    def record(self) -> Row:
        """What is written beside the prediction: the facts, and a digest of the prompt that was answered."""
        return {**self.facts, "prompt_sha256": hashlib.sha256(self.prompt.encode()).hexdigest()[:16]}


@dataclass(frozen=True)
class Task:
    """Examples that are asked and scored alike.

    Attributes:
        score: what a prediction earns at an example, 0..1.
        new_tokens: how many tokens a prediction may have.
        chat: whether the prompt is put into the model's chat template, where it has one.
        one_line: whether a prediction ends with its line.
        length: the class of lengths that an example belongs to, where a benchmark tells these apart.
    """

    name: str
    metric: str
    score: Callable[[str, Example], float]
    new_tokens: int
    examples: Sequence[Example]
    chat: bool = False
    one_line: bool = False
    length: Callable[[Example], str] | None = None

    def by_length(self, scores: Sequence[float]) -> dict[str, float]:
        """Mean scores in percent, by class of lengths."""
        assert self.length is not None
        found: dict[str, list[float]] = {}
        for one, example in sorted(zip(scores, self.examples, strict=True), key=lambda pair: pair[1].facts["length"]):
            found.setdefault(self.length(example), []).append(one)
        return {name: percent(those) for name, those in found.items()}


def percent(scores: Sequence[float]) -> float:
    """The mean of scores in 0..1, in percent with two digits."""
    return round(100 * statistics.fmean(scores), 2)


def read_lines(path: Path, keys: Collection[str], limit: int | None) -> Iterator[Row]:
    """The objects of a JSONL file, the first `limit` of them.

    Raises:
        KvdslError: if a line is no JSON object in UTF-8, or one of the keys is missing.
    """
    with path.open("rb") as file:
        for number, line in enumerate(islice(file, limit), 1):
            where = f"{path}, line {number}"
            try:
                found = json.loads(line)
            except ValueError as error:
                raise KvdslError(f"{where} is no JSON: {error}") from error
            if not isinstance(found, dict):
                raise KvdslError(f"{where} is no JSON object")
            missing = [key for key in keys if key not in found]
            if missing:
                raise KvdslError(f"{where} has no `{missing[0]}`; the published format has {', '.join(keys)}")
            yield found


def check_answers(answers: Any, path: Path, number: int) -> tuple[str, ...]:
    """The right answers of an example.

    Raises:
        KvdslError: if they are no list of texts, or an empty one.
    """
    if not isinstance(answers, list) or not answers or not all(isinstance(one, str) for one in answers):
        raise KvdslError(f"{path}, line {number}: the answers should be a list of texts, at least one")
    return tuple(answers)


def choose(there: Mapping[str, Path], wanted: Sequence[str] | None, folder: Path, what: str) -> dict[str, Path]:
    """The files of the tasks that are asked for, in that order; all that are there if none is named.

    Args:
        what: the files that the benchmark consists of, in words.

    Raises:
        KvdslError: if there are none, or one that is asked for is not there.
    """
    if not there:
        raise KvdslError(f"{folder} holds none of {what}")
    for name in wanted or ():
        if name not in there:
            near = difflib.get_close_matches(name, there, 1)
            hint = f"did you mean `{near[0]}`?" if near else f"there are {', '.join(there)}"
            raise KvdslError(f"{folder} has no task `{name}`; {hint}")
    return {name: there[name] for name in wanted or there}
