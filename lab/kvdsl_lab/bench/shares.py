"""Where a token's time goes in a whole model: attention, the cache's update, the model's head; the rest is mostly matrices of weights."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

Shares = dict[str, float | None]
"""Of a token's time, None where it cannot be told.

`attention`: the attention modules without their projections, the two following aside; `update`: appending, moving and evicting, and the
statistics that decide; `rotation`: turning all cached keys anew, where it is a pass of its own; `head`: from the last layer to the logits.
"""


def shares(model: Any, cache: Any, run: Callable[[], float]) -> Shares:
    """Shares of what `run` takes, which lets the model run with the cache and says its milliseconds; on a CPU only."""
    with watching(model, cache) as spent:
        total = run() / 1e3
    if model.device.type != "cpu":
        return dict.fromkeys(("attention", "update", "rotation", "head"))
    update, rotation = spent.get("update"), spent.get("rotation")
    attention = spent["modules"] - spent["projections"] - (update or 0.0) - (rotation or 0.0)
    found = {"attention": attention, "update": update, "rotation": rotation, "head": spent["head"]}
    return {name: None if seconds is None else round(seconds / total, 4) for name, seconds in found.items()}


@contextmanager
def watching(model: Any, cache: Any) -> Iterator[Counter[str]]:
    """Seconds by name, complete when the block ends; `update` and `rotation` only where the cache lets them be told."""
    spent: Counter[str] = Counter()
    with ExitStack() as stack:
        for module in model.modules():
            if type(module).__name__.endswith("Attention"):
                stack.enter_context(_clocked(module, "modules", spent))
                for child in module.children():
                    if any(True for _ in child.parameters()):  # a press hangs the model's rotary embedding there
                        stack.enter_context(_clocked(child, "projections", spent))
        stack.enter_context(_clocked(model.get_output_embeddings(), "head", spent))
        stack.enter_context(_cache_watched(cache, spent))
        yield spent


@contextmanager
def _clocked(module: nn.Module, name: str, spent: Counter[str]) -> Iterator[None]:
    begun: list[float] = []
    hooks = (
        module.register_forward_pre_hook(lambda *_: begun.append(time.perf_counter())),
        module.register_forward_hook(lambda *_: spent.update({name: time.perf_counter() - begun.pop()})),  # type: ignore[dict-item]
    )
    yield
    for hook in hooks:
        hook.remove()


@contextmanager
def _cache_watched(cache: Any, spent: Counter[str]) -> Iterator[None]:
    from kvdsl.runtime.hf.cache import KVCache
    from kvdsl_lab.bench.shifting import ShiftedCache

    if isinstance(cache, ShiftedCache):
        before = cache.seconds()
        yield
        spent.update(cache.seconds() - before)  # type: ignore[operator]
    elif isinstance(cache, KVCache):
        with _stages(cache, spent):
            yield
    elif isinstance(cache, DynamicCache):
        with _timed_update(cache, spent):
            yield
    else:
        yield


@contextmanager
def _timed_update(cache: DynamicCache, spent: Counter[str]) -> Iterator[None]:
    plain = cache.update

    def update(*args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter()
        found = plain(*args, **kwargs)
        spent.update({"update": time.perf_counter() - begun})  # type: ignore[dict-item]
        return found

    cache.update = update  # type: ignore[method-assign]
    yield
    del cache.update


@contextmanager
def _stages(cache: Any, spent: Counter[str]) -> Iterator[None]:
    """What the C++ kernel spends on placing the token, and on observing and settling: the mean over its threads."""
    from kvdsl.runtime.cpu.backend import STAGES, CpuBackend

    backends = {
        id(layer.backend): layer.backend for layer in cache.layers if isinstance(getattr(layer, "backend", None), CpuBackend)
    }
    for backend in backends.values():
        backend.seconds = torch.zeros(len(STAGES), dtype=torch.float64)
    yield
    for backend in backends.values():
        by_stage = dict(zip(STAGES, (backend.seconds / torch.get_num_threads()).tolist(), strict=True))
        spent.update({"update": by_stage["place"] + by_stage["finish"]})
        backend.seconds = None
