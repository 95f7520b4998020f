"""Caches in files and other processes: `pickle`, `torch.save` and `torch.load`.

A cache is saved with its contents, its params, and its policy's package by name and digest. The model is not saved. `KVCache.attach`
connects a loaded cache to a model, which must be like the original one.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.models import weight
from kvdsl.runtime.hf.versions import text_config

_SIZES = (
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "layer_types", "sliding_window", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip
"""Config entries that determine keys, values and positions."""


# -- the policy ----------------------------------------------------------------------------------------------------------


class Origin(Protocol):
    """How a class was compiled from a policy's text, and how to derive others; see `kvdsl.loading`."""

    def name(self, cache_class: type[Any]) -> str:
        """Return a name to find the class again, here or in another process: `h2o`, `h2o with when prefill`."""

    def with_clauses(self, cache_class: type[Any], clauses: str, settings: Mapping[str, Any]) -> type[Any]:
        """Return the class of its policy with clauses."""

    def made_again(self, module: str, name: str, policy: str, expected: str) -> Any:
        """Create an empty cache of a class that `name` named; see `made_again`."""


def digest(cache_class: type[Any]) -> str:
    """Return a digest of everything generated for the policy, 16 hexadecimal digits."""
    manifest = json.loads(cache_class.spec.cpu_source.with_name("manifest.json").read_text(encoding="utf-8"))
    return hashlib.sha256(json.dumps(manifest["files"], sort_keys=True).encode()).hexdigest()[:16]


def identity(cache_class: type[Any]) -> tuple[Callable[..., Any], tuple[str, str, str, str]]:
    """Return a function that creates an empty cache of the class, and its arguments: module, class, policy and digest."""
    origin: Origin | None = vars(cache_class).get("origin")
    again, policy = (made_again, cache_class.spec.stem) if origin is None else (origin.made_again, origin.name(cache_class))
    return again, (cache_class.__module__, cache_class.__qualname__, policy, digest(cache_class))


def made_again(
    module: str, name: str, policy: str, expected: str, load: Callable[[], type[Any] | None] = lambda: None
) -> Any:
    """Create an empty cache of the class.

    Args:
        load: returns a class of the policy if it is not found by module and name.

    Raises:
        KvdslError: if there is no such class, or if its policy has changed.
    """
    found = ""
    for cache_class in _candidates(module, name, load):
        found = digest(cache_class)
        if found == expected:
            return cache_class.__new__(cache_class)
    if found:
        raise KvdslError(
            f"the cache was saved under another `{policy}` (digest {expected}) than the one that is here ({found}), whose rules may "
            f"differ: compile the policy as it was, with the kvdsl that saved it, or run the prompt again"
        )
    raise KvdslError(
        f"the cache was saved under `{policy}`, and `{module}` is not here: load its policy first, with `kvdsl.load` of its file"
    )


def _candidates(module: str, name: str, load: Callable[[], type[Any] | None]) -> Iterator[type[Any]]:
    """Yield classes of that name: from the module, and from `load`."""
    with suppress(ImportError, AttributeError):
        yield getattr(importlib.import_module(module), name)
    loaded = load()
    if loaded is not None and loaded.__name__ == name:
        yield loaded


# -- the model -----------------------------------------------------------------------------------------------------------


def likeness(model: PreTrainedModel) -> dict[str, Any]:
    """Return what distinguishes models: sizes by name, and a weight of every parameter."""
    config = text_config(model)
    sizes = {name: repr(getattr(config, name)) for name in _SIZES if hasattr(config, name)}
    return {**sizes, "weights": _weights(model)}


def _weights(model: PreTrainedModel) -> dict[str, float]:
    """Return the first number of every parameter; {} for a model without weights."""
    each = model.named_parameters(remove_duplicate=False)  # weights may be tied in one copy of a model and not in another
    held = {name: _in_memory(model, name) if x.device.type == "meta" else x for name, x in each}
    named = {name: x.detach() for name, x in held.items() if x is not None and x.numel()}
    firsts = [(x.to_local() if hasattr(x, "to_local") else x).flatten()[:1].float().cpu() for x in named.values()]
    return dict(zip(named, torch.cat(firsts).tolist(), strict=True)) if firsts else {}


def _in_memory(model: PreTrainedModel, name: str) -> Tensor | None:
    """Return a parameter that accelerate loads for each forward, or None."""
    owner, _, last = name.rpartition(".")
    found = weight(model.get_submodule(owner), last)
    return None if found is None or found.device.type == "meta" else found


def refuse_another(model: PreTrainedModel, left: dict[str, Any]) -> None:
    """Raise KvdslError unless the model is like the saved cache's model. Another dtype is allowed."""
    here = likeness(model)
    for name in left.keys() - {"weights"}:
        if here.get(name) != left[name]:
            raise KvdslError(
                f"the cache was saved for a model whose `{name}` is {left[name]}, but here it is {here.get(name, 'not there')}: "
                f"attach it to the model that it was made for"
            )
    close = here["weights"].keys() == left["weights"].keys() and all(
        abs(value - left["weights"][name]) <= 0.01 * abs(value) + 1e-6 for name, value in here["weights"].items()
    )
    if not close:
        raise KvdslError("the cache was saved for a model with other weights: attach it to the model that it was made for")
