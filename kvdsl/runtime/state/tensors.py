"""The tensors of one layer, declared: what each is called, which dimensions its rows and slots are, and which policies have it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvdsl.runtime.spec import PolicySpec

NOTHING = torch.empty(0)
"""What a tensor is that has not been allocated."""


# Named functions, because states are pickled.


def _every(spec: PolicySpec) -> bool:
    return True


def _sketches(spec: PolicySpec) -> bool:
    return spec.sketches


def _pages(spec: PolicySpec) -> bool:
    return "page" in spec.numbers


def _copies(spec: PolicySpec) -> bool:
    return spec.selects and (spec.sketches or "page" in spec.numbers)


def _compact(spec: PolicySpec) -> bool:
    return spec.compact


def _halves(spec: PolicySpec) -> bool:
    return spec.rope_cached


@dataclass(frozen=True)
class Declared:
    """One tensor.

    Attributes:
        batch: the batch's dimension, or None where the rows share it.
        slots: the dimension in which its slots lie one after the other, or None where they do not.
        changes: whether a decoded token changes it.
        noted: whether it is so small that all of it is noted before a token that may be taken back.
        of: whether a policy has it.
    """

    name: str
    batch: int | None = 0
    slots: int | None = None
    changes: bool = True
    noted: bool = False
    of: Callable[[PolicySpec], bool] = _every


VECTORS = (Declared("keys", slots=2), Declared("values", slots=2))
"""Keys and values, slot after slot; a layout may keep them otherwise."""

BY_SLOT = (
    Declared("position", slots=2, noted=True),
    Declared("columns", batch=1, slots=3),
    Declared("seen", noted=True),
    Declared("numbers", changes=False),
    Declared("sketch", noted=True, of=_sketches),
    Declared("prompt", changes=False, of=_sketches),
    Declared("sketch_keys", of=_sketches),
    Declared("page_bounds", of=_pages),
    Declared("copied", of=_copies),
    Declared("rank", noted=True, of=_compact),
    Declared("length", of=_compact),
    Declared("half_keys", of=_halves),
)
"""What every layout has, of the policies that need it; `SlotState` says what each is."""

SLOT_DIM = {one.name: one.slots for one in (*VECTORS, *BY_SLOT) if one.slots is not None}
"""The tensors that have slots, and which dimension those are."""


def declared(spec: PolicySpec, layout: tuple[Declared, ...]) -> dict[str, Declared]:
    """What a layer of a policy has, by name.

    Args:
        layout: what the layout keeps, keys and values above all.
    """
    return {one.name: one for one in (*layout, *BY_SLOT) if one.of(spec)}
