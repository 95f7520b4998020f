"""The stage `kernels`: a decode step captured for many layers, beside flash decoding; steps that select; prompts; variants.

A graph has a step of every layer of a model, each with a cache of its own, so that nothing stays in the device's caches from one step
to the next; whoever is compared runs in the same kind of graph. Columns are as a prompt leaves them. Times are of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from kvdsl.runtime.gpu.backend import TritonBackend
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.torch import dense
from kvdsl_lab.bench import baselines, prefill
from kvdsl_lab.bench.baselines import Cache, Token
from kvdsl_lab.bench.decode import decode_step, live_bytes, new_tokens
from kvdsl_lab.bench.selecting import period
from scripts.gpu import variants
from scripts.gpu.setting import (
    AttentionCall,
    Lines,
    PolicySpec,
    Setting,
    Shape,
    SlotState,
    as_call,
    choose,
    clone_of,
    on_device,
    prepared,
)
from scripts.gpu.timing import Step, captured, copy_rate, in_a_graph, measured, median_ms, timed_parts

SELECTED = {"tokens": 512.0, "dims": 16.0}
"""What a policy that selects is timed with: the T and D of the CPU's figures."""
MEMORY_SHARE = 0.35
"""Of the free memory, for the caches of a graph; the other half of them is the baseline's."""
PROMPT_LIMIT = 2**37
"""Query heads × tokens² up to which columns come from a prompt; beyond, from steps on random keys."""


def run(setting: Setting, lines: Lines) -> int:
    """Everything, the most telling first; a shape that fails is told, and the others go on."""
    lines.tell(**setting.environment(), missing=setting.missing(), copy_gbps=round(copy_rate(setting), 1))
    evicting, selecting = ([spec for spec in setting.specs() if spec.selects == selects] for selects in (False, True))
    failed = 0
    for kind, shapes, time in (
        ("decode", setting.sizes.timed[:3], lambda shape: _decode(evicting, shape, setting)),
        ("prompt", setting.sizes.timed_prompts, lambda shape: _prompts(evicting, shape, setting)),
        ("select", setting.sizes.selecting, lambda shape: _selecting(selecting, shape, setting)),
        ("select variant", setting.sizes.selecting[1:3], lambda shape: _selection_variants(selecting, shape, setting)),
        ("decode", setting.sizes.timed[3:], lambda shape: _decode(evicting, shape, setting)),
        ("variant", setting.sizes.timed[:2], lambda shape: _variants(evicting, shape, setting)),
        ("prompt variant", setting.sizes.timed_prompts[1:2], lambda shape: _prompt_variants(evicting, shape, setting)),
    ):  # fmt: skip
        for shape in shapes:
            failed += _told(lines, kind, shape, time(shape))
            if setting.real:
                torch.cuda.empty_cache()
    return 1 if failed else 0


def _told(lines: Lines, kind: str, shape: Any, rows: Iterator[dict[str, Any]]) -> int:
    try:
        for row in rows:
            lines.tell(kind=kind, **asdict(shape), **{name: _short(value) for name, value in row.items()})
            print(kind, shape, {name: _short(value) for name, value in row.items()}, flush=True)
    except Exception as error:
        lines.tell(kind=kind, **asdict(shape), error=f"{type(error).__name__}: {error}"[:500])
        print(kind, shape, f"{type(error).__name__}: {error}", flush=True)
        return 1
    return 0


def _short(value: Any) -> Any:
    return float(f"{value:.5g}") if isinstance(value, float) else value


# -- decode steps ------------------------------------------------------------------------------------------------------


def _decode(specs: list[PolicySpec], shape: Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    """Baselines, then every policy, each as a graph of as many layers as fit."""
    tokens = new_tokens(shape, device=setting.device)
    layers = _layers(shape, setting)
    heads = (shape.batch, shape.kv_heads, shape.live, shape.head_dim)
    caches = [
        Cache(*(torch.randn(heads, device=setting.device).to(shape.torch_dtype) for _ in range(2)), shape.group)
        for _ in range(layers)
    ]
    times = {}
    for name, attend in _ways(caches, tokens[0], setting):
        try:
            times[name] = median_ms(setting, in_a_graph(setting, attend)) / layers
        except Exception as error:  # not every version of torch has every way, nor on every GPU
            yield {"policy": name, "error": f"{type(error).__name__}: {error}"[:300]}
            continue
        yield {"policy": name, "layers": layers, "ms": times[name], "gbps": caches[0].nbytes / times[name] / 1e6}
    del caches
    best = min(times.values(), default=None)
    for spec in specs:
        backend, first = _after_a_prompt(spec, shape, setting, tokens)
        states = [first, *(clone_of(first) for _ in range(layers - 1))]
        steps = [decode_step(backend, state) for state in states]
        whole = in_a_graph(setting, lambda steps=steps: [step(tokens[0]) for step in steps][-1])  # type: ignore[misc]
        ms, size = median_ms(setting, whole) / layers, live_bytes(first)
        row = {"policy": spec.stem, "backend": backend.name, "layers": layers, "ms": ms, "gbps": size / ms / 1e6}
        if setting.real:
            row["eager_ms"] = median_ms(setting, lambda steps=steps: [step(tokens[0]) for step in steps], 5) / layers  # type: ignore[misc]
        yield row | ({} if best is None else {"of_best": ms / best})
        del states, steps, whole, first


def _ways(caches: list[Cache], token: Token, setting: Setting) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Torch's ways to attend to a cache that keeps no statistics, over all layers."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = (
        {"sdpa": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
        if setting.real
        else {"sdpa": None}
    )
    for name, kernel in kernels.items():

        def attend(kernel: Any = kernel) -> Tensor:
            with nullcontext() if kernel is None else sdpa_kernel(kernel):
                return [baselines.sdpa_grouped(cache)(token) for cache in caches][-1]

        yield name, attend
    if setting.real and len(caches[0].keys) == 1:  # which takes seconds to compile, and is not the best
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        yield "flex", lambda: [compiled(token[0], cache.keys, cache.values, enable_gqa=True) for cache in caches][-1]


def _layers(shape: Shape, setting: Setting) -> int:
    """As many as a model has, or as fit."""
    if not setting.real:
        return setting.sizes.layers
    size = 2 * shape.batch * shape.kv_heads * shape.live * shape.head_dim * shape.torch_dtype.itemsize
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(setting.sizes.layers, int(MEMORY_SHARE * free / (1.1 * size))))


def _after_a_prompt(spec: PolicySpec, shape: Shape, setting: Setting, tokens: list[Token]) -> tuple[Any, SlotState]:
    """A full cache whose columns are what a prompt left, and a few steps behind it."""
    if not spec.reads_attention or shape.batch * shape.kv_heads * shape.group * shape.live**2 > PROMPT_LIMIT:
        backend, state, _ = prepared(setting, spec, shape)
        return backend, state
    state = slot_state(spec, {"budget": shape.live - 1})
    backend = choose(
        spec, "triton" if spec.triton_source.exists() else "torch", torch.device(setting.device), shape.torch_dtype
    )
    wide = (shape.batch, shape.kv_heads * shape.group, shape.live, shape.head_dim)
    narrow = (shape.batch, shape.kv_heads, shape.live, shape.head_dim)
    query, key, value = (torch.randn(size, device=setting.device).to(shape.torch_dtype) for size in (wide, narrow, narrow))
    state.room.reserves = True
    backend.prefill(state, AttentionCall(query, key, value, None, shape.head_dim**-0.5))
    for token in tokens[:3]:
        backend.decode(state, as_call(state, token))
    return backend, state


# -- selections and prompts --------------------------------------------------------------------------------------------


def _selecting(specs: list[PolicySpec], shape: Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    """Policies that attend to a selection, our own dense step and torch's attention.

    A graph's step does or does not find the sketch anew (`renewing_ms`), which is one of so many: `ms` has its share.
    """
    for spec in specs:
        backend, state, tokens = prepared(setting, spec, shape, **SELECTED)
        dense = clone_of(state)
        dense.selects = False
        cache = Cache(state.keys[:, :, : shape.live].clone(), state.values[:, :, : shape.live].clone(), shape.group)
        sdpa = baselines.sdpa_grouped(cache)
        times = {"sdpa_ms": median_ms(setting, in_a_graph(setting, lambda sdpa=sdpa, token=tokens[0]: sdpa(token)))}  # type: ignore[misc]
        every = period(state)
        for name, one, before in (("ms", state, 3), ("renewing_ms", state, every - 1), ("dense_ms", dense, 3)):
            step = decode_step(backend, one)
            single = lambda step=step, token=tokens[0]: step(token)  # noqa: E731
            times[name] = median_ms(setting, captured(single, before)[0].replay if setting.real else single)
        times["ms"] += (times["renewing_ms"] - times["ms"]) / every
        yield {
            "policy": spec.stem,
            "backend": backend.name,
            **SELECTED,
            **times,
            "vs_best_dense": min(times["sdpa_ms"], times["dense_ms"]) / times["ms"],
        }


def _selection_variants(specs: list[PolicySpec], shape: Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    """A step that selects, of which the sketch is not found anew, as it would be cut otherwise."""
    for variant in variants.SELECTIONS[: setting.sizes.variants]:
        for spec in specs:
            with variants.meanwhile(variant):
                yield {"policy": spec.stem, "variant": variant.name} | _attempt(
                    lambda spec=spec: _selecting_ms(spec, shape, setting)
                )


def _selecting_ms(spec: PolicySpec, shape: Shape, setting: Setting) -> float:
    backend, state, tokens = prepared(setting, spec, shape, **SELECTED)
    step = decode_step(backend, state)
    return median_ms(setting, in_a_graph(setting, lambda: step(tokens[0])))


def _prompts(specs: list[PolicySpec], shape: prefill.Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    """A layer's prompt under every policy that observes, beside torch's fused attention of the same."""
    tensors = on_device(setting, shape)
    sdpa_ms, sdpa_bytes = measured(setting, lambda: baselines.sdpa_prompt(*tensors))
    yield {"policy": "sdpa", "ms": sdpa_ms, "peak_bytes": sdpa_bytes}
    for spec in specs:
        if not spec.reads_attention:
            continue
        backend = choose(
            spec, "triton" if spec.triton_source.exists() else "torch", torch.device(setting.device), tensors[0].dtype
        )
        run = prefill.prefill(backend, spec, tensors, seed=0)
        ms, size = measured(setting, run)
        row = {"policy": spec.stem, "backend": backend.name, "ms": ms, "of_sdpa": ms / sdpa_ms, "peak_bytes": size}
        yield row | _parts(setting, run)


def _parts(setting: Setting, run: Step) -> dict[str, float]:
    """Of a prompt's milliseconds those of attention and of what observes it; what remains is settling, and the host."""
    run()
    with timed_parts(setting, {"attend_ms": (dense, "attend"), "observe_ms": (TritonBackend, "_fold")}) as found:
        run()
    return found


# -- variants ----------------------------------------------------------------------------------------------------------


def _variants(specs: list[PolicySpec], shape: Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    """RoCo's step as it would be cut otherwise."""
    tokens = new_tokens(shape, device=setting.device)
    for variant in variants.STEPS[: setting.sizes.variants]:
        for spec in (spec for spec in specs if spec.stem == "roco"):
            with variants.meanwhile(variant):
                yield {"policy": spec.stem, "variant": variant.name} | _attempt(
                    lambda spec=spec: _step_ms(spec, shape, setting, tokens)
                )


def _step_ms(spec: PolicySpec, shape: Shape, setting: Setting, tokens: list[Token]) -> float:
    layers = _layers(shape, setting)
    backend, first, _ = prepared(setting, spec, shape)
    steps = [decode_step(backend, state) for state in (first, *(clone_of(first) for _ in range(layers - 1)))]
    return median_ms(setting, in_a_graph(setting, lambda: [step(tokens[0]) for step in steps][-1])) / layers


def _prompt_variants(specs: list[PolicySpec], shape: prefill.Shape, setting: Setting) -> Iterator[dict[str, Any]]:
    """RoCo's prompt as it would be observed otherwise."""
    tensors = on_device(setting, shape)
    for variant in variants.PROMPTS[: setting.sizes.variants]:
        for spec in (spec for spec in specs if spec.stem == "roco"):
            backend = choose(spec, "triton", torch.device(setting.device), tensors[0].dtype)
            with variants.meanwhile(variant):
                run = prefill.prefill(backend, spec, tensors, seed=0)
                yield {"policy": spec.stem, "variant": variant.name} | _attempt(lambda run=run: measured(setting, run)[0])


def _attempt(measure: Callable[[], float]) -> dict[str, Any]:
    """Its milliseconds, or why there are none: what is tried may take more of a multiprocessor than it has."""
    try:
        return {"ms": measure()}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
