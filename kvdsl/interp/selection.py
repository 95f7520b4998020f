"""What a decode query attends to: the sketch's dims, and the selected slots."""

from __future__ import annotations

import numpy as np

from kvdsl.interp.evaluate import Array, Indices, Mask, ascending, at_least_one, page_of


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
