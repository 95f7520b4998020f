"""Attention and mask functions that serve kvdsl caches.

`SlotLayer.update` returns the new keys with the layer attached (`MARK`). The installed functions send a marked key to its layer and every
other key to the original function. Mask functions recognize a kvdsl cache by the type of its length. Models and configs are unchanged and
there is no global state, so any number of models, caches and threads work side by side.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf import mask
from kvdsl.runtime.hf.layer import MARK, SlotLayer, SlotLength

_SERVES = "_kvdsl_serves"
"""Attribute of installed functions."""

_EAGER = "eager_attention_forward"
"""Suffix of the eager attention functions in modeling files."""


# -- installation ------------------------------------------------------------------------------------------------------


def serve_attention(model: nn.Module) -> None:
    """Wrap every attention and mask function that the model can call. Idempotent.

    Eager attention is in no registry: each modeling file has its own.
    """
    for name in tuple(ALL_MASK_ATTENTION_FUNCTIONS):
        _take_place(ALL_MASK_ATTENTION_FUNCTIONS, name, functools.partial(_mask_over, additive=name == "eager"))
    _serve_registry(ALL_ATTENTION_FUNCTIONS)
    for names in {id(found): found for found in map(_globals_of, {type(module) for module in model.modules()})}.values():
        registry = names.get("ALL_ATTENTION_FUNCTIONS")
        if registry is not None and registry is not ALL_ATTENTION_FUNCTIONS:  # a file may have its own registry
            _serve_registry(registry)
        for name, found in tuple(names.items()):
            if name.endswith(_EAGER) and inspect.isfunction(found) and not hasattr(found, _SERVES):
                names[name] = _attention_over(found)


def _globals_of(module: type[nn.Module]) -> dict[str, Any]:
    """Return the global names of a module's forward."""
    found: dict[str, Any] = getattr(inspect.unwrap(module.forward), "__globals__", {})
    return found


def _serve_registry(registry: Any) -> None:
    for name in tuple(registry):
        _take_place(registry, name, _attention_over)


def _take_place(registry: Any, name: str, over: Callable[[Any], Any]) -> None:
    """Wrap a registry's function, in the registry itself or in its class's global mapping, where it was found."""
    own = registry[name]
    if hasattr(own, _SERVES):
        return
    if name in registry._local_mapping:
        registry[name] = over(own)
    else:
        type(registry).register(name, over(own))


# -- attention ---------------------------------------------------------------------------------------------------------


def _attention_over(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an attention function: marked keys go to their layer, others to `own`."""

    @functools.wraps(own)
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, *rest: Any, **kwargs: Any
    ) -> Any:
        layer: SlotLayer | None = getattr(key, MARK, None)
        if layer is None:
            return own(module, query, key, value, attention_mask, *rest, **kwargs)
        dropout = rest[0] if rest else kwargs.pop("dropout", 0.0)
        return _attend(layer, module, query, key, value, attention_mask, dropout, kwargs), None

    setattr(attention, _SERVES, True)
    return attention


def _attend(
    layer: SlotLayer, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float, kwargs: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Attend by the layer of a marked key: [batch, tokens, query_heads, value_dim], contiguous."""
    _refuse(module, dropout, kwargs)
    scaling = kwargs.get("scaling")
    said = mask.read(attention_mask, query, layer)
    out = layer.attend(
        module,
        query,
        key,
        value,
        said.real,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
        slopes=_slopes(kwargs, query.shape[1]),
        positions=kwargs.get("position_ids"),
        asked_window=said.window,
    )
    return out.contiguous()  # models may view it


_REFUSED = {
    "output_attentions": "`output_attentions=True` needs a matrix of all probabilities, which fused attention never builds: "
    "leave it out, or read what the policy keeps with `cache.state(layer)`",
    "position_bias": "attention with a ready-made position bias (T5, MPT) is not supported: it refers to positions of the full text; "
    "ALiBi is supported if the model passes `alibi_slopes`",
    "head_mask": "`head_mask` is not supported together with a kvdsl cache: leave it out",
}

_CHOSEN = ("block_indices", "indices")
"""Arguments with which sparse layers choose keys."""


def _refuse(module: nn.Module, dropout: float, kwargs: dict[str, Any]) -> None:
    """Raise KvdslError for an argument that would change attention silently."""
    for name in _REFUSED.keys() & kwargs.keys():
        if kwargs[name] is not None and kwargs[name] is not False:
            raise KvdslError(_REFUSED[name])
    for name in _CHOSEN:
        if kwargs.get(name) is not None:
            raise KvdslError(
                f"{type(module).__name__} selects the tokens that it attends to (`{name}`): kvdsl does not serve models with such layers"
            )
    if dropout:
        raise KvdslError("attention dropout is active, so cached statistics would be random: call `model.eval()` first")
    if getattr(module, "is_causal", True) is False:  # the argument `is_causal` describes the mask, not the module
        raise KvdslError(f"{type(module).__name__} attends in both directions, but a cache serves causal attention only")


def _slopes(kwargs: dict[str, Any], query_heads: int) -> Tensor | None:
    """Return ALiBi slopes, [query_heads], from the argument named as in FlashAttention.

    Raises:
        KvdslError: if they are not one per query head.
    """
    slopes: Tensor | None = kwargs.get("alibi_slopes")
    if slopes is not None and slopes.shape != (query_heads,):
        raise KvdslError(
            f"`alibi_slopes` is {list(slopes.shape)}, but a cache of slots takes one for each of {query_heads} query heads"
        )
    return slopes


# -- masks -------------------------------------------------------------------------------------------------------------


def _mask_over(own: Callable[..., Any], *, additive: bool) -> Callable[..., Any]:
    """Wrap a mask function: kvdsl caches get `mask.make`, others `own`."""

    @functools.wraps(own)
    def made(*args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("kv_length"), SlotLength):
            return mask.make(kwargs, additive=additive)
        return own(*args, **kwargs)

    setattr(made, _SERVES, True)
    return made
