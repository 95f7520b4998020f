"""The tasks by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvdsl.errors import KvdslError
from kvdsl_lab.leaderboard import ruler
from kvdsl_lab.leaderboard.chat import Chat
from kvdsl_lab.leaderboard.facts import fact
from kvdsl_lab.leaderboard.kinds import Kind, Loss, Nearness, Questions
from kvdsl_lab.leaderboard.questions import Question
from kvdsl_lab.leaderboard.reasoning import Reasoning
from kvdsl_lab.leaderboard.ruler import Material


@dataclass(frozen=True)
class Task:
    """A row of the catalogue.

    Attributes:
        title: what is measured, in a few words.
        while_decoding: whether budgets are tokens that hold while a text is decoded, or rates of a prompt.
    """

    name: str
    title: str
    kind: Kind
    while_decoding: bool = False


def _whatever_the_item(make: Callable[[Material], Question]) -> Callable[[Material, int], Question]:
    """A maker of questions that does not care for the item's number."""
    return lambda material, number: make(material)


TASKS = {
    task.name: task
    for task in (
        Task("books", "a book's tokens, fed one by one", Loss(), while_decoding=True),
        Task("nearness", "the full cache's distribution and text", Nearness()),
        Task("chat", "replies in a conversation about a book, under a budget of tokens", Chat(), while_decoding=True),
        Task("fact", "a code hidden in a book", Questions(partial(fact, among=1))),
        Task("facts", "one of eight codes hidden in a book", Questions(partial(fact, among=8))),
        *(Task(name, f"RULER's {name}", Questions(_whatever_the_item(make))) for name, make in ruler.TASKS.items()),
        Task("gsm8k", "problems of arithmetic, answered step by step", Reasoning(), while_decoding=True),
        Task("math500", "problems of mathematics, answered step by step", Reasoning(), while_decoding=True),
    )
}


def chosen(names: Sequence[str] | None) -> list[Task]:
    """The tasks of these names, in the catalogue's order; if none is named, all that need no file.

    Raises:
        KvdslError: if there is no such task.
    """
    for name in names or ():
        if name not in TASKS:
            raise KvdslError(f"there is no task `{name}`; there are {', '.join(TASKS)}")
    if names is None:
        return [task for task in TASKS.values() if not isinstance(task.kind, Reasoning)]
    return [task for name, task in TASKS.items() if name in names]
