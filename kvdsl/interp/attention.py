"""Attention of one query token over the slots of one KV head: rotary positions, the softmax, and what a decode query attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from kvdsl.interp.evaluate import Array, Indices, Mask, ascending, at_least_one, page_of


@dataclass(frozen=True)
class Rope:
    """A model's rotary positions: each pair of dims rotates by its own frequency times the position.

    Attributes:
        inv_freq: [pairs], radians per position.
        pairing: the dims of a pair: `half` d and d + pairs, `interleaved` 2 d and 2 d + 1.
        offset: the first rotated dim; only offset .. offset + 2 * pairs are rotated.
    """

    inv_freq: Array
    pairing: Literal["half", "interleaved"] = "half"
    offset: int = 0

    @np.errstate(all="ignore")
    def rotate(self, x: ArrayLike, shift: ArrayLike) -> Array:
        """Rotate vectors, [..., dim], by `shift` positions, [...]; negative shifts rotate back."""
        turned = np.array(x, dtype=np.float64)
        angle = np.asarray(shift, dtype=np.float64)[..., None] * self.inv_freq
        first, second = self._pairs()
        a, b = turned[..., first], turned[..., second]
        turned[..., first] = a * np.cos(angle) - b * np.sin(angle)
        turned[..., second] = b * np.cos(angle) + a * np.sin(angle)
        return turned

    @np.errstate(all="ignore")
    def pairs(self, x: ArrayLike) -> Array:
        """Return at each dim of vectors, [..., dim], the L2 norm of its pair, or the magnitude of a dim that is not rotated."""
        lengths = np.abs(np.array(x, dtype=np.float64))
        first, second = self._pairs()
        lengths[..., first] = lengths[..., second] = np.sqrt(lengths[..., first] ** 2 + lengths[..., second] ** 2)
        return lengths

    def _pairs(self) -> tuple[Indices, Indices]:
        """Return the first and the second dim of each pair, [pairs] each."""
        pair = np.arange(len(self.inv_freq), dtype=np.int64)
        if self.pairing == "half":
            return self.offset + pair, self.offset + len(pair) + pair
        return self.offset + 2 * pair, self.offset + 2 * pair + 1


@dataclass(frozen=True)
class Call:
    """Options of the attention module.

    Attributes:
        scaling: the softmax scale.
        softcap: logits become softcap * tanh(logit / softcap), or None.
        window: a query sees the last `window` tokens only, itself included, or None.
        sinks: [G] learned logits that join the softmax's denominator, or None.
        slopes: [G] ALiBi slopes, subtracted from the logit per position of distance, or None.
        rope: the rotation of keys and queries, for compact positions; None if positions do not rotate them.
    """

    scaling: float = 1.0
    softcap: float | None = None
    window: int | None = None
    sinks: Array | None = None
    rope: Rope | None = None
    slopes: Array | None = None

    def of(self, head: int) -> Call:
        """Return the options of one query head of the group."""
        sinks, slopes = (None if x is None else x[head : head + 1] for x in (self.sinks, self.slopes))
        return replace(self, sinks=sinks, slopes=slopes)


@dataclass(frozen=True)
class Attention:
    """The result of one query token.

    Attributes:
        out: [G, Dv].
        probs: [G, n] softmax probabilities, 0 for slots that the query does not attend to.
        logits: [G, n] scaled and capped scores before softmax, -inf for slots that the query does not attend to.
        visible: [n] bool, the slots that any query head attends to.
    """

    out: Array
    probs: Array
    logits: Array
    visible: Mask


def is_visible(position: Indices, newest: int, window: int | None) -> Mask:
    """Return which slots, [n], the query at text position `newest` sees. A negative position is a free slot."""
    visible = (position >= 0) & (position <= newest)
    return visible if window is None else visible & (newest - position < window)


@np.errstate(all="ignore")
def attend(
    key: Array,
    value: Array,
    position: Indices,
    q: Array,
    newest: int,
    call: Call,
    selected: Mask | None = None,
    distance: Indices | None = None,
    weight: Array | None = None,
) -> Attention:
    """Softmax attention over the slots that the query sees.

    Args:
        key, value, position: [n, D], [n, Dv], [n].
        q: [G, D], the group's query heads.
        newest: the query's position in the text.
        selected: which visible slots to attend to, [n], or [G, n] per query head; None for all.
        distance: [n] how far each slot is behind the query; None for the distance in the text.
        weight: how many times each slot counts, [1, n], or [G, n] per query head; slots without a positive weight are excluded.
    """
    if selected is not None and selected.ndim == 2:
        heads = [
            (q[g : g + 1], call.of(g), own, None if weight is None else weight[g : g + 1]) for g, own in enumerate(selected)
        ]
        return _joined([attend(key, value, position, one, newest, alone, own, distance, w) for one, alone, own, w in heads])
    visible = is_visible(position, newest, call.window)
    visible = visible if selected is None else visible & selected
    if weight is not None:
        visible = visible & (weight[0] > 0) & np.isfinite(weight[0])
    seen = q @ key[visible].T * call.scaling
    if call.softcap is not None:
        seen = call.softcap * np.tanh(seen / call.softcap)
    if call.slopes is not None:
        behind = newest - position if distance is None else distance
        seen = seen - call.slopes[:, None] * behind[visible]
    probs, logits = np.zeros((len(q), len(key))), np.full((len(q), len(key)), -np.inf)
    logits[:, visible] = seen
    if visible.any():
        probs[:, visible] = _softmax(seen if weight is None else seen + np.log(weight[:, visible]), call.sinks)
    return Attention(probs[:, visible] @ value[visible], probs, logits, visible)


def _joined(heads: Sequence[Attention]) -> Attention:
    """Concatenate query heads that attended separately."""
    out, probs, logits = (np.concatenate([getattr(head, name) for head in heads]) for name in ("out", "probs", "logits"))
    return Attention(out, probs, logits, np.asarray(np.stack([head.visible for head in heads]).any(axis=0)))


def _softmax(logits: Array, sinks: Array | None) -> Array:
    """Return probabilities [G, n]; a head's sink joins the denominator only."""
    shares = logits if sinks is None else np.concatenate([logits, sinks[:, None]], axis=1)
    weights = np.exp(shares - shares.max(axis=1, keepdims=True))
    probs: Array = weights / weights.sum(axis=1, keepdims=True)
    return probs[:, : logits.shape[1]]


def at_ranks(key: Array, position: Indices, q: Array, newest: int, rope: Rope | None) -> tuple[Array, Array]:
    """Rotate keys [n, D] and query [G, D] from their positions in the text to their ranks among the live slots."""
    if rope is None:
        return key, q
    rank = np.array([np.count_nonzero(position < own) for own in position])
    return rope.rotate(key, rank - position), rope.rotate(q, np.count_nonzero(position < newest) - newest)


def rank_distances(position: Indices, newest: int) -> Indices:
    """Return how far each live slot, [n], is behind the query at text position `newest`, counted in live slots."""
    return np.array([np.count_nonzero(position < newest) - np.count_nonzero(position < own) for own in position])


def over_group(x: Array, how: Literal["mean", "max", "sum", "each"]) -> Array:
    """Reduce over the group's query heads, [G, ...] to [...]. Under `each`, where no expression reads the result, it is the mean."""
    if how in ("mean", "each"):
        return np.asarray(x.mean(axis=0))
    return np.asarray(x.max(axis=0) if how == "max" else x.sum(axis=0))


# -- what a decode query attends to ------------------------------------------------------------------------------------


def sketch_dims(by: Array, count: float) -> Indices:
    """Return the `count` highest dims, ascending; among equals the lower one, NaN lowest.

    Raises:
        ValueError: if there are fewer dims.
    """
    if count > len(by):
        raise ValueError(f"a sketch of {count:g} dims of keys that have {len(by)}")
    lower_wins = -np.arange(len(by))
    return np.sort(ascending(by, lower_wins)[::-1][: int(count)])


def selected(by: Array, position: Indices, protected: Mask, count: float, page: float, after: float = 0) -> Mask:
    """Return which of the slots that a query sees, [n], it attends to.

    The units are pages, of one token without a `page`. Units with a protected slot are always selected, the others by their highest
    value; among equals the newer, NaN lowest.

    Args:
        by, position, protected: [n].
        count: in tokens; at least one unit is selected.
        page: the tokens of a page. after: the tokens before the first page.
    """
    unit_of = page_of(position, page, after)
    units = np.unique(unit_of)
    best = np.array([_highest(by[unit_of == unit]) for unit in units])
    certain = np.array([protected[unit_of == unit].any() for unit in units], dtype=bool)
    others = ascending(best, units)[::-1]
    others = others[~certain[others]]
    left = min(at_least_one(count / page) - np.count_nonzero(certain), len(others))
    chosen = np.concatenate([units[certain], units[others[: max(0, int(left))]]])
    return np.isin(unit_of, chosen)


def taken_over(position: Indices, held: Indices, chosen: Mask) -> Mask:
    """Return a lower layer's selection, from its slots with positions `held`, [n] or [G, n], for slots with the same positions."""
    heads = [np.isin(position, held[own]) for own in chosen.reshape(-1, len(held))]
    return np.stack(heads) if chosen.ndim == 2 else heads[0]


def _highest(x: Array) -> float:
    """Return the largest value; NaN is lower than any number."""
    return float(x[ascending(x, np.zeros(len(x), dtype=np.int64))[-1]])
