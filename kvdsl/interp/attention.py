"""Attention of one query token over the slots of one KV head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvdsl.interp.evaluate import Array, Indices, Mask


@dataclass(frozen=True)
class Call:
    """What the attention module adds to q, k and v.

    Attributes:
        scaling: factor of the dot products.
        softcap: logits become softcap * tanh(logit / softcap), or None.
        window: a query sees the last `window` tokens only, itself included, or None.
        sinks: [G] learned logits that join the softmax's denominator, or None.
    """

    scaling: float = 1.0
    softcap: float | None = None
    window: int | None = None
    sinks: Array | None = None


@dataclass(frozen=True)
class Attention:
    """What one query token gives.

    Attributes:
        out: [G, Dv].
        probs: [G, n] softmax probabilities, 0 where the query does not see the slot.
        logits: [G, n] scaled and capped scores before softmax, -inf where the query does not see the slot.
        visible: [n] bool.
    """

    out: Array
    probs: Array
    logits: Array
    visible: Mask


def is_visible(position: Indices, newest: int, window: int | None) -> Mask:
    """Which slots, [n], the query at text position `newest` sees. A negative position is a free slot."""
    visible = (position >= 0) & (position <= newest)
    return visible if window is None else visible & (newest - position < window)


@np.errstate(all="ignore")
def attend(key: Array, value: Array, position: Indices, q: Array, newest: int, call: Call) -> Attention:
    """Softmax attention over the slots that the query sees.

    Args:
        key, value, position: [n, D], [n, Dv], [n].
        q: [G, D], the group's query heads.
        newest: the query's position in the text.
    """
    visible = is_visible(position, newest, call.window)
    seen = q @ key[visible].T * call.scaling
    if call.softcap is not None:
        seen = call.softcap * np.tanh(seen / call.softcap)
    probs, logits = np.zeros((len(q), len(key))), np.full((len(q), len(key)), -np.inf)
    logits[:, visible] = seen
    probs[:, visible] = _softmax(seen, call.sinks)
    return Attention(probs[:, visible] @ value[visible], probs, logits, visible)


def _softmax(logits: Array, sinks: Array | None) -> Array:
    """Probabilities [G, n]; a head's sink takes its share and gives nothing."""
    shares = logits if sinks is None else np.concatenate([logits, sinks[:, None]], axis=1)
    weights = np.exp(shares - shares.max(axis=1, keepdims=True))
    probs: Array = weights / weights.sum(axis=1, keepdims=True)
    return probs[:, : logits.shape[1]]


def over_group(x: Array, how: Literal["mean", "max", "sum"]) -> Array:
    """Reduce what the group's query heads gave, [G, ...] to [...]."""
    if how == "mean":
        return np.asarray(x.mean(axis=0))
    return np.asarray(x.max(axis=0) if how == "max" else x.sum(axis=0))
