"""Which KV heads retrieve: how much a head's output changes if it sees the first tokens and the most recent ones only.

Xiao et al., "DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads", 2024 (2410.10819), *train* a gate
for every KV head, by how much the model's last hidden state suffers on passkeys that are hidden in long texts. This is a stand-in without
training, and only an approximation: every head is looked at by itself, where the others see everything, and the text is one that is read
twice, so that heads that find what stands far back (induction) have something to find. The change is |o - o'| / |o|, the mean over the
queries of the second reading and the query heads of a KV head. What is written is a rank from 0 to 1 among all KV heads of the model,
because a share of heads is what DuoAttention chooses by: `retrieval > 0.75` is a quarter of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvdsl.runtime.torch.attention import softmax
from kvdsl_lab.eval.recording import Recording

_AT_ONCE = 128
"""Queries whose probabilities are held at a time."""


@dataclass
class Changes:
    """The sum of some queries' changes, float64 [kv_heads], and how many queries that were."""

    count: int
    total: Tensor

    def __add__(self, other: Changes) -> Changes:
        return Changes(self.count + other.count, self.total + other.total)


def seen(found: Recording, sinks: int, recent: int) -> Changes:
    """What a text adds that is read twice: of the queries of its second half.

    Args:
        sinks, recent: how many of the first and of the most recent tokens a streaming head sees, its own included.
    """
    half = found.length // 2
    parts = [
        _changes(found, first, min(first + _AT_ONCE, found.length), sinks, recent)
        for first in range(half, found.length, _AT_ONCE)
    ]
    return Changes(found.length - half, torch.stack(parts).sum(0))


def _changes(found: Recording, first: int, end: int, sinks: int, recent: int) -> Tensor:
    """The sum over the queries `first` to `end - 1`, float64 [kv_heads]."""
    logit = found.logit(first, end)
    place = torch.arange(end, device=logit.device)
    age = torch.arange(first, end, device=logit.device)[:, None] - place
    visible = (age >= 0) & (age < (found.call.window or end))
    streams = visible & ((place < sinks) | (age < recent))
    whole, part = (
        softmax(logit.masked_fill(~mask, -torch.inf), found.call.sinks) @ found.value[:, :, None, :end]
        for mask in (visible, streams)
    )
    change = (whole - part).double().norm(dim=-1) / whole.double().norm(dim=-1).clamp(min=1e-30)
    of_queries: Tensor = change[0].mean(1)
    return of_queries.sum(-1)


def result(changes: Changes) -> Tensor:
    """The mean change, [kv_heads]."""
    return changes.total / changes.count


def ranks(changes: Tensor) -> Tensor:
    """Changes [layers, kv_heads] as ranks between 0 and 1: the share of heads with a smaller one, and half a head."""
    order = changes.flatten().argsort(stable=True).argsort()
    return ((order.double() + 0.5) / changes.numel()).view_as(changes)
