"""Which policy loses least on somebody's prompts, at the bytes that a request may take.

Every policy gets the largest budget with which the longest request stays within these bytes. Its loss is how far the distribution of the
next token lies from the full cache's (KL divergence in nats), token by token along the full cache's own answer. A bootstrap over prompts
draws the intervals, and a paired test (signs of the differences flipped at random, one-sided, 2.5 %) says which differences chance does
not explain.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from kvdsl.compiler import analyse, find_policy
from kvdsl.errors import KvdslError
from kvdsl.explain.facts import facts
from kvdsl.runtime.hf.versions import text_config
from kvdsl_lab.eval.caches import Policies
from kvdsl_lab.eval.reading import Reading, read
from kvdsl_lab.leaderboard.kinds import Lab, bytes_in_use, ends, followed, full_cache
from kvdsl_lab.leaderboard.questions import begun, template
from kvdsl_lab.leaderboard.run import Pair
from kvdsl_lab.leaderboard.summary import REFERENCE, Column, better, draws, interval, signs
from kvdsl_lab.recommend.prompts import Prompt, is_right

# -- what fits -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """What a policy can have: its budget and the bytes of the longest request, or why it cannot serve that in the bytes."""

    budget: float | None = None
    bytes: int = 0
    why_not: str | None = None


class Room:
    """What requests of a model take under policies.

    Args:
        prompts: how many tokens each prompt has.
        new_tokens: tokens of an answer.
    """

    def __init__(self, model: Any, policies: Policies, prompts: Sequence[int], new_tokens: int) -> None:
        self._model, self._policies, self._new_tokens = model, policies, new_tokens
        self._prompts = sorted({min(prompts), max(prompts)})
        config = text_config(model)
        self._heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
        self._dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._dtype = str(model.dtype).removeprefix("torch.")

    def fit(self, policy: str, most: int) -> Fit:
        """Find the largest budget with which no request takes more than `most` bytes."""
        token = facts(analyse(find_policy(policy)).policy, self._dim, self._dtype).bytes_per_token

        def taken(budget: float | None) -> int:
            cache = self._policies.make(policy, self._model, budget)
            return max(self._held(cache, prompt) for prompt in self._prompts) * token

        def too_much(budget: int) -> bool:
            try:
                return taken(budget) > most
            except KvdslError:  # fewer tokens than the policy protects
                return False

        if "budget" not in self._policies.classes[policy].spec.params:
            whole = taken(None)
            return Fit(None, whole) if whole <= most else Fit(why_not=f"takes {whole:,} bytes, and has no budget to lower")
        budgets = range(1, max(self._prompts) + self._new_tokens + 1)
        budget = bisect_left(budgets, True, key=too_much)
        if not budget:
            return Fit(why_not=f"takes {taken(1):,} bytes even with `budget` 1")
        try:
            return Fit(budget, taken(budget))
        except KvdslError as error:
            return Fit(why_not=f"has no budget that fits: {error}")

    def _held(self, cache: Any, prompt: int) -> int:
        """Tokens that all KV heads of all layers hold behind the answer, at most."""
        return sum(self._held_in_layer(cache.layers[index].state, prompt) for index in cache.managed)

    def _held_in_layer(self, state: Any, prompt: int) -> int:
        whole = prompt + self._new_tokens
        if not state.spec.bounded:
            return self._heads * whole
        numbers = state.settings.tried(float(prompt))
        if numbers is None:
            return self._heads * whole
        most = state.settings.most_while_attending(numbers).reshape(-1)
        if state.spec.when == "prefill":
            most = state.settings.named(numbers)["capacity"].reshape(-1) + self._new_tokens
        held = most.clamp(max=whole).expand(self._heads) if len(most) == 1 else most.clamp(max=whole)
        return int(held.sum())


# -- measuring -----------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What was measured of one contestant: a number for every prompt."""

    losses: list[float] = field(default_factory=list)
    rights: list[float] = field(default_factory=list)
    bytes: int = 0

    def add(self, loss: float, right: float | None, taken: int) -> None:
        """Note what one prompt gave: its loss, whether the answer is right if that is known, and the bytes behind it."""
        self.losses.append(loss)
        self.rights += [] if right is None else [right]
        self.bytes = max(self.bytes, taken)


def measured(
    model: Any,
    tokenizer: Any,
    policies: Policies,
    budgets: Mapping[str, float | None],
    prompts: Sequence[Prompt],
    new_tokens: int,
    going: Callable[[], bool],
) -> Iterator[tuple[Prompt, dict[str, tuple[float, float | None, int]]]]:
    """Yield for every prompt what each policy and the full cache lost: divergence, whether its answer is right, bytes at the end.

    A prompt that the full cache answers with nothing is left out.

    Args:
        going: called before every prompt; once it returns False, no other prompt is measured.
    """
    stops = ends(Lab(model, tokenizer, "", 0, 0))
    for prompt in prompts:
        if not going():
            return
        reading = Reading(model, torch.tensor([tokens_of(tokenizer, prompt)]))
        makers = [partial(full_cache, model), *(partial(policies.make, name, model, budgets[name]) for name in budgets)]
        pairs = [_begun(model, reading, make, at == 0 or prompt.answer is not None) for at, make in enumerate(makers)]
        divergences, own, texts = followed(model, pairs, reading.logits, new_tokens, stops)
        if own:
            rights: list[float | None] = [None] * len(pairs)
            if prompt.answer is not None:
                rights = _rights(tokenizer, (own, *texts), prompt.answer)
            sizes = [bytes_in_use(forced) for forced, _ in pairs]
            rows = zip((0.0, *divergences), rights, sizes, strict=True)
            yield prompt, dict(zip((REFERENCE, *budgets), rows, strict=True))


def tokens_of(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Return the tokens of a prompt: of a user's message, if the model has a chat template."""
    if tokenizer.chat_template is None:
        return begun(tokenizer, prompt.text)
    before, after = template(tokenizer, "user")
    return begun(tokenizer, before + prompt.text + after)


def _begun(model: Any, reading: Reading, make: Callable[[], Any], writes: bool) -> tuple[Any, Any]:
    """A cache that has read the prompt; a copy of it that writes an answer of its own, or None."""
    forced = make()
    read(model, forced, reading)
    return forced, copy.deepcopy(forced) if writes else None


def _rights(tokenizer: Any, texts: Sequence[Sequence[int]], answer: str) -> list[float | None]:
    return [float(is_right(tokenizer.decode(text), answer)) for text in texts]


# -- the verdict ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """The policy with the smallest loss, and those that a test cannot separate from it."""

    best: str
    alike: tuple[str, ...]
    rows: list[dict[str, Any]]


def verdict(found: Mapping[str, Found], seed: int = 0) -> Verdict:
    """Compare contestants by their losses on the same prompts.

    `rows` has one for each, the best first: `policy, loss, low, high, bytes, alike` and, where answers are known, `accuracy`.
    """
    pairs: dict[Pair, list[Any]] = {(name, None): [np.asarray(one.losses)] for name, one in found.items()}
    losses = Column("loss", ("prompts",), "kl", pairs)
    signed = Column("loss", ("prompts",), "kl", {pair: [-own[0]] for pair, own in pairs.items()})
    drawn, flips = draws(losses, seed), signs(losses, seed)
    order = sorted(found, key=lambda name: float(np.mean(found[name].losses)))
    best = order[0]
    alike = tuple(name for name in order[1:] if not better(signed, (best, None), (name, None), flips))
    rows = []
    for name in order:
        one = found[name]
        loss, low, high = interval(pairs[name, None], drawn[name, None])
        row = {
            "policy": name,
            "loss": loss,
            "low": low,
            "high": high,
            "bytes": one.bytes,
            "alike": name == best or name in alike,
        }
        rows.append(row | ({"accuracy": round(float(np.mean(one.rights)), 4)} if one.rights else {}))
    return Verdict(best, alike, rows)
