"""Hooks in `generate` with a kvdsl cache: checks of the text that it continues, and the number of guesses.

`generate` passes only new tokens to a forward. So hooks in methods of the model's class see the whole text first. Without a kvdsl cache
they change nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import GenerationMixin, PreTrainedModel

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.forwards import tokens_of
from kvdsl.runtime.hf.models import changes_frequencies
from kvdsl.runtime.hf.versions import cache_of, is_of_tokens, with_cache

if TYPE_CHECKING:
    from kvdsl.runtime.hf.watch import Watch

_SERVES = "_kvdsl_serves"
"""Attribute of installed methods."""


def serve_generation(model: PreTrainedModel) -> None:
    """Install the hooks in the model's class. Idempotent."""
    for name, over in _OVER.items():
        own = getattr(type(model), name, None)
        if own is not None and not hasattr(own, _SERVES):
            serving = over(own)
            setattr(serving, _SERVES, True)
            setattr(type(model), name, serving)


def _watch_of(cache: Any) -> Watch | None:
    """Return the `Watch` of a kvdsl cache, or None."""
    return getattr(cache, "_watch", None)


# -- the inputs of a forward -------------------------------------------------------------------------------------------


def _over_inputs(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `prepare_inputs_for_generation`: check the text before its first forward, and keep the cache in every forward."""

    @functools.wraps(own)
    def prepare(self: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = cache_of(kwargs)
        watch = _watch_of(cache)
        if watch is None:
            return own(self, input_ids, *args, **kwargs)
        new = _new_tokens(kwargs)
        first = kwargs.get("is_first_iteration", new != 1)
        if first:
            _check_text(watch, input_ids, new, kwargs)
        made = own(self, input_ids, *args, **kwargs)
        if cache_of(made) is not cache and made.get("use_cache", True):
            made = _with_cache_again(self, cache, made, input_ids, args, kwargs)
        if first and watch.guessing and new is None:
            _check_whole(watch, input_ids, made, kwargs)
        watch.guessing = watch.guessing and not first
        return made

    return prepare


def _check_text(watch: Watch, input_ids: Tensor, new: int | None, kwargs: dict[str, Any]) -> None:
    """Raise KvdslError if the text does not continue the cached one."""
    if kwargs.get("use_cache") is False:
        raise KvdslError(
            "`use_cache=False` runs the whole text again for every token, but the cache holds it already: leave out "
            "one of the two"
        )
    mask, (ids, embeddings) = kwargs.get("attention_mask"), _text(input_ids, kwargs)
    if not watch.knows_padding:
        _refuse_right_padding(mask)
    watch.check_mask(mask)
    text = input_ids if embeddings is None else embeddings
    if new is not None and new < text.shape[1]:
        watch.check_text(ids, embeddings)


def _check_whole(watch: Watch, input_ids: Tensor, made: Any, kwargs: dict[str, Any]) -> None:
    """Raise KvdslError if the whole text would run again on a filled cache, before guesses."""
    ids, embeddings = _text(input_ids, kwargs)
    if tokens_of(made) == (input_ids if embeddings is None else embeddings).shape[1]:
        watch.check_whole(ids, embeddings, _columns(kwargs.get("attention_mask"), kwargs.get("position_ids")))


def _text(input_ids: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """Return the text as ids or as embeddings; the other is None."""
    embeddings = kwargs.get("inputs_embeds")
    return (input_ids, None) if embeddings is None else (None, embeddings)


def _with_cache_again(
    model: Any, cache: Any, made: dict[str, Any], input_ids: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return a forward's inputs with the cache, after the model dropped it.

    Phi-3 drops the cache where its text grows beyond the length at which its rotary frequencies change, to read the whole text again. If
    they do change, the cache is reset for that. Otherwise it is kept.

    Raises:
        KvdslError: if the cached text must be read again but is not available.
    """
    cached = cache.get_seq_length()
    if not cached or not changes_frequencies(model):
        return {**made, **GenerationMixin.prepare_inputs_for_generation(model, input_ids, *args, **kwargs)}
    if cache._watch.is_recording or tokens_of(made) != input_ids.shape[1] or input_ids.shape[1] <= cached:
        raise KvdslError(
            f"{type(model).__name__} rotates keys by other frequencies from here on, so that the {cached} cached tokens would have to be "
            f"read again: generate without guesses and from `input_ids`, or begin with a prompt of that length"
        )
    cache.reset()
    # In 4.57 `cache_position` is that of the last token only.
    inputs = {name: value for name, value in made.items() if name != "cache_position"}
    return {**inputs, **with_cache(cache)}


def _columns(mask: Any, positions: Any) -> int:
    """Return how many tokens the mask or the positions cover, cached ones included; 0 if unknown."""
    for covered in (mask, positions):
        if is_of_tokens(covered):
            return covered.shape[1]
    return 0


def _new_tokens(kwargs: dict[str, Any]) -> int | None:
    """Return how many of the last tokens will run, None for all."""
    position = kwargs.get("cache_position")
    count: int | None = kwargs.get("next_sequence_length", None if position is None else position.shape[0])
    return count


# -- a prompt ----------------------------------------------------------------------------------------------------------


def _over_mask(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `_prepare_attention_mask_for_generation`, which takes pad tokens for padding: at the end of a single prompt they are text."""

    @functools.wraps(own)
    def prepare(self: Any, inputs: Tensor, settings: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        mask = own(self, inputs, settings, model_kwargs, *args, **kwargs)
        if len(mask) > 1 or _watch_of(cache_of(model_kwargs)) is None:
            return mask
        behind_all = mask.flip(1).cumsum(1).flip(1) == 0
        return mask.masked_fill(behind_all, 1)

    return prepare


def _over_guesses(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_get_candidate_generator`, which is called before the first forward of assisted decoding or prompt lookup."""

    @functools.wraps(own)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = _watch_of(cache_of(kwargs.get("model_kwargs") or {}))
        if watch is not None:
            watch.guessing = True
        return own(self, *args, **kwargs)

    return prepare


def _over_prefill(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_prefill`, which may split the prompt into chunks and prepares each like a whole text."""

    @functools.wraps(own)
    def prefill(self: Any, input_ids: Tensor, settings: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        watch, mask = _watch_of(cache_of(model_kwargs)), model_kwargs.get("attention_mask")
        if watch is None or getattr(settings, "prefill_chunk_size", None) is None:
            return own(self, input_ids, settings, model_kwargs, *args, **kwargs)
        if mask is None or mask.shape[1] == input_ids.shape[1]:
            watch.check_text(input_ids, None)
        with _padding_known(watch, mask):
            return own(self, input_ids, settings, model_kwargs, *args, **kwargs)

    return prefill


def _over_early_chunks(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_prefill_chunking`, the same in transformers 4.57."""

    @functools.wraps(own)
    def prefill(self: Any, input_ids: Tensor, settings: Any, **kwargs: Any) -> Any:
        watch = _watch_of(cache_of(kwargs))
        if watch is None:
            return own(self, input_ids, settings, **kwargs)
        with _padding_known(watch, kwargs.get("attention_mask")):
            return own(self, input_ids, settings, **kwargs)

    return prefill


@contextmanager
def _padding_known(watch: Watch, mask: Any) -> Iterator[None]:
    """Check the padding of a whole prompt before its chunks, which may end in padding."""
    _refuse_right_padding(mask)
    watch.knows_padding = True
    try:
        yield
    finally:
        watch.knows_padding = False


def _refuse_right_padding(mask: Any) -> None:
    """Raise KvdslError if a row of the prompt's mask, [batch, tokens], is padded on the right."""
    if not is_of_tokens(mask):
        return
    padded = (mask[:, -1] == 0) & (mask != 0).any(1)
    if bool(padded.any()):
        raise KvdslError(
            f"row {int(padded.int().argmax())} of the prompt is padded on the right, but what is generated follows its last "
            f'column: pad on the left (`tokenizer.padding_side = "left"`)'
        )


_OVER = {
    "prepare_inputs_for_generation": _over_inputs,
    "_prepare_attention_mask_for_generation": _over_mask,
    "_get_candidate_generator": _over_guesses,
    "_prefill": _over_prefill,
    "_prefill_chunking": _over_early_chunks,
}
"""Methods to wrap."""
