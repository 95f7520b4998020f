"""Which models can be served, and giving and taking back their attention.

A bound config's attention is named `kvdsl_sdpa` or `kvdsl_eager`, after the attention that keys without a layer of ours still go to.
Everything that is not a cache of ours therefore runs as before. When the last cache is gone, the config gets its own name back.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.attention import PREFIX, register
from kvdsl.runtime.hf.listening import listen, stop_listening
from kvdsl.runtime.hf.versions import is_full, layer_types, native_layers, sliding_window, text_config

_PROBED = "_kvdsl_probed"

_lock = threading.RLock()
"""One thread at a time changes a model's attention. A cache may be collected, and leave, while its thread makes another."""

_bindings: dict[int, Binding] = {}
"""By the id of their config, which they keep alive."""


def unwrap(model: Any) -> PreTrainedModel:
    """The transformers model inside a compiled, PEFT or data-parallel wrapper.

    Raises:
        KvdslError: if there is none.
    """
    found = model
    for _ in range(4):
        if isinstance(found, PreTrainedModel):
            return found
        if hasattr(found, "_orig_mod"):
            found = found._orig_mod
        elif hasattr(found, "get_base_model"):
            found = found.get_base_model()
        elif isinstance(found, nn.Module) and hasattr(found, "module"):
            found = found.module
    raise KvdslError(f"the model must be a transformers model, not {_described(model)}")


def _described(thing: Any) -> str:
    if isinstance(thing, type):
        return f"the class {thing.__name__} (construct or load it first)"
    return f"{type(thing).__name__} {thing!r}" if isinstance(thing, (str, int, float)) else type(thing).__name__


class Binding:
    """A text config whose attention is ours for as long as any cache needs it: then it is given back.

    The models that share a config share its binding.
    """

    def __init__(self, config: Any) -> None:
        self.own = config._attn_implementation.removeprefix(PREFIX)
        self._config = config
        self._users = 0
        self._models: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()

    def enter(self, model: PreTrainedModel | None = None) -> None:
        """One more user, of this model.

        Raises:
            KvdslError: if the model cannot be served.
        """
        with _lock:
            self._users += 1
            try:
                if model is not None:
                    _route(model, text_model(model), self.own)
                    self._models.add(model)
                    listen(model)
            except BaseException:
                self.leave()
                raise

    def leave(self) -> None:
        """One user less."""
        with _lock:
            self._users -= 1
            if _bindings.get(id(self._config)) is not self:
                return  # released before
            if self._users == 0:
                self.give_back()

    def last_as_long_as(self, cache: Any) -> None:
        """Have the user that has entered leave when the cache is gone."""
        weakref.finalize(cache, self.leave).atexit = False

    def give_back(self) -> None:
        """The config and its models are as they were."""
        del _bindings[id(self._config)]
        for model in self._models:
            stop_listening(model)
        if self._config._attn_implementation.startswith(PREFIX):
            self._config._attn_implementation = self.own


def bind(model: PreTrainedModel) -> Binding:
    """Route the model's attention through kvdsl for one user more, who leaves the binding at the end.

    The first time it is checked that this changes nothing by itself.

    Raises:
        KvdslError: if the model cannot be served; its attention is then as it was.
    """
    refuse_unsupported(model)
    config = text_model(model).config
    with _lock:
        if id(config) not in _bindings:
            _bindings[id(config)] = Binding(config)
        found = _bindings[id(config)]
        found.enter(model)
    return found


def release(model: Any) -> None:
    """Give the model its own attention back; caches that were made for it can no longer be used."""
    model = unwrap(model)
    stop_listening(model)
    config = text_model(model).config
    with _lock:
        if id(config) in _bindings:
            _bindings[id(config)].give_back()
        config._attn_implementation = config._attn_implementation.removeprefix(PREFIX)  # of a copy of a bound model


def _route(model: PreTrainedModel, part: PreTrainedModel, own: str) -> None:
    before, name = part.config._attn_implementation, PREFIX + _delegate(part, own)
    register()
    try:
        if not getattr(part, _PROBED, False):
            _probe(model, part, name)
        elif before != name:
            _set_attention(part, name)
    except BaseException:
        part.set_attn_implementation(before)
        raise


def _probe(model: PreTrainedModel, part: PreTrainedModel, name: str) -> None:
    """Bind for the first time: through slots that keep everything the logits must be those of eager attention."""
    from kvdsl.runtime.hf import probe

    _set_attention(part, "eager")
    expected = probe.plain_logits(model)
    _set_attention(part, name)
    probe.compare(model, expected)
    setattr(part, _PROBED, True)


def _set_attention(part: PreTrainedModel, name: str) -> None:
    part.set_attn_implementation(name)
    if part.config._attn_implementation != name:
        raise KvdslError(_unreachable(part))


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The outermost part of the model that has the text config: the model itself, or a multimodal model's decoder."""
    config = text_config(model)
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part.config is config:
            return part
    return model


def managed_windows(model: PreTrainedModel) -> dict[int, int | None]:
    """The layers that a policy manages and the window in which each attends, None for the whole text.

    Raises:
        KvdslError: if there is none.
    """
    native = native_layers(text_config(model))
    full: dict[int, int | None] = {index: None for index, layer in enumerate(native) if is_full(layer)}
    if full:
        return full
    windows = {index: sliding_window(layer) for index, layer in enumerate(native)}
    if native and all(window is not None for window in windows.values()):
        return windows
    kinds = sorted({type(layer).__name__ for layer in native})
    raise KvdslError(f"{type(model).__name__} has no layer with an ordinary cache to manage, only {', '.join(kinds)}")


def _delegate(part: PreTrainedModel, own: str) -> str:
    """What keys without a layer of ours go to: the model's own attention, or its nearest relative (for flash kernels).

    transformers 4.57 lets models with capped logits run on `sdpa`, which drops the cap: eager attention then is right.
    """
    if own == "eager" or getattr(part.config, "attn_logit_softcapping", None) is not None:
        return "eager"
    return "sdpa" if getattr(part, "_supports_sdpa", False) else "eager"


# -- refusals ----------------------------------------------------------------------------------------------------------


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raise KvdslError for a model that would be served wrongly or not at all, as far as its class and config tell."""
    config = text_config(model)
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise KvdslError(f"{name} is an encoder-decoder model; kvdsl caches serve decoder-only models")
    if not getattr(type(text_model(model)), "_can_set_attn_implementation", lambda: True)():
        raise KvdslError(_unreachable(model))
    if "chunked_attention" in (layer_types(config) or ()) or getattr(config, "attention_chunk_size", None):
        raise KvdslError(
            f"{name} attends in chunks of {getattr(config, 'attention_chunk_size', '?')} tokens, which a policy over the whole "
            f"text would change: kvdsl does not serve chunked attention"
        )
    if getattr(config, "output_attentions", False):
        raise KvdslError(
            f"{name}'s config asks for `output_attentions`, which fused attention never builds: set it to False first"
        )
    managed_windows(model)


def _unreachable(model: PreTrainedModel) -> str:
    return (
        f"the attention of {type(model).__name__} cannot be reached: the model does not call it through transformers' "
        f"AttentionInterface, so no cache can observe or replace it; use a model that does (Llama, Qwen, Mistral, Gemma, "
        f"Phi-3, GPT-NeoX and most others)"
    )
