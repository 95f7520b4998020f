"""A text and a question about it, as tokens of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvdsl.generation.models import encode, first_token
from kvdsl_lab.eval.benchmarks.metrics import string_match_all


@dataclass(frozen=True)
class Question:
    """A text, what is asked of it, and what should come.

    Attributes:
        text: what is read before the question is known, an instruction and the text proper.
        question: what is asked.
        opening: how the answer begins; the model goes on from there.
        answers: what a right answer contains.
        new_tokens: how many tokens an answer may have.
        depth: where the asked-for fact stands, 0 (first) to 1 (last); None where it has no one place.
        fact: the sentence that says it, likewise.
    """

    text: str
    question: str
    opening: str
    answers: Sequence[str]
    new_tokens: int
    depth: float | None = None
    fact: str | None = None

    def score(self, written: str) -> float:
        """The share of the answers that were written, 0..1 (RULER's `string_match_all`)."""
        return string_match_all(written, self.answers)


def lay_out(tokenizer: Any, question: Question) -> tuple[list[int], list[int]]:
    """The tokens of the text, and those of the question, up to where the answer goes on.

    Both parts are made into tokens by themselves: the text's are the same whether the question stands behind it or comes later.
    """
    before, after = template(tokenizer, "user")
    asked = f"\n\n{question.question}{after}{question.opening}"
    return begun(tokenizer, before + question.text), encode(tokenizer, asked)


def template(tokenizer: Any, *roles: str) -> list[str]:
    """What stands around the messages of a chat, before the first, between two, and behind the last, where the model goes on."""
    if tokenizer.chat_template is None:
        return ["", *("\n" if role == "user" else "\n\n" for role in roles)]
    mark = "\x00"
    chat = [{"role": role, "content": mark} for role in roles]
    parts: list[str] = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False).split(mark)
    return parts


def begun(tokenizer: Any, text: str) -> list[int]:
    """The tokens of the beginning of a chat; a template has its own first token in it."""
    return ([] if tokenizer.chat_template is not None else first_token(tokenizer)) + encode(tokenizer, text)
