"""Tasks that run on the reference model, for papers that use RULER or LongBench: facts to recall, and the full cache's text."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from kvdsl_lab.reproduce.experiment import Row, Setup

if TYPE_CHECKING:
    from kvdsl_lab.eval.caches import Policies
    from kvdsl_lab.eval.retrieval import Trials

TEXT = "ROUGE-L"
"""The name of the task whose score is how near the greedy text is to the full cache's."""


@lru_cache(1)
def _trials(setup: Setup) -> list[Trials]:
    from kvdsl_lab.eval.retrieval import make_trials

    length, pairs = setup.size((1024, 2), (160, 2))
    return make_trials(setup.tokenizer, setup.text, length, setup.size(5, 1), setup.seed, pairs)


def _policies(setup: Setup, policy: str, settings: tuple[tuple[str, int], ...]) -> Policies:
    from kvdsl_lab.eval.caches import Policies

    return Policies([policy], {name: str(value) for name, value in settings}, setup.backend)


def _budget(settings: tuple[tuple[str, int], ...]) -> list[float]:
    return [value for name, value in settings if name == "budget"]


@lru_cache(None)
def _rows(setup: Setup, policy: str, **settings: int) -> list[Row]:
    from kvdsl_lab.eval.retrieval import retrievals

    given = tuple(settings.items())
    return retrievals(setup.model, _trials(setup), _policies(setup, policy, given), _budget(given))


def recalled(setup: Setup, policy: str, **settings: int) -> dict[str, float]:
    """Share of right answers by task, of a policy with these params. The same again costs nothing.

    After a prompt of 1,024 tokens in one forward, the answer is generated token by token.
    """
    return {row["task"]: row["accuracy"] for row in _rows(setup, policy, **settings)}


def usage(setup: Setup, policy: str, **settings: int) -> Row:
    """What the caches held meanwhile, as `kvdsl_lab.eval.usage.Usage.row` has it; all tasks' prompts are of one length."""
    from kvdsl_lab.eval.usage import KEYS

    row = _rows(setup, policy, **settings)[0]
    return {name: row[name] for name in KEYS}


@lru_cache(None)
def faithful(setup: Setup, policy: str, **settings: int) -> float:
    """ROUGE-L of the greedy text after a stretch of the book, against the full cache's."""
    from kvdsl.generation.models import windows
    from kvdsl_lab.eval.fidelity import fidelities

    given = tuple(settings.items())
    ids = windows(setup.tokenizer, setup.text, setup.size(1024, 96), setup.size(8, 2))
    new_tokens = setup.size(64, 8)
    (row,) = fidelities(setup.model, setup.tokenizer, ids, new_tokens, _policies(setup, policy, given), _budget(given))
    score: float = row["rougeL"]
    return score


def by_depth(setup: Setup, policy: str, **settings: int) -> list[Row]:
    """One row for every task and depth of the asked-for fact: `task, depth, score`."""
    return [
        {"task": row["task"], "depth": depth, "score": score}
        for row in _rows(setup, policy, **settings)
        for depth, score in zip(row["depths"], row["by_depth"], strict=True)
    ]


def by_task(setup: Setup, policy: str, **settings: int) -> list[Row]:
    """One row for every task: `policy, task, accuracy`, and the settings."""
    found = recalled(setup, policy, **settings)
    held = usage(setup, policy, **settings)
    return [{"policy": policy, **settings, "task": task, "accuracy": share, **held} for task, share in found.items()]
