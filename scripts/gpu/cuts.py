"""Experiments 3 and 4: steps of one launch beside those of two; RoCo's step with other sizes of splits, blocks and programs.

One launch comes last: if its programs waited for each other for ever, the deadline would end the experiment.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kvdsl.runtime.gpu import sizes
from kvdsl.runtime.spec import PolicySpec
from kvdsl_lab.bench.decode import decode_step
from scripts.gpu.setting import Lines, Setting, Shape, cache_class, clone_of, prepared
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
    Cut(
        "attend: 1 warp, tiles of 8 KB, 3 stages",
        {"_TILE_BYTES": 1 << 13},
        {"NARROW_ATTEND_OPTIONS": {"num_warps": 1, "num_stages": 3}},
    ),
    Cut("settle: 2 warps, blocks of 256", {"_SETTLE_ELEMENTS": 1024}, {"SETTLE_OPTIONS": {"num_warps": 2}}),
)

TWO, ONE = Cut("two launches"), Cut("one launch", {"AT_ONCE_PER_PROCESSOR": 3})
"""Three of its programs fit a multiprocessor of an H200, by their registers."""


def run(setting: Setting, lines: Lines) -> int:
    """Every cut at every shape, then one launch where all its programs fit the device."""
    lines.tell(**setting.environment(), missing=setting.missing())
    failed = sum(told(lines, shape, _rows(shape, setting)) for shape in setting.sizes.parts)
    return 1 if failed + sum(told(lines, shape, _launches(shape, setting)) for shape in setting.sizes.together) else 0


def _rows(shape: Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    layers = layers_of(shape, setting)
    if "roco" in setting.names:
        spec = cache_class("roco").spec
        for cut in CUTS[: setting.sizes.cuts]:
            with meanwhile(cut):
                yield {"policy": "roco", "cut": cut.name} | attempt(
                    lambda: median_ms(setting, graph_of(spec, shape, layers, setting)[0]) / layers
                )


def _launches(shape: Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    layers = layers_of(shape, setting)
    for name in (one for one in ("h2o", "roco", "streaming_llm") if one in setting.names):
        spec = cache_class(name).spec
        same = {"same_bits": _same_bits(spec, shape, setting)}
        for cut in (TWO, ONE):
            with meanwhile(cut):
                found = attempt(lambda spec=spec: median_ms(setting, graph_of(spec, shape, layers, setting)[0]) / layers)  # type: ignore[misc]
            yield {"policy": name, "cut": cut.name} | same | found


def _same_bits(spec: PolicySpec, shape: Shape, setting: Setting) -> bool:
    """Return whether outputs, positions and columns of a few steps are the same, bit by bit."""
    backend, state, tokens = prepared(setting, spec, shape)
    twin, same = clone_of(state), True
    for token in tokens[:3]:
        found = []
        for cut, one in ((TWO, state), (ONE, twin)):
            with meanwhile(cut):
                out = decode_step(backend, one)(token)
            found.append((out, one.position, one.columns.where(one.position >= 0, 0)))
        same = same and all(map(torch.equal, *found))
    return same


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
