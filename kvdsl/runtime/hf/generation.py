"""What generation tells the cache that it uses: the text that it continues, how many tokens are guesses, and what it is about to run.

Generation hands a forward the new tokens alone. So some of the methods by which it prepares them look at the whole text first. The
methods of the model's class are replaced; without a cache of ours they do what they did.
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
from kvdsl.runtime.hf.versions import cache_of, with_cache

if TYPE_CHECKING:
    from kvdsl.runtime.hf.watch import Watch

_SERVES = "_kvdsl_serves"
"""An attribute of the methods that look for a cache."""


def serve_generation(model: PreTrainedModel) -> None:
    """Have the methods of the model's class look for caches of ours; doing it again changes nothing."""
    for name, over in _OVER.items():
        own = getattr(type(model), name, None)
        if own is not None and not hasattr(own, _SERVES):
            serving = over(own)
            setattr(serving, _SERVES, True)
            setattr(type(model), name, serving)


def _watch_of(cache: Any) -> Watch | None:
    """What watches a cache, if it is one of ours."""
    return getattr(cache, "_watch", None)


# -- the inputs of a forward -------------------------------------------------------------------------------------------


def _over_inputs(own: Callable[..., Any]) -> Callable[..., Any]:
    """`prepare_inputs_for_generation`, which looks at the text before its first forward, and keeps the cache in every one."""

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
    """Raise KvdslError if the text that generation is about to go on with does not continue what is cached."""
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
    """Raise KvdslError if the whole text is about to run where guesses begin on a filled cache."""
    ids, embeddings = _text(input_ids, kwargs)
    if tokens_of(made) == (input_ids if embeddings is None else embeddings).shape[1]:
        watch.check_whole(ids, embeddings, _columns(kwargs.get("attention_mask"), kwargs.get("position_ids")))


def _text(input_ids: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """The text as ids or as embeddings, of which one is None."""
    embeddings = kwargs.get("inputs_embeds")
    return (input_ids, None) if embeddings is None else (None, embeddings)


def _with_cache_again(
    model: Any, cache: Any, made: dict[str, Any], input_ids: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The inputs of a forward that the model has prepared without its cache, with the cache.

    Phi-3 drops the cache where its text grows past the length from which other frequencies rotate keys, in order to read the whole text
    anew. If its frequencies do change, the cache is emptied for that; else it goes on.

    Raises:
        KvdslError: if the cached text would have to be read anew, and is not at hand.
    """
    cached = cache.get_seq_length()
    if not cached or not changes_frequencies(model):
        return {**made, **GenerationMixin.prepare_inputs_for_generation(model, input_ids, *args, **kwargs)}
    if cache._watch.is_recording or tokens_of(made) != input_ids.shape[1] or input_ids.shape[1] <= cached:
        raise KvdslError(
            f"{type(model).__name__} rotates keys by other frequencies from here on, so that the {cached} cached tokens would have to be "
            f"read anew: generate without guesses and from `input_ids`, or begin with a prompt of that length"
        )
    cache.reset()
    anew = {name: value for name, value in made.items() if name != "cache_position"}  # in 4.57 that of the last token alone
    return {**anew, **with_cache(cache)}


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


# -- a prompt ----------------------------------------------------------------------------------------------------------


def _over_mask(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`_prepare_attention_mask_for_generation`, which takes pad tokens for padding; what a single prompt ends in is text."""

    @functools.wraps(own)
    def prepare(self: Any, inputs: Tensor, settings: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        mask = own(self, inputs, settings, model_kwargs, *args, **kwargs)
        if len(mask) > 1 or _watch_of(cache_of(model_kwargs)) is None:
            return mask
        behind_all = mask.flip(1).cumsum(1).flip(1) == 0
        return mask.masked_fill(behind_all, 1)

    return prepare


def _over_guesses(own: Callable[..., Any]) -> Callable[..., Any]:
    """`_get_candidate_generator`, which generation calls before its first forward if an assistant or the text is to guess ahead."""

    @functools.wraps(own)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = _watch_of(cache_of(kwargs.get("model_kwargs") or {}))
        if watch is not None:
            watch.guessing = True
        return own(self, *args, **kwargs)

    return prepare


def _over_prefill(own: Callable[..., Any]) -> Callable[..., Any]:
    """`_prefill`, which may cut what follows the cached text into chunks, and prepares each as if it were the text."""

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
    """`_prefill_chunking`, which does so in transformers 4.57."""

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
    """Look at the padding of a whole prompt, of which a chunk may end in a gap."""
    _refuse_right_padding(mask)
    watch.knows_padding = True
    try:
        yield
    finally:
        watch.knows_padding = False


def _refuse_right_padding(mask: Any) -> None:
    """Raise KvdslError if a row of the prompt's mask, [batch, tokens], ends in padding that text comes before."""
    if not isinstance(mask, Tensor) or mask.ndim != 2:
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
"""The methods that look for a cache, and how."""
