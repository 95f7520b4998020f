"""What a model tells the caches that it uses: which tokens come in and where they stand, how many of them are guesses, and which text
generation continues.

A cache sees keys and values only. So while caches of a model live, a hook runs before its forwards; and because generation hands
a forward the new tokens alone, some of the methods by which it prepares them look at the whole text. Without a cache of ours all
of this does nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.models import text_model
from kvdsl.runtime.hf.versions import cache_of

_HOOK = "_kvdsl_hook"

_TEXT_HOOK = "_kvdsl_text_hook"


def listen(model: PreTrainedModel) -> None:
    """Have the model tell; asking twice changes nothing."""
    for module, hook, hears in _hooks(model):
        if not hasattr(module, hook):
            setattr(module, hook, module.register_forward_pre_hook(hears, with_kwargs=True))
    for name, listening in _LISTENING.items():
        if hasattr(type(model), name):
            vars(model).setdefault(name, MethodType(listening(getattr(type(model), name)), model))


def stop_listening(model: PreTrainedModel) -> None:
    """Leave the model as it was."""
    for module, hook, _ in _hooks(model):
        if hasattr(module, hook):
            getattr(module, hook).remove()
            delattr(module, hook)
    for name, listening in _LISTENING.items():
        found = vars(model).get(name)
        if isinstance(found, MethodType) and found.__func__ is listening(getattr(type(model), name)):
            del vars(model)[name]


def _hooks(model: PreTrainedModel) -> list[tuple[nn.Module, str, Callable[..., None]]]:
    """Which modules have a hook, by which name, and the hook: the model, and the part of it that knows where tokens stand."""
    part = text_model(model)
    return [(model, _HOOK, _before_forward)] + ([] if part is model else [(part, _TEXT_HOOK, _before_text)])


def _before_text(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The positions that a multimodal model computes itself, with axes for images, reach its text part and no attention."""
    if torch.compiler.is_compiling():
        return
    hear = getattr(cache_of(kwargs), "hear_positions", None)
    if hear is not None:
        hear(kwargs.get("position_ids"))


def _before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    tell = getattr(cache_of(kwargs), "announce", None)
    if tell is not None:
        ids, wanted = kwargs.get("input_ids", args[0] if args else None), kwargs.get("logits_to_keep")
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        _before_text(module, args, kwargs)
        tell(ids, kwargs.get("inputs_embeds"), mask, wanted - 1 if isinstance(wanted, int) and wanted > 0 else None)


# -- generation --------------------------------------------------------------------------------------------------------


@functools.cache
def _preparing_inputs(own: Callable[..., Any]) -> Callable[..., Any]:
    """`prepare_inputs_for_generation`, which looks at the text before its first forward."""

    @functools.wraps(own)
    def prepare(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache, new = cache_of(kwargs), _new_tokens(kwargs)
        if not kwargs.get("is_first_iteration", new != 1) or not hasattr(cache, "check_text"):
            return own(self, input_ids, *args, **kwargs)
        if kwargs.get("use_cache") is False:
            raise KvdslError(
                "`use_cache=False` runs the whole text again for every token, but the cache holds it already: leave out "
                "one of the two"
            )
        mask, embeddings = kwargs.get("attention_mask"), kwargs.get("inputs_embeds")
        _refuse_right_padding(mask)
        cache.check_mask(mask)
        ids, text = (input_ids, input_ids) if embeddings is None else (None, embeddings)
        if new is not None and new < text.shape[1]:
            cache.check_text(ids, embeddings)
        made, guessing = own(self, input_ids, *args, **kwargs), cache.take_guessing()
        if guessing and new is None and _fed(made) == text.shape[1]:
            cache.check_whole(ids, embeddings, _columns(mask, kwargs.get("position_ids")))
        return made

    return prepare


def _fed(made: Any) -> int | None:
    """How many tokens a forward is given, of what was prepared for it; None if that has another form."""
    fed = made.get("inputs_embeds")
    fed = made.get("input_ids") if fed is None else fed
    return fed.shape[1] if isinstance(fed, Tensor) and fed.ndim > 1 else None


def _columns(mask: Any, positions: Any) -> int:
    """How many tokens generation speaks of, cached ones included, by what it has for each; 0 if by nothing."""
    for told in (mask, positions):
        if isinstance(told, Tensor) and told.ndim == 2:
            return told.shape[1]
    return 0


def _new_tokens(kwargs: dict[str, Any]) -> int | None:
    """How many of the last tokens are to be run; None if all are."""
    position = kwargs.get("cache_position")
    told: int | None = kwargs.get("next_sequence_length", None if position is None else position.shape[0])
    return told


@functools.cache
def _preparing_mask(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`_prepare_attention_mask_for_generation`, which takes pad tokens for padding; what a single prompt ends in is text."""

    @functools.wraps(own)
    def prepare(self: Any, inputs: Tensor, settings: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        mask = own(self, inputs, settings, model_kwargs, *args, **kwargs)
        if len(mask) > 1 or not hasattr(cache_of(model_kwargs), "check_text"):
            return mask
        behind_all = mask.flip(1).cumsum(1).flip(1) == 0
        return mask.masked_fill(behind_all, 1)

    return prepare


@functools.cache
def _preparing_guesses(own: Callable[..., Any]) -> Callable[..., Any]:
    """`_get_candidate_generator`, which generation calls before its first forward if an assistant or the text is to guess ahead."""

    @functools.wraps(own)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        cache = cache_of(kwargs.get("model_kwargs") or {})
        if hasattr(cache, "begin_guessing"):
            cache.begin_guessing()
        return own(self, *args, **kwargs)

    return prepare


@functools.cache
def _prefilling(own: Callable[..., Any]) -> Callable[..., Any]:
    """`_prefill`, which cuts what follows the cached text into chunks, if asked, of which each is prepared as if it were the text."""

    @functools.wraps(own)
    def prefill(self: Any, input_ids: Tensor, settings: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        cache, mask = cache_of(model_kwargs), model_kwargs.get("attention_mask")
        chunked = getattr(settings, "prefill_chunk_size", None) is not None
        if chunked and hasattr(cache, "check_text") and (mask is None or mask.shape[1] == input_ids.shape[1]):
            cache.check_text(input_ids, None)
        return own(self, input_ids, settings, model_kwargs, *args, **kwargs)

    return prefill


_LISTENING = {
    "prepare_inputs_for_generation": _preparing_inputs,
    "_prepare_attention_mask_for_generation": _preparing_mask,
    "_get_candidate_generator": _preparing_guesses,
    "_prefill": _prefilling,
}
"""The methods that listen, and how."""


def _refuse_right_padding(mask: Any) -> None:
    """Raise KvdslError if a row of the mask, [batch, tokens], ends in padding that text comes before."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return
    padded = (mask[:, -1] == 0) & (mask != 0).any(1)
    if bool(padded.any()):
        raise KvdslError(
            f"row {int(padded.int().argmax())} of the prompt is padded on the right, but what is generated follows its last "
            f'column: pad on the left (`tokenizer.padding_side = "left"`)'
        )
