"""A policy's decision, in words and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from kvdsl.interp.evaluate import Indices
from kvdsl.interp.step import Step
from kvdsl.ir.nodes import Policy

_TOKENS_A_LINE = 16


def positions_in_words(positions: Iterable[float]) -> str:
    """Print positions, such as `0, 2, 3`, or `nothing`."""
    return ", ".join(str(int(position)) for position in positions) or "nothing"


def numbers_in_words(values: Iterable[float]) -> str:
    """Print numbers as in a test, such as `0.4, nan`."""
    return ", ".join(f"{value:.7g}" for value in values) or "nothing"


def table(policy: Policy, step: Step) -> tuple[str, ...]:
    """Print the tokens before the eviction, in the order of the text, with the policy's values of each."""
    lines = list(_lines(policy, step))
    names = max(len(name) for name, _ in lines)
    shown: list[str] = []
    for slots in _parts(np.argsort(step.position)):
        widths = [max(len(cells[slot]) for _, cells in lines) for slot in slots]
        for name, cells in lines:
            row = "  ".join(cells[slot].ljust(width) for slot, width in zip(slots, widths, strict=True))
            shown.append(f"{name:<{names}}  {row}".rstrip())
        shown.append("")
    return tuple(shown[:-1])


def _parts(slots: Indices) -> Iterator[list[int]]:
    """Yield slots in groups that fit a line."""
    for start in range(0, len(slots), _TOKENS_A_LINE):
        yield [int(slot) for slot in slots[start : start + _TOKENS_A_LINE]]


def _lines(policy: Policy, step: Step) -> Iterator[tuple[str, list[str]]]:
    """Yield each line's name, with a cell per slot."""
    yield "position", [str(position) for position in step.position]
    if step.attn.size:
        yield "attn", [f"{value:.4g}" for value in step.attn]
    for name, column in step.columns.items():
        if column.ndim == 1:
            yield name, [f"{value:.4g}" for value in column]
    for keep, by in zip(policy.keeps, step.by, strict=True):
        if by is not None and keep.row.ranks:
            yield f"keep {keep.scope} by", [f"{value:.4g}" for value in by]
    if step.selected is not None or step.chosen is not None:
        yield "selected", _marks(np.isin(step.position, step.picked))
    if step.score is not None:
        yield "protected", _marks(step.protected)
        yield "score", [f"{value:.4g}" for value in step.score]
        yield "evicted", _marks(np.isin(np.arange(len(step.position)), step.victims))


def _marks(holds: Iterable[bool]) -> list[str]:
    return ["yes" if one else "." for one in holds]
