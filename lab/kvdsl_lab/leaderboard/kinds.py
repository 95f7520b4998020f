"""What is measured at one item of a task: answers to questions, the loss of a text, nearness to the full cache's text.

All caches of an item are fed abreast: see `kvdsl_lab.eval.abreast`. In half precision a batch of another size rounds otherwise, in the
last bits.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.generation.generate import cache_bytes
from kvdsl.generation.models import encode, first_token
from kvdsl.generation.report import same_prefix
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.eval.abreast import feed
from kvdsl_lab.eval.fidelity import check_installed, rouge_l
from kvdsl_lab.eval.perplexity import losses_of_each, token_losses
from kvdsl_lab.eval.reading import Reading, read
from kvdsl_lab.eval.usage import Usage
from kvdsl_lab.leaderboard import haystacks
from kvdsl_lab.leaderboard.problems import Asking
from kvdsl_lab.leaderboard.questions import Question, lay_out
from kvdsl_lab.leaderboard.ruler import Material

Values = dict[str, list[float]]
"""By measure; several values of one item are of its parts."""


@dataclass(frozen=True)
class Lab:
    """What items are made of and measured with.

    Attributes:
        book: a text.
        length: tokens of an item's text.
        seed: of everything random in the items.
        asking: what a model that reasons is asked.
    """

    model: Any
    tokenizer: Any
    book: str
    length: int
    seed: int
    asking: Asking = field(default_factory=Asking)

    @cached_property
    def ids(self) -> list[int]:
        """The book's tokens."""
        return encode(self.tokenizer, self.book)

    @cached_property
    def sentences(self) -> list[str]:
        """The book's sentences."""
        return haystacks.sentences(self.book)

    def rng(self, task: str, number: int) -> np.random.Generator:
        """Of one item: the same whatever else is measured."""
        return np.random.default_rng([self.seed, number, *hashlib.sha256(task.encode()).digest()[:8]])

    def stretch(self, task: str, number: int, tokens: int) -> Tensor:
        """A piece of the book, with its BOS: int64 [1, tokens]. No two numbers share a token.

        Raises:
            KvdslError: if the book has no more.
        """
        start = first_token(self.tokenizer)
        at = self.place(task, number, tokens - len(start))
        return torch.tensor([start + self.ids[at : at + tokens - len(start)]])

    def place(self, task: str, number: int, tokens: int) -> int:
        """Where a piece of so many tokens begins, which no other number's piece touches.

        Raises:
            KvdslError: if the book has no more.
        """
        there = len(self.ids) // tokens
        if number >= there:
            raise KvdslError(
                f"the text has {len(self.ids)} tokens, {there} pieces of {tokens}, and `{task}` asks for more: give a longer text "
                f"(--text), or fewer --items, or a smaller --length"
            )
        return int(self.rng(task, 0).permutation(there)[number]) * tokens


@dataclass
class Outcome:
    """What one item gave under one cache.

    Attributes:
        values: by measure.
        bytes: what the cache occupied at the end.
        bytes_in_use: of that what it needs for the tokens it held when the policy had evicted, without its room to grow: behind the
            prompt where the budget is of a prompt.
        usage: what the cache held.
        token_ms: takes the median time of a token that is fed to the cache alone, behind all that was measured.
    """

    values: Values
    bytes: int
    bytes_in_use: int
    usage: Usage
    token_ms: Callable[[], float]


MakeCache = Callable[[], Any]


class Kind(Protocol):
    """How a task is measured."""

    @property
    def measures(self) -> Sequence[str]:
        """The names of what `Outcome.values` has."""

    @property
    def rows(self) -> int:
        """Texts of an item: as many equal shares of the values are of one text each, which is what chance draws."""

    def check(self, lab: Lab, task: str, items: int) -> None:
        """Raise KvdslError if there cannot be so many items."""

    def prepare(self, lab: Lab, task: str, number: int) -> Any:
        """What all caches share of an item."""

    def start(self, lab: Lab, item: Any, make_cache: MakeCache) -> Any:
        """One policy's caches, at the item's beginning.

        Raises:
            KvdslError: if the policy cannot be had with the budget.
        """

    def finish(self, lab: Lab, item: Any, started: Sequence[Any]) -> list[Outcome]:
        """What came of all that `start` gave."""


_TIMED = 4
"""Tokens whose time is taken."""


def outcome(
    lab: Lab,
    cache: Any,
    values: Values,
    rows: int = 1,
    in_use: int | None = None,
    token_ms: Callable[[], float] | None = None,
) -> Outcome:
    """What came of it, and what the cache is now; of `rows` alike, a row's share.

    Args:
        in_use: `bytes_in_use` at another time than now.
        token_ms: where it is known without feeding more tokens.
    """
    usage = Usage()
    usage.see(cache)
    used = bytes_in_use(cache) // rows if in_use is None else in_use
    return Outcome(values, cache_bytes(cache) // rows, used, usage, token_ms or partial(_token_ms, lab, cache, rows))


def bytes_in_use(cache: Any) -> int:
    """What a cache needs for the tokens that it holds: its slots' share of what it occupies."""
    states = [cache.layers[index].state for index in cache.managed]
    return sum(int(state.bytes() * float((state.position >= 0).float().mean())) for state in states if state.allocated)


def _token_ms(lab: Lab, cache: Any, rows: int) -> float:
    ms = []
    for _ in range(_TIMED):
        begun = time.perf_counter()
        with torch.inference_mode():
            lab.model(
                input_ids=torch.zeros(rows, 1, dtype=torch.int64, device=lab.model.device),
                **with_cache(cache),
                use_cache=True,
            )
        ms.append((time.perf_counter() - begun) * 1e3)
    return float(np.median(ms)) / rows


def full_cache(model: Any) -> Any:
    """What others are compared with."""
    from kvdsl.loading import load

    make: Any = load("full")
    return make(model)


def divergence(logits: Tensor) -> Tensor:
    """KL divergence of every row's distribution from the first row's, in nats: [rows] of [rows, vocabulary]."""
    found = logits.log_softmax(-1)
    return (found[0].exp() * (found[0] - found)).sum(-1)


def _greedy(model: Any, caches: Sequence[Any], logits: Tensor, count: int, ends: Sequence[int] = ()) -> list[list[int]]:
    """Up to `count` likeliest tokens of every cache, the first from `logits`, [caches, vocabulary]; an end token is not among them."""
    written: list[list[int]] = [[] for _ in caches]
    going = list(range(len(caches)))
    for step in range(count):
        chosen = [
            (index, token) for index, token in zip(going, logits.argmax(-1).tolist(), strict=True) if token not in ends
        ]
        for index, token in chosen:
            written[index].append(token)
        going = [index for index, _ in chosen]
        if not going or step == count - 1:
            break
        logits = feed(model, [caches[index] for index in going], torch.tensor([[token] for _, token in chosen]))
    return written


def followed(
    model: Any, pairs: Sequence[tuple[Any, Any | None]], logits: Tensor, new_tokens: int, ends: Sequence[int] = ()
) -> tuple[list[float], list[int], list[list[int]]]:
    """Compare caches that have read the same prompt with the first of them, which is full.

    The full cache stands in the batch itself, so that rounding is the same for it and for those that are compared with it.

    Args:
        pairs: two equal caches of every contestant: one is fed the full cache's greedy text, the other its own. None in place of the
            other spares its text.
        logits: of the first token behind the prompt, float32 [1, vocabulary].
        ends: tokens that end a text.

    Returns:
        For all but the first, the mean divergence from it behind every token of its greedy text, in nats (the token that the prompt
        itself gives is not counted, since nothing had been evicted before it); the full cache's greedy text; and the others'.
    """
    forced, free = [one for one, _ in pairs], [other for _, other in pairs if other is not None]
    own, *written = _greedy(model, free, logits.expand(len(free), -1), new_tokens, ends)
    divergences = torch.zeros(len(forced))
    for token in own:
        divergences += divergence(feed(model, forced, torch.full((len(forced), 1), token))) / len(own)
    return divergences[1:].tolist(), own, written


# -- questions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Asked:
    question: Question
    text_tokens: int
    reading: Reading


@dataclass(frozen=True)
class Questions:
    """Whether a question about a text is answered: the share of the answers that are written, 0..1.

    `known`: the question stands behind the text in one prompt, and the policy evicts when both have been read. `later`: the policy
    evicts when the text has been read; then the question comes as more prompt (kvpress' setting), and the policy evicts again behind it.
    """

    make: Callable[[Material, int], Question]
    measures = ("known", "later")
    rows = 1

    def question(self, lab: Lab, task: str, number: int) -> Question:
        """What an item asks."""
        return self.make(
            Material(lab.rng(task, number), lab.sentences, lab.length, lambda text: len(encode(lab.tokenizer, text))), number
        )

    def check(self, lab: Lab, task: str, items: int) -> None:
        """Sentences are drawn anew for every item."""

    def prepare(self, lab: Lab, task: str, number: int) -> _Asked:
        """The question, and the model's reading of text and question."""
        question = self.question(lab, task, number)
        text, asked = lay_out(lab.tokenizer, question)
        return _Asked(question, len(text), Reading(lab.model, torch.tensor([text + asked])))

    def start(self, lab: Lab, item: _Asked, make_cache: MakeCache) -> tuple[Any, Any]:
        """The caches of `known` and `later`, which have read what they evict behind."""
        known, later = make_cache(), make_cache()
        read(lab.model, known, item.reading)
        read(lab.model, later, item.reading, item.text_tokens)
        return known, later

    def finish(self, lab: Lab, item: _Asked, started: Sequence[tuple[Any, Any]]) -> list[Outcome]:
        """See the class; bytes and times are those of `known`."""
        known, later = ([pair[which] for pair in started] for which in (0, 1))
        in_use = [bytes_in_use(cache) for cache in known]
        asked = item.reading.ids[:, item.text_tokens :].expand(len(later), -1)
        logits = torch.cat([item.reading.logits.expand(len(known), -1), feed(lab.model, later, asked)])
        written = _greedy(lab.model, known + later, logits, item.question.new_tokens, ends(lab))
        scores = [[item.question.score(lab.tokenizer.decode(tokens))] for tokens in written]
        return [
            outcome(lab, cache, dict(zip(self.measures, own, strict=True)), in_use=used)
            for cache, used, *own in zip(known, in_use, scores[: len(known)], scores[len(known) :], strict=True)
        ]


def ends(lab: Lab) -> list[int]:
    """The tokens that end an answer."""
    own = lab.model.generation_config.eos_token_id
    return [lab.tokenizer.eos_token_id, *([own] if isinstance(own, int) else own or [])]


# -- going on with a text ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """The loss of every token of some stretches, in nats, fed one by one from their beginnings: a mean for every `part` tokens.

    The stretches of an item are rows of a batch, since a forward of a few tokens takes hardly longer than one of a single token. What
    the cache occupies and the time of a token are a row's share.
    """

    part: int = 256
    rows: int = 4
    measures = ("loss",)

    def check(self, lab: Lab, task: str, items: int) -> None:
        lab.stretch(task, items * self.rows - 1, lab.length)

    def prepare(self, lab: Lab, task: str, number: int) -> Tensor:
        """Pieces of the books, int64 [rows, tokens]."""
        return torch.cat([lab.stretch(task, number * self.rows + row, lab.length) for row in range(self.rows)])

    def start(self, lab: Lab, item: Tensor, make_cache: MakeCache) -> Any:
        """An empty cache, if another one took the beginning."""
        token_losses(lab.model, item[:, :2], make_cache(), 1)
        return make_cache()

    def finish(self, lab: Lab, item: Tensor, started: Sequence[Any]) -> list[Outcome]:
        losses = losses_of_each(lab.model, item, started, 1)
        parts = [[float(part.double().mean()) for row in own for part in torch.split(row, self.part)] for own in losses]
        return [outcome(lab, cache, {"loss": own}, len(item)) for cache, own in zip(started, parts, strict=True)]


@dataclass(frozen=True)
class Nearness:
    """How near a cache stays to the full one behind half a stretch as the prompt.

    `kl`: the divergence of its distribution from the full cache's, in nats, while both are fed the full cache's greedy text: the first
    token after the prompt is not counted, since nothing has been evicted yet. `same_prefix`: how many tokens of its own greedy text
    are the full cache's. `rouge_l`: how much of the full cache's text is in its own, word by word.
    """

    new_tokens: int = 48
    measures = ("kl", "same_prefix", "rouge_l")
    rows = 1

    def check(self, lab: Lab, task: str, items: int) -> None:
        check_installed()
        lab.stretch(task, items - 1, lab.length // 2)

    def prepare(self, lab: Lab, task: str, number: int) -> Reading:
        """The prompt."""
        return Reading(lab.model, lab.stretch(task, number, lab.length // 2))

    def start(self, lab: Lab, item: Reading, make_cache: MakeCache) -> tuple[Any, Any]:
        """Two caches that have read the prompt. It is read once, since most of an item's time goes there."""
        forced = make_cache()
        read(lab.model, forced, item)
        return forced, copy.deepcopy(forced)

    def finish(self, lab: Lab, item: Reading, started: Sequence[tuple[Any, Any]]) -> list[Outcome]:
        pairs = [self.start(lab, item, lambda: full_cache(lab.model)), *started]
        in_use = [bytes_in_use(forced) for forced, _ in started]
        divergences, own, written = followed(lab.model, pairs, item.logits, self.new_tokens)
        words = lab.tokenizer.decode(own)
        return [
            outcome(
                lab, cache, {"kl": [float(kl)], "same_prefix": [float(same_prefix(text, own))],
                             "rouge_l": [rouge_l(lab.tokenizer.decode(text), words)]}, in_use=used
            )
            for (cache, _), used, kl, text in zip(started, in_use, divergences, written, strict=True)
        ]  # fmt: skip
