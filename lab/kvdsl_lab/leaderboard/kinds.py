"""What is measured at one item of a task, under one cache: answers to questions, the loss of a text, nearness to the full cache's text."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kvdsl.generation.generate import cache_bytes, same_prefix
from kvdsl.generation.models import encode, first_token
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.eval.perplexity import token_losses
from kvdsl_lab.eval.reading import Reading, read
from kvdsl_lab.eval.usage import Usage
from kvdsl_lab.leaderboard import haystacks
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
    """

    model: Any
    tokenizer: Any
    book: str
    length: int
    seed: int

    def rng(self, task: str, number: int) -> np.random.Generator:
        """Of one item: the same whatever else is measured."""
        return np.random.default_rng([self.seed, number, *hashlib.sha256(task.encode()).digest()[:8]])

    def stretch(self, task: str, number: int, tokens: int) -> Tensor:
        """A piece of the book, with its BOS: int64 [1, tokens]."""
        start = first_token(self.tokenizer)
        ids, body = encode(self.tokenizer, self.book), tokens - len(start)
        at = int(self.rng(task, number).integers(0, len(ids) - body + 1))
        return torch.tensor([start + ids[at : at + body]])


@dataclass
class Outcome:
    """What one item gave under one cache.

    Attributes:
        values: by measure.
        bytes: what the cache occupied at the end.
        token_ms: the median time of a token that was fed alone; None if there was none.
        usage: what the cache held.
    """

    values: Values
    bytes: int
    token_ms: float | None
    usage: Usage


MakeCache = Callable[[], Any]


class Kind(Protocol):
    """How a task is measured."""

    @property
    def measures(self) -> Sequence[str]:
        """The names of what `Outcome.values` has."""

    def prepare(self, lab: Lab, task: str, number: int) -> Any:
        """What all caches share of an item."""

    def measure(self, lab: Lab, item: Any, make_cache: MakeCache) -> Outcome:
        """One cache at the item."""


class _Steps:
    """Feeds tokens one by one and takes their times."""

    def __init__(self, model: Any, cache: Any) -> None:
        self._model, self._cache = model, cache
        self._ms: list[float] = []
        self.usage = Usage()

    def feed(self, token: int) -> Tensor:
        """The logits after one more token, float32 [vocabulary]."""
        begun = time.perf_counter()
        with torch.inference_mode():
            ids = torch.tensor([[token]], device=self._model.device)
            logits = self._model(input_ids=ids, **with_cache(self._cache), use_cache=True).logits
        self._ms.append((time.perf_counter() - begun) * 1e3)
        found: Tensor = logits[0, -1].float()
        return found

    def greedy(self, logits: Tensor, count: int, end: Sequence[int]) -> list[int]:
        """Up to `count` likeliest tokens, the first from these logits; an end token is not among them."""
        found: list[int] = []
        while len(found) < count:
            token = int(logits.argmax())
            if token in end:
                break
            found.append(token)
            if len(found) < count:
                logits = self.feed(token)
        return found

    def outcome(self, values: Values) -> Outcome:
        """What came of it, and what the cache is now."""
        self.usage.see(self._cache)
        median = float(np.median(self._ms)) if self._ms else None
        return Outcome(values, cache_bytes(self._cache), median, self.usage)


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

    def question(self, lab: Lab, task: str, number: int) -> Question:
        """What an item asks."""
        sentences = haystacks.sentences(lab.book)
        return self.make(
            Material(lab.rng(task, number), sentences, lab.length, lambda text: len(encode(lab.tokenizer, text))), number
        )

    def prepare(self, lab: Lab, task: str, number: int) -> _Asked:
        """The question, and the model's reading of text and question."""
        question = self.question(lab, task, number)
        text, asked = lay_out(lab.tokenizer, question)
        return _Asked(question, len(text), Reading(lab.model, torch.tensor([text + asked])))

    def measure(self, lab: Lab, item: _Asked, make_cache: MakeCache) -> Outcome:
        """See the class; bytes and times are those of `known`."""
        known, later = make_cache(), make_cache()
        read(lab.model, known, item.reading)
        outcome = self._answer(lab, item, known, item.reading.logits[0], "known")
        read(lab.model, later, item.reading, item.text_tokens)
        with torch.inference_mode():
            asked = item.reading.ids[:, item.text_tokens :]
            logits = lab.model(input_ids=asked, **with_cache(later), use_cache=True, logits_to_keep=1).logits[0, -1]
        outcome.values.update(self._answer(lab, item, later, logits, "later").values)
        return outcome

    def _answer(self, lab: Lab, item: _Asked, cache: Any, logits: Tensor, measure: str) -> Outcome:
        steps = _Steps(lab.model, cache)
        written = lab.tokenizer.decode(steps.greedy(logits, item.question.new_tokens, _ends(lab)))
        return steps.outcome({measure: [item.question.score(written)]})


def _ends(lab: Lab) -> list[int]:
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

    def prepare(self, lab: Lab, task: str, number: int) -> Tensor:
        """Pieces of the books, int64 [rows, tokens]."""
        return torch.cat([lab.stretch(task, number * self.rows + row, lab.length) for row in range(self.rows)])

    def measure(self, lab: Lab, item: Tensor, make_cache: MakeCache) -> Outcome:
        """See the class."""
        cache, times = make_cache(), [time.perf_counter()]
        losses = token_losses(lab.model, item, cache, 1, lambda: times.append(time.perf_counter()))
        usage = Usage()
        usage.see(cache)
        values = [float(part.double().mean()) for row in losses for part in torch.split(row, self.part)]
        token_ms = float(np.median(np.diff(times)[1:])) * 1e3 / len(losses)
        return Outcome({"loss": values}, cache_bytes(cache) // len(losses), token_ms, usage)


@dataclass(frozen=True)
class _Continued:
    reading: Reading
    tokens: list[int]
    logits: Tensor


@dataclass(frozen=True)
class Nearness:
    """How near a cache stays to the full one behind half a stretch as the prompt.

    `kl`: the divergence of its distribution from the full cache's, in nats, while both are fed the full cache's greedy text: the first
    token after the prompt is not counted, since nothing has been evicted yet. `same_prefix`: how many tokens of its own greedy text
    are the full cache's.
    """

    new_tokens: int = 48
    measures = ("kl", "same_prefix")

    def prepare(self, lab: Lab, task: str, number: int) -> _Continued:
        """The prompt, and what the full cache writes."""
        from kvdsl.loading import load

        full: Any = load("full")
        reading = Reading(lab.model, lab.stretch(task, number, lab.length // 2))
        cache = full(lab.model)
        read(lab.model, cache, reading)
        steps = _Steps(lab.model, cache)
        token, tokens, logits = int(reading.logits[0].argmax()), [], []
        for _ in range(self.new_tokens):
            tokens.append(token)
            logits.append(steps.feed(token))
            token = int(logits[-1].argmax())
        return _Continued(reading, tokens, torch.stack(logits))

    def measure(self, lab: Lab, item: _Continued, make_cache: MakeCache) -> Outcome:
        """See the class."""
        forced, free = make_cache(), make_cache()
        read(lab.model, forced, item.reading)
        steps = _Steps(lab.model, forced)
        found = torch.stack([steps.feed(token) for token in item.tokens])
        wanted = item.logits.log_softmax(-1)
        divergence = (wanted.exp() * (wanted - found.log_softmax(-1))).sum(-1).mean()
        read(lab.model, free, item.reading)
        written = _Steps(lab.model, free).greedy(item.reading.logits[0], self.new_tokens, ())
        return steps.outcome({"kl": [float(divergence)], "same_prefix": [float(same_prefix(written, item.tokens))]})
