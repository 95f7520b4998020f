"""What the layers of one cache must agree on: whose turn it is in a forward, and how far they all are."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.counting import Counting
from kvdsl.runtime.hf.models import releases
from kvdsl.runtime.hf.text import Text
from kvdsl.runtime.hf.versions import CACHE
from kvdsl.runtime.lifetimes import Linked, Weakly, plain_tensors
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.tensors import stays_where_it_is

_parts: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()
"""Every model's modules, as they were last looked for."""


class Layer(Protocol):
    """What the layers of one cache must know of each other; see `SlotLayer`."""

    counted: int
    state: SlotState

    @property
    def index(self) -> int:
        """The layer's number in the model."""

    @property
    def length(self) -> int:
        """Tokens that the model has seen, padding included."""


class LayerSync(Linked):
    """Shared by the layers of one cache.

    The layers count the tokens of their own forwards. A compiled forward cannot: a number that differs from step to step would
    be compiled anew each time. It adds to a tensor instead, from which the layers' counts are mended when somebody asks.

    Attributes:
        running: whether a forward runs that was given the cache.
        open: the index of the layer that was given keys and whose attention has not run yet, or None.
        served: how many layers this forward has been through.
        is_alone: whether the policy manages every layer of the model.
        guesses: how many of this forward's last tokens an assistant guessed, or None where nobody has said.
        one_by_one: whether several tokens of one forward are no prompt, once there is one.
        text: which tokens came in, if the model says so.
        counting: where the model puts them, for compact positions.
        total: tokens that the model has seen, int64 [], or None before the first forward.
        ahead: whether compiled forwards have added tokens that the layers have not counted.
    """

    LINKS = ("_model",)

    def __init__(self, model: PreTrainedModel) -> None:
        self.running = False
        self.open: int | None = None
        self.served = 0
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
        """The model that the cache was made for, if it is still there."""
        return None if self._model is None else self._model()

    @property
    def is_attached(self) -> bool:
        """Whether the cache was made for a model, or has got one since it was loaded."""
        return self._model is not None

    def attach(self, model: PreTrainedModel) -> None:
        """Let the cache go on with this model."""
        self._model, self._releases = weakref.ref(model), releases(model)

    def require_model(self) -> None:
        """Raise KvdslError if the cache was loaded without a model, or if its model was released from it."""
        if self._model is None:
            raise KvdslError("the cache was loaded and belongs to no model yet: call `cache.attach(model)` first")
        if self._releases != releases(self._model()):
            raise KvdslError(
                "`release` was called for the cache's model, so that the cache cannot be used any more: construct another one"
            )

    def enter(self, layer: Layer) -> None:
        """A layer joins, in the model's order."""
        self._first = self._first if self._layers else layer.index
        self._last = layer.index
        self._layers.append(Weakly(layer))

    def begin_forward(self) -> None:
        """Begin a forward that was given the cache.

        Raises:
            KvdslError: if the last one was interrupted.
        """
        if self.open is not None:
            raise self._not_reached()
        self.running, self.served = True, 0

    def end_forward(self, module: nn.Module, by_its_name: bool) -> None:
        """Raise KvdslError unless every layer has been through the forward once. A compiled forward was looked at when it was traced."""
        if self.served == len(self._layers) or self.ahead:
            return
        layers = [layer() for layer in self._layers]
        furthest = max(layer.length for layer in layers)
        missed = [layer.index for layer in layers if self.served == 0 or layer.length < furthest]
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
            f"{type(module).__name__} was given a kvdsl cache and {what}, so that what it returned is not what the policy says: "
            f"{advice}; call `cache.reset()` before the next text"
        )

    def begin(self, layer: Layer, tokens: int) -> None:
        """A layer is given keys.

        Raises:
            KvdslError: if the last layer's keys never met our attention, or if the last forward was cut short.
        """
        if self.open is not None:
            raise self._not_reached()
        if torch.compiler.is_compiling():
            self.open = layer.index
            return
        first, last = self._layers[0](), self._layers[-1]()
        level = last.length == layer.length if layer is first else first.length == layer.length + tokens
        if not level:
            raise KvdslError("the last forward was interrupted between two layers: call `cache.reset()` and start again")
        self.open = layer.index

    def end(self, layer: Layer) -> None:
        """The layer's attention runs.

        Raises:
            KvdslError: if it already ran on these keys.
        """
        if self.open != layer.index:
            raise KvdslError(
                f"layer {layer.index}'s keys are attended to more than once in a forward (shared between layers), which a "
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
        """How many tokens of this forward are guesses, if somebody has said; once all layers have asked, nobody has."""
        guesses = self.guesses
        if layer.index == self._last:
            self.guesses = None
        return guesses

    def add(self, layer: Layer, tokens: int) -> None:
        """A layer has served these tokens; the last one counts for all."""
        if layer.index != self._last:
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
        """Whether only the tensor knows the length: in a compiled forward, and on a GPU behind one, which runs still."""
        return torch.compiler.is_compiling() or (self.ahead and self.total is not None and self.total.device.type != "cpu")

    def catch_up(self) -> None:
        """Have the layers count what compiled forwards have added."""
        assert self.total is not None
        total = int(self.total)
        for layer in self._layers:
            layer().counted = total
        self.ahead = False

    def forget(self) -> None:
        """Nothing has been seen."""
        self.open, self.guesses, self.total, self.ahead = None, None, None, False
        self.text.forget()
        self.counting.forget()

    def is_first(self, layer: Layer) -> bool:
        """Whether the layer is the first of ours that a forward meets."""
        return layer.index == self._first

    def require_owner(self, module: nn.Module) -> None:
        """Raise KvdslError unless the module is part of the model that the cache was made for."""
        model = self.model
        if model is not None and module not in _parts.get(model, ()):
            _parts[model] = weakref.WeakSet(model.modules())  # looked for once, and again if a part has joined
        if model is None or module not in _parts[model]:
            raise KvdslError(
                "this cache was made for another model: construct a cache for the model that you run (each model has its own)"
            )
