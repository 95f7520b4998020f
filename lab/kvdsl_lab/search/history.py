"""What a search's own database says of the search: which moves brought something, and what the cheap step knew of the last one."""

from __future__ import annotations

from typing import Any

from kvdsl_lab.search.proof import agreement
from kvdsl_lab.search.store import Store

BEST = 40
"""Policies, the best by the last rung, among which the cheapest rung's order is looked at once more."""

_NOT_MOVES = ("seed", "ablation", "agreement", "simplified")


def moves(store: Store, last: int) -> list[dict[str, Any]]:
    """Of every move how many policies it made, how many were let in and climbed, and how many were better than all of their parents.

    Args:
        last: the last rung; `climbed` is who was judged there.
    """
    errors = store.means(last)
    found: dict[str, dict[str, Any]] = {}
    for key, move, parents, admitted in store.lineage():
        if move.partition(" ")[0] in _NOT_MOVES:
            continue
        row = found.setdefault(move, {"move": move, "tried": 0, "admitted": 0, "climbed": 0, "better": 0})
        row["tried"] += 1
        row["admitted"] += admitted
        row["climbed"] += key in errors
        row["better"] += key in errors and all(errors[key] < errors.get(parent, 0) for parent in parents)
    return sorted(found.values(), key=lambda row: -row["better"])


def cheap_step(store: Store, last: int) -> dict[str, Any]:
    """How the cheapest rung orders what both have judged, as a correlation of ranks (`proof.agreement`): of all, and of the `BEST`."""
    cheap, told = store.means(0), store.means(last)
    both = sorted((key for key in told if key in cheap), key=lambda key: told[key])
    best = {key: cheap[key] for key in both[:BEST]}
    return {
        "policies": len(both), "rank_correlation": agreement(cheap, told),
        "best": len(best), "rank_correlation_of_the_best": agreement(best, told),
    }  # fmt: skip
