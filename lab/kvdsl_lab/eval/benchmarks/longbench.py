"""LongBench (Bai et al. 2024) and LongBench-E from local files.

A task is a file `TASK.jsonl`, or `TASK_e.jsonl` of LongBench-E, whose lines have `input`, `context`, `answers`, `length`, `dataset`,
`language`, `all_classes` and `_id`. The prompts are those of LongBench's `config/dataset2prompt.json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kvdsl.errors import KvdslError
from kvdsl_lab.eval.benchmarks import metrics
from kvdsl_lab.eval.benchmarks.tasks import Example, Task, check_answers, choose, read_lines

KEYS = ("input", "context", "answers", "length", "all_classes")
PROMPTS = "dataset2prompt.json"


@dataclass(frozen=True)
class _Kind:
    """How a task is asked and scored (LongBench's `pred.py`, `eval.py` and `config/dataset2maxlen.json`).

    Attributes:
        chat: whether chat models get the prompt in their template; those with examples in the prompt do better without.
        first_line: whether only the first line of a prediction counts.
        one_line: whether a prediction ends with its line.
    """

    metric: str
    new_tokens: int
    chat: bool = True
    first_line: bool = False
    one_line: bool = False


KINDS = {
    "narrativeqa": _Kind("f1", 128), "qasper": _Kind("f1", 128), "multifieldqa_en": _Kind("f1", 64),
    "multifieldqa_zh": _Kind("f1_zh", 64), "hotpotqa": _Kind("f1", 32), "2wikimqa": _Kind("f1", 32),
    "musique": _Kind("f1", 32), "dureader": _Kind("rouge_l_zh", 128), "gov_report": _Kind("rouge_l", 512),
    "qmsum": _Kind("rouge_l", 512), "multi_news": _Kind("rouge_l", 512), "vcsum": _Kind("rouge_l_zh", 512),
    "trec": _Kind("classification", 64, chat=False, first_line=True),
    "triviaqa": _Kind("f1", 32, chat=False, first_line=True),
    "samsum": _Kind("rouge_l", 128, chat=False, first_line=True, one_line=True),
    "lsht": _Kind("classification", 64, chat=False, first_line=True),
    "passage_count": _Kind("count", 32), "passage_retrieval_en": _Kind("retrieval", 32),
    "passage_retrieval_zh": _Kind("retrieval", 32),
    "lcc": _Kind("edit_similarity", 64, chat=False), "repobench-p": _Kind("edit_similarity", 64, chat=False),
}  # fmt: skip
"""By the task's name, in the paper's order."""


def load(
    folder: Path, tasks: Sequence[str] | None = None, limit: int | None = None, prompts: Path | None = None
) -> list[Task]:
    """The tasks that lie in the folder, or in its folder `data`.

    Args:
        tasks: which, in this order; None for all.
        limit: take the first so many examples of each.
        prompts: LongBench's `dataset2prompt.json`; None for the one in the folder, in its `config` or in that beside it.

    Raises:
        KvdslError: if files are missing or not in the published format, or a metric needs a package that is not installed.
    """
    templates = read_prompts(prompts or _find_prompts(folder))
    chosen = choose(_there(folder), tasks, folder, "LongBench's files, for example hotpotqa.jsonl or trec_e.jsonl")
    return [_task(name, path, templates, limit) for name, path in chosen.items()]


def _there(folder: Path) -> dict[str, Path]:
    names = [name + suffix for suffix in ("", "_e") for name in KINDS]
    places = [folder / f"{name}.jsonl" for name in names] + [folder / "data" / f"{name}.jsonl" for name in names]
    return {path.stem: path for path in places if path.is_file()}


def _task(name: str, path: Path, templates: dict[str, str], limit: int | None) -> Task:
    dataset = name.removesuffix("_e")
    kind = KINDS[dataset]
    metrics.check_installed(kind.metric)
    if dataset not in templates:
        raise KvdslError(f"{PROMPTS} has no prompt for {dataset}")
    examples = [
        _example(found, templates[dataset], path, number) for number, found in enumerate(read_lines(path, KEYS, limit), 1)
    ]
    if not examples:
        raise KvdslError(f"{path} is empty")
    return Task(
        name, kind.metric, partial(score, kind), kind.new_tokens, examples, kind.chat, kind.one_line,
        length if name.endswith("_e") else None,
    )  # fmt: skip


def _example(found: dict[str, Any], template: str, path: Path, number: int) -> Example:
    check_answers(found["answers"], path, number)
    try:
        prompt = template.format(**found)
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise KvdslError(f"the prompt for {path.stem} in {PROMPTS} does not fit: {error}") from error
    facts = {key: found[key] for key in ("answers", "all_classes", "length", "_id") if key in found}
    return Example(prompt, facts)


def score(kind: _Kind, found: str, example: Example) -> float:
    """The best that a prediction earns with any of the right answers."""
    text = found.lstrip("\n").split("\n")[0] if kind.first_line else found
    answers, classes = example.facts["answers"], example.facts["all_classes"] or ()
    if kind.metric == "classification":
        return max(metrics.classification(text, one, classes) for one in answers)
    return max(metrics.LONGBENCH[kind.metric](text, one) for one in answers)


def length(example: Example) -> str:
    """LongBench-E's class of an example, by its number of words."""
    words = example.facts["length"]
    return "0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+"


# -- prompts -----------------------------------------------------------------------------------------------------------


def _find_prompts(folder: Path) -> Path:
    for place in (folder, folder / "config", folder.absolute().parent / "config"):
        if (place / PROMPTS).is_file():
            return place / PROMPTS
    raise KvdslError(
        f"there is no {PROMPTS} in {folder}; the prompts lie in `config` of LongBench's repository: copy that file into the folder, or "
        f"say with --prompts where it is"
    )


def read_prompts(path: Path) -> dict[str, str]:
    """The prompts by task, with `{context}` and `{input}` in them.

    Raises:
        KvdslError: if the file holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise KvdslError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise KvdslError(f"{path} should hold one JSON object, with a prompt for every task")
    return found
