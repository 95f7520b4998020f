"""Experiment 1: a decode step captured for many layers, beside torch's attention.

A graph has a step of every layer of a model, each with a cache of its own, so that nothing stays in the device's caches from one step
to the next. Torch's attention runs in the same kind of graph. Columns come from steps on random keys. Times are of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from kvdsl_lab.bench import baselines
from kvdsl_lab.bench.baselines import Cache, Token
from kvdsl_lab.bench.decode import decode_step, live_bytes, new_tokens
from scripts.gpu.setting import Lines, PolicySpec, Setting, Shape, clone_of, half, prepared
from scripts.gpu.timing import Step, in_a_graph, median_ms

MEMORY_SHARE = 0.35
"""Of the free memory, for the caches of a graph."""


def run(setting: Setting, lines: Lines) -> int:
    """Torch's attention and every policy that evicts, shape by shape."""
    lines.tell(**setting.environment(), missing=setting.missing())
    return sum(told(lines, shape, _steps(shape, setting)) for shape in setting.sizes.timed)


def told(lines: Lines, shape: Any, rows: Iterable[dict[str, Any]]) -> int:
    """Tell each row as it comes; 1 if one raises. Others of the shape are lost then, and no other shape's."""
    try:
        for row in rows:
            facts = {name: float(f"{value:.5g}") if isinstance(value, float) else value for name, value in row.items()}
            lines.tell(**asdict(shape), **facts)
            print(shape, facts, flush=True)
    except Exception as error:
        lines.tell(**asdict(shape), error=f"{type(error).__name__}: {error}"[:500])
        print(shape, f"{type(error).__name__}: {error}", flush=True)
        return 1
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return 0


def _steps(shape: Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    token, layers, times = new_tokens(shape, device=setting.device)[0], layers_of(shape, setting), dict[str, float]()
    for row in _attention(shape, token, layers, setting):
        times |= {row["policy"]: row["ms"]} if "ms" in row else {}
        yield row
    for spec in setting.specs():
        if spec.selects:
            continue
        whole, size = graph_of(spec, shape, layers, setting)
        ms = median_ms(setting, whole) / layers
        yield {
            "policy": spec.stem, "layers": layers, "ms": ms, "gbps": size / ms / 1e6, "of_best": ms / min(times.values()),
        }  # fmt: skip
        del whole


def graph_of(spec: PolicySpec, shape: Shape, layers: int, setting: Setting, **params: float) -> tuple[Step, int]:
    """A step of every layer as one graph, and the bytes that a layer holds."""
    backend, first, tokens = prepared(setting, spec, shape, **(params or half(spec, shape)))
    steps = [decode_step(backend, state) for state in (first, *(clone_of(first) for _ in range(layers - 1)))]
    return in_a_graph(setting, lambda: [step(tokens[0]) for step in steps][-1]), live_bytes(first)


def caches_of(shape: Shape, layers: int, setting: Setting) -> list[Cache]:
    """Random keys and values of every layer."""
    heads = (shape.batch, shape.kv_heads, shape.live, shape.head_dim)
    return [
        Cache(*(torch.randn(heads, device=setting.device).to(shape.torch_dtype) for _ in range(2)), shape.group)
        for _ in range(layers)
    ]


def _attention(shape: Shape, token: Token, layers: int, setting: Setting) -> Iterator[dict[str, Any]]:
    """Torch's attention to as many tokens, which keeps no statistics: as torch chooses, and cuDNN's."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    caches = caches_of(shape, layers, setting)
    for name in ("sdpa", "cudnn") if setting.real else ("sdpa",):

        def attend(name: str = name) -> Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if name == "cudnn" else nullcontext():
                return [baselines.sdpa_grouped(cache)(token) for cache in caches][-1]

        found = attempt(lambda attend=attend: median_ms(setting, in_a_graph(setting, attend)) / layers)  # type: ignore[misc]
        yield {"policy": name, "layers": layers} | found


def layers_of(shape: Shape, setting: Setting) -> int:
    """Return the number of layers: the model's, or fewer if memory lacks."""
    if not setting.real:
        return setting.sizes.layers
    size = 2 * shape.batch * shape.kv_heads * shape.live * shape.head_dim * shape.torch_dtype.itemsize
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(setting.sizes.layers, int(MEMORY_SHARE * free / (1.1 * size))))


def attempt(measure: Callable[[], float]) -> dict[str, Any]:
    """Return the milliseconds, or the error: a cut may need more of a multiprocessor than it has."""
    try:
        return {"ms": measure()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
