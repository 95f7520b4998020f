"""Experiment 4: RoCo's step with other sizes of splits, blocks and programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvdsl.runtime.gpu import sizes
from scripts.gpu.setting import Lines, Setting, Shape, cache_class
from scripts.gpu.step import attempt, graph_of, layers_of, told
from scripts.gpu.timing import median_ms


@dataclass(frozen=True)
class Cut:
    """Values that replace those of `kvdsl.runtime.gpu.sizes`.

    Attributes:
        numbers: constants of `kvdsl.runtime.gpu.sizes`, by name. options: entries of its tables of options, by the table's name.
    """

    name: str
    numbers: dict[str, int] = field(default_factory=dict)
    options: dict[str, dict[str, int]] = field(default_factory=dict)


CUTS = (
    Cut("as it is"),
    Cut("128 slots a split", {"SPLIT": 128}),
    Cut("512 slots a split", {"SPLIT": 512}),
    Cut("all slots in one split", {"SPLIT": 1 << 20}),
    Cut("attend: 3 stages", options={"NARROW_ATTEND_OPTIONS": {"num_stages": 3}}),
    Cut(
        "attend: 1 warp, tiles of 8 KB, 3 stages",
        {"_TILE_BYTES": 1 << 13},
        {"NARROW_ATTEND_OPTIONS": {"num_warps": 1, "num_stages": 3}},
    ),
    Cut("settle: 1 program", {"SETTLERS_PER_PROCESSOR": 1}),
    Cut("settle: 2 warps, blocks of 256", {"_SETTLE_ELEMENTS": 1024}, {"SETTLE_OPTIONS": {"num_warps": 2}}),
)


def run(setting: Setting, lines: Lines) -> int:
    """Every cut at every shape."""
    lines.tell(**setting.environment(), missing=setting.missing())
    return 1 if sum(told(lines, shape, _rows(shape, setting)) for shape in setting.sizes.parts) else 0


def _rows(shape: Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    layers = layers_of(shape, setting)
    if "roco" in setting.names:
        spec = cache_class("roco").spec
        for cut in CUTS[: setting.sizes.cuts]:
            with meanwhile(cut):
                yield {"policy": "roco", "cut": cut.name} | attempt(
                    lambda: median_ms(setting, graph_of(spec, shape, layers, setting)[0]) / layers
                )


@contextmanager
def meanwhile(cut: Cut) -> Iterator[None]:
    """Set a cut's constants and options for the block. Workspaces and launches that exist already keep their own."""
    tables: list[tuple[dict[str, int], dict[str, int]]] = []
    numbers: dict[str, Any] = {name: getattr(sizes, name) for name in cut.numbers}
    try:
        for name, number in cut.numbers.items():
            setattr(sizes, name, number)
        for name, options in cut.options.items():
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
