"""Generate text under a policy and under the full cache, with times and sizes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kvdsl.generation.models import ends_of, quiet
from kvdsl.generation.report import Generated
from kvdsl.runtime.hf.layers import native_bytes
from kvdsl.runtime.hf.versions import with_cache

_WARM_UP_TOKENS = 64


class _Clock(BaseStreamer):  # type: ignore[misc]
    """Records the time of every token, and passes on complete text."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None] | None) -> None:
        self.times: list[float] = []
        self._tokenizer, self._write = tokenizer, write
        self._tokens: list[int] = []
        self._written = ""

    def put(self, value: Tensor) -> None:
        """Receive the prompt first, then every token."""
        self.times.append(time.perf_counter())
        if self._write is not None and len(self.times) > 1:
            self._tokens += value.flatten().tolist()
            text = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
            if text.startswith(self._written) and not text.endswith("\N{REPLACEMENT CHARACTER}"):  # an incomplete character
                self._write(text[len(self._written) :])
                self._written = text

    def end(self) -> None:
        """Nothing."""


def generate(
    model: Any, tokenizer: Any, prompt: Sequence[int], new_tokens: int, cache: Any, stop: Sequence[int] = (),
    write: Callable[[str], None] | None = None,
) -> Generated:  # fmt: skip
    """Generate greedily after a prompt, through `model.generate`.

    Args:
        cache: an empty cache of kvdsl or transformers.
        stop: tokens that end the text like the model's own end token, except as its first token.
        write: receives the text piece by piece; the last characters may be missing.
    """
    ids = torch.tensor([list(prompt)], device=model.device)
    clock = _Clock(tokenizer, write)
    with quiet(), torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), **with_cache(cache), max_new_tokens=new_tokens, do_sample=False,
            num_beams=1, streamer=clock, pad_token_id=padding(tokenizer), **_ending(model, stop),
        )  # fmt: skip
    tokens = tuple(out[0, ids.shape[1] :].tolist())
    ms = [(after - before) * 1e3 for before, after in zip(clock.times, clock.times[1:], strict=False)]
    return Generated(
        text=tokenizer.decode(tokens, skip_special_tokens=True), tokens=tokens, prompt_tokens=ids.shape[1],
        ttft_ms=ms[0], token_ms=tuple(ms[1:]), cache_bytes=cache_bytes(cache), full_cache_bytes=full_cache_bytes(cache),
        evicted=_evicted(cache),
    )  # fmt: skip


def _ending(model: Any, stop: Sequence[int]) -> dict[str, Any]:
    return {"eos_token_id": [*ends_of(model), *stop], "min_new_tokens": 1} if stop else {}


def padding(tokenizer: Any) -> int | None:
    """Return a token for padding; None if the tokenizer has no suitable one."""
    pad: int | None = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    return pad


def generate_full(model: Any, tokenizer: Any, prompt: Sequence[int], new_tokens: int) -> Generated:
    """Generate with transformers' own cache and the model's own attention."""
    from transformers import DynamicCache

    return generate(model, tokenizer, prompt, new_tokens, DynamicCache(config=model.config))


def warm_up(model: Any, tokenizer: Any, prompt: Sequence[int], cache: Any) -> None:
    """Run a few tokens untimed, so that kernels are built and threads are awake; the cache is empty afterwards.

    Args:
        prompt: the whole prompt; its beginning is read with the budget of the whole.
    """
    cache.expect_prompt(len(prompt))
    generate(model, tokenizer, prompt[:_WARM_UP_TOKENS], 3, cache)
    cache.reset()


def warm_up_full(model: Any, tokenizer: Any, prompt: Sequence[int]) -> None:
    """Warm up the full cache before it is timed."""
    generate_full(model, tokenizer, prompt[:_WARM_UP_TOKENS], 3)


# -- sizes -------------------------------------------------------------------------------------------------------------


def cache_bytes(cache: Any) -> int:
    """Return the bytes of a cache of kvdsl or transformers."""
    if hasattr(cache, "bytes"):
        return int(cache.bytes())
    return sum(native_bytes(layer) for layer in cache.layers)


def full_cache_bytes(cache: Any) -> int:
    """Return the bytes that keys and values of every token so far would take without eviction."""
    if hasattr(cache, "full_bytes"):
        return int(cache.full_bytes())
    return sum(_layer_bytes(layer) for layer in cache.layers)


def _evicted(cache: Any) -> bool | None:
    """Return whether a cache has evicted tokens; None if the policy never evicts, and for transformers' caches."""
    states = [cache.layers[index].state for index in getattr(cache, "managed", ())]
    live = [((state.position >= 0).sum(-1), state.seen) for state in states if state.allocated and state.spec.bounded]
    return any(bool((held < seen[:, None]).any()) for held, seen in live) if live else None


def _layer_bytes(layer: Any) -> int:
    state = getattr(layer, "state", None)
    if state is None:
        return native_bytes(layer)
    if not state.allocated:
        return 0
    dtype = layer.sync.model.dtype if state.format.packed else state.dtype
    return int(state.position[..., 0].numel() * sum(state.dims) * dtype.itemsize * layer.length)


# -- many rows at once -------------------------------------------------------------------------------------------------


def feed(model: Any, ids: Tensor, cache: Any, chunk: int | None) -> Tensor:
    """Run prompts of equal length through the cache, whole or in chunks; return the last logits, float32 [batch, vocabulary].

    A ratio refers to the whole prompt, regardless of chunks.
    """
    expect_prompt(cache, ids.shape[1])
    size = chunk or ids.shape[1]
    logits = ids.new_zeros(0)
    for part in ids.split(size, dim=1):
        logits = model(input_ids=part, **with_cache(cache), use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].float()


def expect_prompt(cache: Any, tokens: int) -> None:
    """Set the prompt's length in a cache of kvdsl; transformers' caches ignore it."""
    if hasattr(cache, "expect_prompt"):
        cache.expect_prompt(tokens)


def greedy(model: Any, ids: Tensor, new_tokens: int, cache: Any, chunk: int | None = None) -> Tensor:
    """Return greedy continuations of prompts of equal length, `new_tokens` tokens each: int64 [batch, new_tokens]."""
    with torch.inference_mode():
        found = [feed(model, ids.to(model.device), cache, chunk).argmax(-1, keepdim=True)]
        while len(found) < new_tokens:
            logits = model(input_ids=found[-1], **with_cache(cache), use_cache=True).logits
            found.append(logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(found, dim=1).cpu()
