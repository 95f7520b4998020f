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
    Variant("attend: tiles of 8 KB", {"_TILE_BYTES": 1 << 13}),
    Variant("attend: tiles of 8 KB, 3 programs", {"_TILE_BYTES": 1 << 13, "PROGRAMS_PER_PROCESSOR": 3}),
    Variant("attend: tiles of 8 KB, 4 programs", {"_TILE_BYTES": 1 << 13, "PROGRAMS_PER_PROCESSOR": 4}),
    Variant("attend: 1 program", {"PROGRAMS_PER_PROCESSOR": 1}),
    Variant("attend: 2 stages", options={"ATTEND_OPTIONS": {"num_stages": 2}}),
    Variant("attend: 4 stages", options={"ATTEND_OPTIONS": {"num_stages": 4}}),
    Variant("attend: 8 warps", options={"ATTEND_OPTIONS": {"num_warps": 8}}),
    Variant("settle: 8 warps", options={"SETTLE_OPTIONS": {"num_warps": 8, "maxnreg": 255}}),
    Variant("settle: blocks of half the size", {"_SETTLE_ELEMENTS": 4096}),
)
PROMPTS = (
    Variant("as it is"),
    Variant("observe: 4 warps", options={"OBSERVE_OPTIONS": {"num_warps": 4}}),
    Variant("observe: 3 stages", options={"OBSERVE_OPTIONS": {"num_stages": 3}}),
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
