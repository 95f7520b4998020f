"""State shared by the layers of one cache: the progress of a forward, and the length."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvdsl.errors import KvdslError
from kvdsl.runtime.forward import Forward, Later
from kvdsl.runtime.hf.counting import Counting
from kvdsl.runtime.hf.models import releases
from kvdsl.runtime.hf.text import Text
from kvdsl.runtime.hf.versions import CACHE
from kvdsl.runtime.lifetimes import Linked, Weakly, plain_tensors
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.tensors import stays_where_it_is

_parts: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()
"""Every model's modules, cached."""


class Layer(Protocol):
    """What `LayerSync` reads of `SlotLayer`."""

    counted: int
    state: SlotState

    @property
    def index(self) -> int: ...

    @property
    def length(self) -> int: ...


class LayerSync(Linked):
    """Shared by the layers of one cache.

    The layers count the tokens of their own forwards. In a compiled forward, a changing number would cause recompilation, so it adds to a
    tensor, from which the layers' counts are updated when they are read.

    Attributes:
        running: whether a forward with this cache runs.
        open: index of the layer that received keys and has not attended yet, or None.
        served: how many layers have attended in this forward.
        is_alone: whether the policy manages every layer of the model.
        forward: what the layers of the running forward share, or None.
        later: questions for the end of a forward that may run again; None if each layer asks.
        may_run_again: whether a forward may run a second time; False once one did.
        guesses: how many of this forward's last tokens are guesses, or None.
        one_by_one: whether several tokens of one forward are served one by one, once there is a prompt.
        text: the tokens so far, if the model passes them.
        counting: their position ids, for compact positions.
        total: tokens that the model has seen, int64 [], or None before the first forward.
        ahead: whether compiled forwards added tokens that the layers have not counted.
    """

    LINKS = ("_model", "forward", "later")

    def __init__(self, model: PreTrainedModel) -> None:
        self.running = False
        self.open: int | None = None
        self.served = 0
        self.forward: Forward | None = None
        self.later: Later | None = None
        self.may_run_again = True
        self.guesses: int | None = None
        self.one_by_one = False
        self.text = Text()
        self.counting = Counting()
        self.total: Tensor | None = None
        self.ahead = False
        self._model: weakref.ref[PreTrainedModel] | None = weakref.ref(model)
        self._releases = releases(model)
        self._layers: list[Weakly[Layer]] = []
        self._first, self._last = -1, -1
        self.is_alone = True

    @property
    def model(self) -> PreTrainedModel | None:
        """The model that the cache was made for, if it is alive."""
        return None if self._model is None else self._model()

    @property
    def is_attached(self) -> bool:
        """Whether the cache has a model."""
        return self._model is not None

    def attach(self, model: PreTrainedModel) -> None:
        """Set the model."""
        self._model, self._releases = weakref.ref(model), releases(model)

    def require_model(self) -> None:
        """Raise KvdslError if the cache has no model, or was released from it."""
        if self._model is None:
            raise KvdslError("the cache was loaded and belongs to no model yet: call `cache.attach(model)` first")
        if self._releases != releases(self._model()):
            raise KvdslError(
                "`release` was called for the cache's model, so the cache is no longer valid: construct another one"
            )

    def enter(self, layer: Layer) -> None:
        """Add a layer, in the model's order."""
        self._first = self._first if self._layers else layer.state.layer
        self._last = layer.state.layer
        self._layers.append(Weakly(layer))

    def begin_forward(self, *, defers: bool) -> None:
        """Begin a forward with this cache.

        Args:
            defers: whether the layers can run again, so that questions to the device wait for the end.

        Raises:
            KvdslError: if the last one was interrupted.
        """
        if self.open is not None:
            raise self._not_reached()
        if not self.is_right():
            raise KvdslError("the last forward was interrupted before its end: call `cache.reset()` and start again")
        # Other processes would wait for the second run.
        with_others = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.later = Later() if defers and self.may_run_again and self.is_alone and not with_others else None
        self.running, self.served, self.forward = True, 0, Forward(self.later)

    def is_right(self) -> bool:
        """Ask what was deferred: whether the forward need not run again."""
        return self.later is None or self.later.is_right()

    def begin_again(self) -> None:
        """Begin the cache's first forward again, without questions that wait."""
        self.may_run_again, self.later, self.forward, self.served = False, None, Forward(), 0
        if self.total is not None:
            self.total.zero_()

    def stop_forward(self) -> None:
        """Record that the forward ended or failed."""
        self.running, self.forward = False, None

    def end_forward(self, module: nn.Module, by_its_name: bool) -> None:
        """Raise KvdslError unless every layer attended once. For compiled forwards this was checked when they were traced."""
        if self.served == len(self._layers) or self.ahead:
            return
        layers = [layer() for layer in self._layers]
        furthest = max(layer.length for layer in layers)
        missed = [layer.state.layer for layer in layers if self.served == 0 or layer.length < furthest]
        if self.open is not None:
            self.running = True
            raise self._not_reached()
        what = f"ran without it in layers {missed}" if missed else "went through its layers more than once"
        advice = (
            "kvdsl does not serve this way of calling it"
            if by_its_name
            else f"pass it as `{CACHE}=cache`, its name in this release"
        )
        raise KvdslError(
            f"{type(module).__name__} was given a kvdsl cache and {what}, so its output is not the policy's: "
            f"{advice}; call `cache.reset()` before the next text"
        )

    def begin(self, layer: Layer, tokens: int) -> None:
        """Record that a layer received keys.

        Raises:
            KvdslError: if the last layer's keys never reached kvdsl's attention, or if the last forward was interrupted.
        """
        if self.open is not None:
            raise self._not_reached()
        if torch.compiler.is_compiling():
            self.open = layer.state.layer
            return
        first, last = self._layers[0](), self._layers[-1]()
        level = last.length == layer.length if layer is first else first.length == layer.length + tokens
        if not level:
            raise KvdslError("the last forward was interrupted between two layers: call `cache.reset()` and start again")
        self.open = layer.state.layer

    def end(self, layer: Layer) -> None:
        """Record that the layer attends.

        Raises:
            KvdslError: if it already attended to these keys.
        """
        if self.open != layer.state.layer:
            raise KvdslError(
                f"layer {layer.state.layer}'s keys are attended to more than once in a forward (shared between layers), which a "
                f"cache that observes attention does not support"
            )
        self.open = None
        if not torch.compiler.is_compiling():
            self.served += 1

    def _not_reached(self) -> KvdslError:
        reached = f"the keys of layer {self.open} did not reach kvdsl's attention: "
        if self.running:
            return KvdslError(
                f"{reached}the model changes them after caching (as compressed latents, for example) or calls an attention of its own"
            )
        return KvdslError(
            f"{reached}the last forward was interrupted between two layers; call `cache.reset()` and start again"
        )

    def take_guesses(self, layer: Layer) -> int | None:
        """Return how many tokens of this forward are guesses, or None. The last layer clears the number."""
        guesses = self.guesses
        if layer.state.layer == self._last:
            self.guesses = None
        return guesses

    def add(self, layer: Layer, tokens: int) -> None:
        """Add served tokens to `total`; only the last layer counts."""
        if layer.state.layer != self._last:
            return
        if self.total is None:
            with plain_tensors():
                self.total = torch.zeros((), dtype=torch.int64, device=layer.state.seen.device)
            stays_where_it_is(self.total)
        self.total.add_(tokens)

    @property
    def length(self) -> int:
        """Tokens that the model has seen, padding included."""
        return self._layers[0]().length

    def is_tensor(self) -> bool:
        """Whether the length must be read from `total`: in a compiled forward, and on a GPU after one, which may still run."""
        return torch.compiler.is_compiling() or (self.ahead and self.total is not None and self.total.device.type != "cpu")

    def catch_up(self) -> None:
        """Update the layers' counts from `total`."""
        assert self.total is not None
        total = int(self.total)
        for layer in self._layers:
            layer().counted = total
        self.ahead = False

    def forget(self) -> None:
        """Drop everything about the text."""
        self.open, self.guesses, self.total, self.ahead, self.later = None, None, None, False, None
        self.text.forget()
        self.counting.forget()

    def is_first(self, layer: Layer) -> bool:
        """Whether the layer is the first managed one in a forward."""
        return layer.state.layer == self._first

    def require_owner(self, module: nn.Module) -> None:
        """Raise KvdslError unless the module is part of the cache's model."""
        model = self.model
        if model is not None and module not in _parts.get(model, ()):
            _parts[model] = weakref.WeakSet(model.modules())  # cached; searched again if a part was added
        if model is None or module not in _parts[model]:
            raise KvdslError(
                "this cache was made for another model: construct a cache for the model that you run (each model has its own)"
            )
