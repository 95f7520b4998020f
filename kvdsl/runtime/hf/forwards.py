"""Hooks before and after a model's forward with a kvdsl cache.

A cache layer sees keys and values only. So the classes of a served model get a `__call__` that looks for a kvdsl cache among its
arguments. Before the forward, the cache records the new tokens and their positions. After it, the cache checks that every managed layer
ran once. Instances are unchanged, so a model can be pickled; forwards without a kvdsl cache run as before.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import CACHE, cache_of

if TYPE_CHECKING:
    from kvdsl.runtime.hf.watch import Watch

_SERVES = "_kvdsl_serves"
"""Attribute of installed `__call__`s."""


def serve_forwards(model: PreTrainedModel) -> None:
    """Install the hook in the classes of the model and its parts. Idempotent."""
    for part in {type(module) for module in model.modules() if isinstance(module, PreTrainedModel)}:
        if not hasattr(part.__call__, _SERVES):
            part.__call__ = _over(part.__call__)  # type: ignore[method-assign]


def _over(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        watch = _watch_among(args, kwargs)
        if watch is None:
            return own(self, *args, **kwargs)
        if torch.compiler.is_compiling():
            watch.hear_ids(kwargs.get("input_ids", args[0] if args else None))
            return own(self, *args, **kwargs)
        return _watched(watch, own, self, args, kwargs)

    setattr(call, _SERVES, True)
    return call


def _watch_among(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch | None:
    """Return the `Watch` of a kvdsl cache among a forward's arguments, or None."""
    named = cache_of(kwargs)
    if named is not None:
        return getattr(named, "_watch", None)
    return next((given._watch for given in args if hasattr(given, "_watch")), None) if args else None


def _watched(
    watch: Watch, own: Callable[..., Any], model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run a forward between `begin_forward` and `end_forward`. Inner models of a running forward only record positions."""
    given = kwargs if not args else {**dict(zip(_names(type(model)), args, strict=False)), **kwargs}
    if watch.is_running:
        watch.hear_positions(model, given.get("position_ids"))
        return own(model, *args, **kwargs)
    _refuse_checkpointing(model)
    wanted = given.get("logits_to_keep")
    guesses = wanted - 1 if isinstance(wanted, int) and wanted > 0 else None
    try:
        watch.begin_forward(given.get("input_ids"), given.get("inputs_embeds"), guesses)
        watch.hear_positions(model, given.get("position_ids"))
        out = own(model, *args, **kwargs)
        if watch.begins_again():
            watch.hear_positions(model, given.get("position_ids"))
            out = own(model, *args, **kwargs)
    finally:
        watch.stop_forward()
    watch.end_forward(model, by_its_name=CACHE in given)
    return out


@functools.cache
def _names(model: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of a forward's arguments in order."""
    return tuple(inspect.signature(model.forward).parameters)[1:]


def _refuse_checkpointing(model: nn.Module) -> None:
    """Raise KvdslError for gradient checkpointing: transformers then runs layers twice, without the cache."""
    if not model.training or not torch.is_grad_enabled():
        return
    if any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise KvdslError(
            "gradient checkpointing runs the layers of a model in training mode without the cache: leave the cache out to train, or "
            "call `model.eval()` to generate"
        )


def tokens_of(given: dict[str, Any]) -> int | None:
    """Return the number of tokens passed to a forward, or None if the arguments have another form."""
    fed = given.get("inputs_embeds")
    fed = given.get("input_ids") if fed is None else fed
    return fed.shape[1] if isinstance(fed, Tensor) and fed.ndim > 1 else None
