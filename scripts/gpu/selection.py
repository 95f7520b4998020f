"""Experiment 5: policies that attend to a selection, our own dense step and torch's attention.

A graph's step does or does not find the sketch anew (`renewing_ms`), which is one of so many: `ms` has its share.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvdsl_lab.bench import baselines
from kvdsl_lab.bench.baselines import Cache
from kvdsl_lab.bench.decode import decode_step
from kvdsl_lab.bench.selecting import period
from scripts.gpu.setting import Lines, Setting, Shape, clone_of, prepared
from scripts.gpu.step import told
from scripts.gpu.timing import captured, in_a_graph, kernel_us, median_ms

SELECTED = {"tokens": 512.0, "dims": 16.0}
"""What a policy that selects is timed with: the T and D of the CPU's figures."""


def run(setting: Setting, lines: Lines) -> int:
    """Every policy that selects, shape by shape."""
    lines.tell(**setting.environment(), missing=setting.missing())
    return 1 if sum(told(lines, shape, _rows(shape, setting)) for shape in setting.sizes.selecting) else 0


def _rows(shape: Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    for spec in (spec for spec in setting.specs() if spec.selects):
        backend, state, tokens = prepared(setting, spec, shape, **SELECTED)
        dense, token = clone_of(state), tokens[0]
        dense.selects = False
        sdpa = baselines.sdpa_grouped(
            Cache(state.keys[:, :, : shape.live].clone(), state.values[:, :, : shape.live].clone(), shape.group)
        )
        times = {"sdpa_ms": median_ms(setting, in_a_graph(setting, lambda sdpa=sdpa, token=token: sdpa(token)))}  # type: ignore[misc]
        every = period(state)
        for name, one, before in (("ms", state, 3), ("renewing_ms", state, every - 1), ("dense_ms", dense, 3)):
            step = decode_step(backend, one)
            single = lambda step=step, token=token: step(token)  # noqa: E731
            replay = captured(single, before)[0].replay if setting.real else single
            times[name] = median_ms(setting, replay)
            if name == "ms":
                parts = kernel_us(setting, replay)
        times["ms"] += (times["renewing_ms"] - times["ms"]) / every
        best = min(times["sdpa_ms"], times["dense_ms"])
        yield {"policy": spec.stem, **SELECTED, **times, "us": parts, "vs_best_dense": best / times["ms"]}
