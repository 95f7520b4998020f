"""Experiment 7: cuDNN's attention with its log-sum-exps, and a pass over the keys that makes statistics of them, every 16th step.

The pass is torch's, three kernels: what one kernel would do is an upper bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvdsl_lab.bench.baselines import Cache
from kvdsl_lab.bench.decode import new_tokens
from scripts.gpu.setting import Lines, Setting, Shape
from scripts.gpu.step import caches_of, layers_of, told
from scripts.gpu.timing import in_a_graph, median_ms

EVERY = 16


def run(setting: Setting, lines: Lines) -> int:
    """Every shape of experiment 2."""
    lines.tell(**setting.environment())
    return 1 if sum(told(lines, shape, _rows(shape, setting)) for shape in setting.sizes.parts) else 0


def _rows(shape: Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    layers = layers_of(shape, setting)
    caches, (query, _, _) = caches_of(shape, layers, setting), new_tokens(shape, device=setting.device)[0]

    def all_of(one: Any) -> float:
        return (
            median_ms(setting, in_a_graph(setting, lambda: [one(cache, cache.fold(query)) for cache in caches][-1])) / layers
        )

    plain = all_of(lambda cache, grouped: attention(cache, grouped, sums=False)[0])
    summed = all_of(lambda cache, grouped: attention(cache, grouped, sums=True)[0])
    both = all_of(lambda cache, grouped: statistics(cache, grouped, attention(cache, grouped, sums=True)[1]))
    yield {"ms": plain, "summed_ms": summed, "with_statistics_ms": both, "every": EVERY,
           "of_plain": (summed + (both - summed) / EVERY) / plain}  # fmt: skip


def attention(cache: Cache, grouped: Tensor, *, sums: bool) -> tuple[Tensor, Tensor]:
    """A group's queries as rows: its output and, if asked for, the log-sum-exps [batch, kv_heads, group]."""
    if cache.keys.is_cuda:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(grouped, cache.keys, cache.values, None, sums)
        return out, lse.reshape(grouped.shape[:3]) if sums else lse
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(grouped, cache.keys, cache.values)
    return out, lse


def statistics(cache: Cache, grouped: Tensor, lse: Tensor) -> Tensor:
    """Each slot's mean probability, [batch, kv_heads, slots]."""
    logits = (grouped @ cache.keys.transpose(-1, -2)).float() * grouped.shape[-1] ** -0.5
    return (logits - lse[..., None]).exp_().mean(2)
