"""Taking a model's attention, and giving it back.

A bound config's attention is named `kvdsl_sdpa` or `kvdsl_eager`, after the attention that keys without a layer of ours still go to.
Everything that is not a cache of ours therefore runs as before. When the last cache is gone, the config gets its own name back.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from transformers import PreTrainedModel

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.attention import PREFIX, register
from kvdsl.runtime.hf.listening import listen, stop_listening
from kvdsl.runtime.hf.models import text_model, unreachable, unwrap

lock = threading.RLock()
"""One thread at a time changes a model's attention. A cache may be collected, and leave, while its thread makes another."""

_bindings: dict[int, Binding] = {}
"""By the id of their config, which they keep alive."""


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
        with lock:
            self._users += 1
            try:
                if model is not None:
                    self._take_over()
                    part = text_model(model)
                    register()
                    set_attention(part, PREFIX + _delegate(part, self.own))
                    self._models.add(model)
                    listen(model)
            except BaseException:
                self.leave()
                raise

    def _take_over(self) -> None:
        """What somebody has set since is the model's own attention from now on."""
        if not self._config._attn_implementation.startswith(PREFIX):
            self.own = self._config._attn_implementation

    def leave(self) -> None:
        """One user less."""
        with lock:
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
    """Route the attention of a model that can be served through kvdsl, for one user more, who leaves the binding at the end.

    Raises:
        KvdslError: if its attention cannot be reached; it is then as it was.
    """
    config = text_model(model).config
    with lock:
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
    with lock:
        if id(config) in _bindings:
            _bindings[id(config)].give_back()
        config._attn_implementation = config._attn_implementation.removeprefix(PREFIX)  # of a copy of a bound model


def set_attention(part: PreTrainedModel, name: str) -> None:
    """Have the model call this attention, by the name that transformers knows it by.

    Raises:
        KvdslError: if it does not let itself be told.
    """
    if part.config._attn_implementation == name:
        return
    part.set_attn_implementation(name)
    if part.config._attn_implementation != name:
        raise KvdslError(unreachable(part))


def _delegate(part: PreTrainedModel, own: str) -> str:
    """What keys without a layer of ours go to: the model's own attention, or its nearest relative (for flash kernels).

    transformers 4.57 lets models with capped logits run on `sdpa`, which drops the cap: eager attention then is right.
    """
    if own == "eager" or getattr(part.config, "attn_logit_softcapping", None) is not None:
        return "eager"
    return "sdpa" if getattr(part, "_supports_sdpa", False) else "eager"
