"""A conversation about a book: how near a cache stays to the full one while turns come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvdsl.generation.models import encode
from kvdsl_lab.eval.abreast import feed
from kvdsl_lab.leaderboard.kinds import Lab, MakeCache, Outcome, Values, divergence, ends, full_cache, outcome
from kvdsl_lab.leaderboard.questions import begun, template

REQUESTS = (
    "What happens in this passage?", "Who is in it, and what do they want?", "Say that in one sentence.", "How does it sound?",
    "What may come next?", "Which word matters most, and why?",
)  # fmt: skip


@dataclass(frozen=True)
class Chat:
    """Two read a book together: the user sends a passage of it and asks about it, the model replies, then comes the next passage.

    The replies are the full cache's greedy ones, which every cache is fed. `kl`: how far a cache's distribution is from the full
    cache's over a reply's tokens, in nats; a value for every turn.

    Attributes:
        passage: tokens of the book in a turn.
        reply: tokens of a reply, at most.
    """

    passage: int = 96
    reply: int = 32
    measures = ("kl",)
    rows = 1

    def check(self, lab: Lab, task: str, items: int) -> None:
        lab.place(task, items - 1, lab.length)

    def prepare(self, lab: Lab, task: str, number: int) -> list[Tensor]:
        """What the user says in every turn, up to where the model goes on: int64 [1, tokens] each, so many that the text has its length."""
        rng = lab.rng(task, number)
        requests = rng.permutation(REQUESTS)
        opening, _, between, closing = template(lab.tokenizer, "user", "assistant", "user")
        at, turns, told = lab.place(task, number, lab.length), list[Tensor](), 0
        while told < lab.length:
            passage = lab.tokenizer.decode(lab.ids[at : at + self.passage])
            at += self.passage
            said = f"{passage}\n\n{requests[len(turns) % len(requests)]}{closing}"
            ids = encode(lab.tokenizer, between + said) if turns else begun(lab.tokenizer, opening + said)
            turns.append(torch.tensor([ids]))
            told += turns[-1].shape[1] + self.reply
        return turns

    def start(self, lab: Lab, item: Sequence[Tensor], make_cache: MakeCache) -> Any:
        """An empty cache, if another one took the beginning."""
        feed(lab.model, [make_cache()], item[0][:, :2])
        return make_cache()

    def finish(self, lab: Lab, item: Sequence[Tensor], started: Sequence[Any]) -> list[Outcome]:
        caches = [full_cache(lab.model), *started]
        turns = torch.stack([self._turn(lab, caches, said) for said in item])
        found: list[Values] = [{"kl": turns[:, index].tolist()} for index in range(1, len(caches))]
        return [outcome(lab, cache, values) for cache, values in zip(started, found, strict=True)]

    def _turn(self, lab: Lab, caches: Sequence[Any], said: Tensor) -> Tensor:
        """Feed a turn and its reply to all: the mean divergence of each from the first, [caches]."""
        logits, found, end = feed(lab.model, caches, said.expand(len(caches), -1)), [], ends(lab)
        for _ in range(self.reply):
            found.append(divergence(logits))
            token = int(logits[0].argmax())
            if token in end:
                break
            logits = feed(lab.model, caches, torch.full((len(caches), 1), token))
        return torch.stack(found).mean(0)
