"""What a policy went by, in words and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from kvdsl.interp.step import Step
from kvdsl.ir.nodes import Policy


def positions_in_words(positions: Iterable[float]) -> str:
    """`0, 2, 3`; `nothing` if there are none."""
    return ", ".join(str(int(position)) for position in positions) or "nothing"


def numbers_in_words(values: Iterable[float]) -> str:
    """`0.4, nan`, as a test would say it."""
    return ", ".join(f"{value:.7g}" for value in values) or "nothing"


def table(policy: Policy, step: Step) -> tuple[str, ...]:
    """The tokens before any of them left, in the order of the text, and what the policy knew of each."""
    order = np.argsort(step.position)
    lines = [(name, [cells[slot] for slot in order]) for name, cells in _lines(policy, step)]
    widths = [max(len(cells[place]) for _, cells in lines) for place in range(len(order))]
    names = max(len(name) for name, _ in lines)
    return tuple(
        f"{name:<{names}}  {'  '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))}".rstrip()
        for name, cells in lines
    )


def _lines(policy: Policy, step: Step) -> Iterator[tuple[str, list[str]]]:
    """Each line's name, and a cell for each slot."""
    yield "position", [str(position) for position in step.position]
    if step.attn.size:
        yield "attn", [f"{value:.4g}" for value in step.attn]
    for name, column in step.columns.items():
        if column.ndim == 1:
            yield name, [f"{value:.4g}" for value in column]
    for keep, by in zip(policy.keeps, step.by, strict=True):
        if by is not None and keep.scope == "top":
            yield "keep top by", [f"{value:.4g}" for value in by]
    if step.selected is not None:
        yield "selected", _marks(step.selected)
    if step.score is not None:
        yield "protected", _marks(step.protected)
        yield "score", [f"{value:.4g}" for value in step.score]
        yield "evicted", _marks(np.isin(np.arange(len(step.position)), step.victims))


def _marks(holds: Iterable[bool]) -> list[str]:
    return ["yes" if one else "." for one in holds]
