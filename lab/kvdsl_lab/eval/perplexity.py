"""Perplexity of a text whose every token is predicted through the cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvdsl.budget import is_rate
from kvdsl.generation.generate import expect_prompt
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.eval.abreast import abreast
from kvdsl_lab.eval.caches import Policies
from kvdsl_lab.eval.usage import Usage

Row = dict[str, Any]

TOGETHER = 64
"""Tokens of a forward, at most, in which several caches are fed together: more hardly save time, and all their caches take memory."""


def token_losses(
    model: Any, ids: Tensor, cache: Any, chunk: int, tick: Callable[[], None] = lambda: None, until: float | None = None
) -> Tensor:
    """Loss of every token but the first, given what the cache holds of those before it: float32 [rows, length - 1].

    The text is fed `chunk` tokens at a time: within a chunk a token sees those before it as well, and the policy settles after
    each. With chunks of one token it evicts token by token, as it does while generating. A rate is of the whole stretch; beside a
    budget of tokens the prompt that a policy asks for is what comes first, as while generating.

    Args:
        until: feed nothing more then (`time.monotonic()`), but one chunk: the losses are fewer.
    """
    ids = ids.to(model.device)
    for one in getattr(cache, "caches", [cache]):
        if _is_of_the_prompt(one):
            expect_prompt(one, ids.shape[1] - 1)
    losses: list[Tensor] = []
    with torch.inference_mode():
        for start in range(0, ids.shape[1] - 1, chunk):
            if losses and until is not None and time.monotonic() >= until:
                break
            part = ids[:, start : min(start + chunk, ids.shape[1] - 1)]
            target = ids[:, start + 1 : start + 1 + part.shape[1]]
            logits = model(input_ids=part, **with_cache(cache), use_cache=True).logits.float()
            losses.append(torch.nn.functional.cross_entropy(logits.transpose(1, 2), target, reduction="none"))
            tick()
    return torch.cat(losses, dim=1).cpu()


def _is_of_the_prompt(cache: Any) -> bool:
    """Whether what a cache keeps may be a share of the prompt: it was given no number of tokens."""
    budgets = [cache.layers[index].state.settings.params.get("budget") for index in getattr(cache, "managed", ())]
    return any(budget is None or is_rate(budget) for budget in budgets)


def losses_of_each(
    model: Any,
    ids: Tensor,
    caches: Sequence[Any],
    chunk: int,
    tick: Callable[[], None] = lambda: None,
    until: float | None = None,
) -> list[Tensor]:
    """`token_losses` of several caches, which all read the same, together where they can."""
    found: list[Tensor] = []
    fed = abreast(caches, len(ids))
    for number, (cache, count) in enumerate(fed):

        def forward_done(count: int = count) -> None:
            for _ in range(count):
                tick()

        losses = token_losses(model, ids.repeat(count, 1), cache, chunk, forward_done, _share(until, len(fed) - number))
        found += torch.split(losses, len(ids))
    return found


def _share(until: float | None, parts: int) -> float | None:
    """When the first of so many parts is to end, which take equally long."""
    now = time.monotonic()
    return None if until is None else now + (until - now) / parts


def steps(length: int, chunk: int) -> int:
    """How many forwards `token_losses` makes."""
    return -(-(length - 1) // chunk)


def perplexities(
    model: Any,
    ids: Tensor,
    policies: Policies,
    budgets: Sequence[float],
    chunk: int = 1,
    tick: Callable[[], None] = lambda: None,
    by: int | None = None,
    until: float | None = None,
) -> list[Row]:
    """One row for every policy and budget: `policy, budget, ppl, tokens`, `losses` (the mean of each stretch), and `Usage.row`.

    Args:
        by: so many tokens have a row for themselves, which says where they lie in their stretch: `first` to `last`.
        until: end then (`time.monotonic()`), with as much of every stretch as all caches have read.
    """
    found: list[tuple[Tensor, Row]] = []
    pairs, count = list(policies.pairs(budgets)), max(1, TOGETHER // (len(ids) * chunk))
    for at in range(0, len(pairs), count):
        group = pairs[at : at + count]
        caches = [policies.make(name, model, budget) for name, budget in group]
        losses = losses_of_each(model, ids, caches, chunk, tick, _share(until, -(-(len(pairs) - at) // count)))
        for cache, own in zip(caches, losses, strict=True):
            usage = Usage()
            usage.see(cache)
            found.append((own, usage.row()))
    read = min((own.shape[1] for own, _ in found), default=0)
    return [
        {"policy": name, "budget": budget, **part, **usage}
        for (name, budget), (own, usage) in zip(pairs, found, strict=True)
        for part in _parts(own[:, :read], by)
    ]


def _parts(losses: Tensor, by: int | None) -> Iterator[Row]:
    """Perplexities of losses [rows, length - 1], of which the first is that of the stretch's second token."""
    if by is None:
        yield {"ppl": _perplexity(losses), "tokens": losses.numel(), "losses": _of_stretches(losses)}
        return
    for start in range(0, losses.shape[1], by):
        part = losses[:, start : start + by]
        yield {
            "first": start + 1,
            "last": start + part.shape[1],
            "ppl": _perplexity(part),
            "tokens": part.numel(),
            "losses": _of_stretches(part),
        }


def _perplexity(losses: Tensor) -> float:
    return round(math.exp(losses.double().mean()), 4)


def _of_stretches(losses: Tensor) -> list[float]:
    return [round(float(loss), 6) for loss in losses.double().mean(1)]
