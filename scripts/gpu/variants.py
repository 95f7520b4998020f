"""Other ways to cut and to compile the kernels than `kvdsl.runtime.gpu.sizes` has chosen without a GPU, each timed beside that one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvdsl.runtime.gpu import sizes


@dataclass(frozen=True)
class Variant:
    """What is set otherwise.

    Attributes:
        numbers: constants of `kvdsl.runtime.gpu.sizes`, by name. options: entries of its tables of options, by the table's name.
    """

    name: str
    numbers: dict[str, int] = field(default_factory=dict)
    options: dict[str, dict[str, int]] = field(default_factory=dict)


STEPS = (
    Variant("as it is"),
    Variant(
        "attend: 1 warp, tiles of 8 KB, 3 stages",
        {"_TILE_BYTES": 1 << 13},
        {"NARROW_ATTEND_OPTIONS": {"num_warps": 1, "num_stages": 3}},
    ),
    Variant("attend: 4 warps, 3 stages", options={"NARROW_ATTEND_OPTIONS": {"num_warps": 4, "num_stages": 3}}),
    Variant("attend: 3 stages", options={"NARROW_ATTEND_OPTIONS": {"num_stages": 3}}),
    Variant("attend: 2 programs", {"NARROW_PROGRAMS_PER_PROCESSOR": 2}),
    Variant("attend: 4 programs", {"NARROW_PROGRAMS_PER_PROCESSOR": 4}),
    Variant("settle: 1 program", {"SETTLERS_PER_PROCESSOR": 1}),
    Variant("settle: 8 warps, blocks of 1,024", {"_SETTLE_ELEMENTS": 4096}, {"SETTLE_OPTIONS": {"num_warps": 8}}),
    Variant("settle: 2 warps, blocks of 256", {"_SETTLE_ELEMENTS": 1024}, {"SETTLE_OPTIONS": {"num_warps": 2}}),
)
SELECTIONS = (
    Variant("as it is"),
    Variant("look: 512 slots", {"_LOOKED_AT": 1 << 13}),
    Variant("look: 1,024 slots, 8 warps", {"_LOOKED_AT": 1 << 14}, {"LOOK_OPTIONS": {"num_warps": 8}}),
    Variant("look: 3 stages", options={"LOOK_OPTIONS": {"num_stages": 3}}),
    Variant("look: 2 warps", options={"LOOK_OPTIONS": {"num_warps": 2}}),
    Variant("look: 6 programs, 128 registers", {"NARROW_PROGRAMS_PER_PROCESSOR": 6}, {"LOOK_OPTIONS": {"maxnreg": 128}}),
    Variant("choose: 8 warps", options={"CHOOSE_OPTIONS": {"num_warps": 8}}),
)
PROMPTS = (
    Variant("as it is"),
    Variant("observe: 8 warps, 2 stages", options={"NARROW_OBSERVE_OPTIONS": {"num_warps": 8, "num_stages": 2}}),
    Variant("observe: 2 stages", options={"NARROW_OBSERVE_OPTIONS": {"num_stages": 2}}),
    Variant("observe: 64 slots", {"_KEY_BYTES": 1 << 14}),
    Variant("observe: 32 queries", {"_QUERY_BYTES": 1 << 13}),
)


@contextmanager
def meanwhile(variant: Variant) -> Iterator[None]:
    """Cut and compile kernels so; whoever made a workspace or a launch before keeps it."""
    tables: list[tuple[dict[str, int], dict[str, int]]] = []
    numbers: dict[str, Any] = {name: getattr(sizes, name) for name in variant.numbers}
    try:
        for name, number in variant.numbers.items():
            setattr(sizes, name, number)
        for name, options in variant.options.items():
            table = getattr(sizes, name)
            tables.append((table, dict(table)))
            table.update(options)
        yield
    finally:
        for name, number in numbers.items():
            setattr(sizes, name, number)
        for table, before in tables:
            table.clear()
            table.update(before)
