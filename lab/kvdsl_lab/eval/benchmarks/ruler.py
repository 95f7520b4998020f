"""RULER (Hsieh et al. 2024) from files that its `prepare.py` made.

A task is a file `TASK/validation.jsonl` (or `TASK.jsonl`) whose lines have `index`, `input`, `outputs` and `length`, and since 2024 an
`answer_prefix`, with which the prompt ends. `index` does not number the lines (the needle tasks write the answer's place there).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kvdsl.errors import KvdslError
from kvdsl_lab.eval.benchmarks import metrics
from kvdsl_lab.eval.benchmarks.tasks import Example, Task, check_answers, choose, read_lines

KEYS = ("input", "outputs")

KINDS: dict[str, tuple[str, int]] = {
    "niah": ("string_match_all", 128), "vt": ("string_match_all", 30), "cwe": ("string_match_all", 120),
    "fwe": ("string_match_all", 50), "qa": ("string_match_part", 32),
}  # fmt: skip
"""The metric and the new tokens by the first word of a task's name: `niah_single_1`, `qa_2`."""

_METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "string_match_all": metrics.string_match_all, "string_match_part": metrics.string_match_part,
}  # fmt: skip


def load(
    folder: Path, tasks: Sequence[str] | None = None, limit: int | None = None, split: str = "validation"
) -> list[Task]:
    """The tasks that lie in the folder.

    Args:
        tasks: which, in this order; None for all.
        limit: take the first so many examples of each.
        split: the files' name.

    Raises:
        KvdslError: if files are missing or not in the published format.
    """
    found = [*folder.glob("*.jsonl"), *folder.glob(f"*/{split}.jsonl")]
    names = {(path.stem if path.parent == folder else path.parent.name): path for path in sorted(found)}
    there = {name: path for name, path in names.items() if _family(name) in KINDS}
    chosen = choose(there, tasks, folder, f"RULER's files, for example niah_single_1/{split}.jsonl")
    return [_task(name, path, limit) for name, path in chosen.items()]


def _family(name: str) -> str:
    return name.split("_")[0]


def _task(name: str, path: Path, limit: int | None) -> Task:
    metric, new_tokens = KINDS[_family(name)]
    measure = _METRICS[metric]
    examples = []
    for number, found in enumerate(read_lines(path, KEYS, limit), 1):
        check_answers(found["outputs"], path, number)
        facts = {key: found[key] for key in ("index", "outputs", "length") if key in found}
        examples.append(Example(found["input"] + found.get("answer_prefix", ""), facts))
    if not examples:
        raise KvdslError(f"{path} is empty")
    return Task(name, metric, lambda text, example: measure(text, example.facts["outputs"]), new_tokens, examples)
