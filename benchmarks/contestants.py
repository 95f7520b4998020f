"""Who takes part in `peers.py`: kvdsl's caches, kvpress's presses and transformers' own caches, and how each is made.

Three races. In `prompt` the prompt is pressed to the budget once and what is generated stays, which is kvpress's ordinary use. In
`decode` the budget holds for every token: kvpress by its `PrefillDecodingPress`, which presses the prompt and then, by a
`DecodingPress`, every `every` tokens. In `bits` nothing is evicted, and caches hold keys and values in fewer bits: kvdsl's by
`kv_dtype`, transformers' by its `QuantizedCache`. A budget has no meaning there.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

KVDSL, KVPRESS, TRANSFORMERS = "kvdsl", "kvpress", "transformers"


@dataclass(frozen=True)
class Task:
    """What all contestants of a race do.

    Attributes:
        budget: tokens kept per KV head.
        prompt: tokens read at once.
        new: tokens read one by one after them.
    """

    budget: int
    prompt: int
    new: int


@dataclass(frozen=True)
class Contestant:
    """One cell of the table.

    Attributes:
        policy: the name under which contestants are compared with each other.
        by: whose it is.
        what: the policy file, the press or the cache.
        every: tokens between two evictions while decoding; None where none are evicted there.
        attention: transformers' attention implementation.
    """

    race: str
    policy: str
    by: str
    what: str
    every: int | None = None
    attention: str = "sdpa"

    def begin(self, model: Any, task: Task) -> tuple[Any, AbstractContextManager[Any]]:
        """A cache in which nothing is, and the context in which the text is read with it."""
        if model.config._attn_implementation != self.attention and self.by != KVDSL:
            model.set_attn_implementation(self.attention)
        if self.by == KVPRESS:
            return _dynamic(model, task), _press(self, task)(model)
        make = _kvdsl(self.what) if self.by == KVDSL else _NATIVE[self.what]
        return make(model, task), contextlib.nullcontext()


PRESSES = {
    "streaming_llm": "StreamingLLMPress",
    "snapkv": "SnapKVPress",
    "tova": "TOVAPress",
    "knorm": "KnormPress",
    "observed": "ObservedAttentionPress",
}
"""The policies of kvpress that kvdsl has too. `observed` is the mean attention of all queries, near H2O."""


def _contest(race: str, policy: str, by: str, what: str, every: int | None = None) -> Contestant:
    eager = by == KVPRESS and what == PRESSES["observed"]
    return Contestant(race, policy, by, what, every, "eager" if eager else "sdpa")


ONCE = {name: name if name == "snapkv" else f"{name}_once" for name in PRESSES}
"""The policy of each press; those that are pressed once lie in the gallery."""

WHILE_DECODING = {"streaming_llm": "streaming_llm", "tova": "tova", "knorm": "knorm", "h2o": "observed"}
"""The shipped policies that evict token by token, and the press that comes nearest."""

INTERVALS = (1, 16)
"""How often a `DecodingPress` presses: at every token, as the policies do, and more cheaply at every sixteenth."""

QUANTIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "QuantizedCache, HQQ, 8 bits": ("int8", {"backend": "hqq", "nbits": 8, "axis_key": 1, "axis_value": 1}),
    "QuantizedCache, HQQ, 4 bits": ("int4", {"backend": "hqq", "nbits": 4, "axis_key": 1, "axis_value": 1}),
    "QuantizedCache, quanto, 4 bits": ("int4", {"backend": "quanto", "nbits": 4}),
    "QuantizedCache, fp8": ("fp8", {"backend": "fp8"}),
}
"""Transformers' quantized caches: the `kv_dtype` that comes nearest, and how each is made. HQQ's axis is that of transformers' page."""

CONTESTANTS = (
    _contest("prompt", "full", TRANSFORMERS, "DynamicCache"),
    *(
        one
        for name, press in PRESSES.items()
        for one in (_contest("prompt", name, KVDSL, ONCE[name]), _contest("prompt", name, KVPRESS, press))
    ),
    _contest("decode", "full", TRANSFORMERS, "DynamicCache"),
    _contest("decode", "window", KVDSL, "window", 1),
    _contest("decode", "window", TRANSFORMERS, "DynamicCache, sliding", 1),
    _contest("decode", "window", TRANSFORMERS, "StaticCache, sliding", 1),
    *(
        one
        for name, nearest in WHILE_DECODING.items()
        for one in (
            _contest("decode", name, KVDSL, name, 1),
            *(_contest("decode", name, KVPRESS, PRESSES[nearest], every) for every in INTERVALS),
        )
    ),
    _contest("decode", "roco", KVDSL, "roco", 1),
    _contest("decode", "snapkv", KVPRESS, "SnapKVPress", 1),
    _contest("bits", "full", TRANSFORMERS, "DynamicCache"),
    *(_contest("bits", kv_dtype, KVDSL, f"full, {kv_dtype}") for kv_dtype in ("int8", "int8/int4", "int4", "fp8")),
    *(_contest("bits", bits, TRANSFORMERS, name) for name, (bits, _) in QUANTIZED.items()),
)


# -- kvdsl -------------------------------------------------------------------------------------------------------------


def _kvdsl(policy: str) -> Callable[[Any, Task], Any]:
    from kvdsl.loading import load

    name, _, kv_dtype = policy.partition(", ")
    cache_class = load(name, kv_dtype=kv_dtype or None)
    given = () if name == "full" else ("budget",)
    return lambda model, task: cache_class(model, **{one: task.budget for one in given})  # type: ignore[arg-type]


# -- kvpress -----------------------------------------------------------------------------------------------------------


def _press(one: Contestant, task: Task) -> Any:
    from kvdsl_lab.bench.presses import press

    return press(one.what, task.budget, task.prompt, one.every)


# -- transformers ------------------------------------------------------------------------------------------------------


def _dynamic(model: Any, task: Task) -> Any:
    from transformers import DynamicCache

    return DynamicCache()


def _sliding_config(model: Any, task: Task) -> Any:
    """The model's config as if it had a window in every layer, which is all that caches look at."""
    config = copy.deepcopy(model.config)
    config.sliding_window = task.budget
    config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    return config


def _dynamic_sliding(model: Any, task: Task) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=_sliding_config(model, task))


def _static_sliding(model: Any, task: Task) -> Any:
    from transformers import StaticCache

    return StaticCache(config=_sliding_config(model, task), max_cache_len=task.prompt + task.new)


def _quantized(name: str) -> Callable[[Any, Task], Any]:
    def make(model: Any, task: Task) -> Any:
        from transformers import QuantizedCache

        return QuantizedCache(config=model.config, **QUANTIZED[name][1])

    return make


_NATIVE: dict[str, Callable[[Any, Task], Any]] = {
    "DynamicCache": _dynamic,
    "DynamicCache, sliding": _dynamic_sliding,
    "StaticCache, sliding": _static_sliding,
    **{name: _quantized(name) for name in QUANTIZED},
}
