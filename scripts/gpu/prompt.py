"""Experiment 8: a layer's prompt under a profiler: how long the GPU is busy, with what, and how long the call takes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from kvdsl_lab.bench import baselines, prefill
from scripts.gpu.setting import Lines, Setting, choose, on_device
from scripts.gpu.step import told
from scripts.gpu.timing import kernels, median_ms

POLICIES = ("h2o", "roco", "streaming_llm")
MOST = 8
"""Kernels that are named, the longest ones."""


def run(setting: Setting, lines: Lines) -> int:
    """Every policy, length by length."""
    lines.tell(**setting.environment(), missing=setting.missing())
    return 1 if sum(told(lines, shape, _rows(shape, setting)) for shape in setting.sizes.timed_prompts) else 0


def _rows(shape: prefill.Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    tensors = on_device(setting, shape)
    sdpa_ms = median_ms(setting, lambda: baselines.sdpa_prompt(*tensors), 5)
    yield {"policy": "sdpa", "ms": sdpa_ms}
    for spec in setting.specs():
        if spec.stem not in POLICIES:
            continue
        backend = choose(spec, "triton", torch.device(setting.device), tensors[0].dtype)
        layer = prefill.prefill(backend, spec, tensors, seed=0)
        ms, found = median_ms(setting, layer, 5), kernels(setting, layer, 1)
        longest = sorted(found, key=lambda one: -one.us * one.launches)[:MOST]
        yield {
            "policy": spec.stem, "ms": ms, "of_sdpa": ms / sdpa_ms, "busy_ms": sum(one.us * one.launches for one in found) / 1e3,
            "launches": sum(one.launches for one in found), "us": {one.name[:60]: round(one.us * one.launches, 1) for one in longest},
        }  # fmt: skip
