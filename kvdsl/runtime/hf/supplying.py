"""Per-token values of a cache: from functions of an attention module's inputs, from `give`, or from marks in the text.

Attention sees queries, keys and values only. So if a cache has functions, the classes of its model's attention modules get a `__call__`
that records their inputs for the attention that follows.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.lifetimes import Linked
from kvdsl.runtime.marks import Marks
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.supplied import check, in_rows, refuse_unknown
from kvdsl.runtime.torch.tokens import new_positions

_HEARS = "_kvdsl_hears"
"""Attribute of installed `__call__`s."""

Supplier = Callable[[nn.Module, Tensor], Tensor]
"""Computes a float tensor [batch, KV heads or 1, tokens] from an attention module and its hidden states, [batch, tokens, any]."""


class Supplying(Linked):
    """Per-token values, shared by the layers of one cache.

    Attributes:
        functions: by the value's name; empty after unpickling until `use`.
        marks: the spans of the text.
        ids: token ids of the current forward, [batch, tokens], or None.
    """

    LINKS = ("_heard", "ids")

    def __init__(self) -> None:
        self.functions: dict[str, Supplier] = {}
        self.marks = Marks()
        self.ids: Tensor | None = None
        self._given: dict[int, dict[str, Tensor]] = {}
        self._heard: tuple[nn.Module, Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Supplying:
        """Copy given values and marks; share the functions."""
        made = Supplying()
        made.functions, made.marks = dict(self.functions), copy.deepcopy(self.marks, memo)
        made._given = {layer: dict(values) for layer, values in self._given.items()}
        memo[id(self)] = made
        return made

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"functions": {}}

    def give(self, state: SlotState, values: Mapping[str, Tensor]) -> None:
        """Set values for a layer's next forward. They take precedence over functions.

        Raises:
            KvdslError: if the policy reads no such value, or it is not a float tensor with three axes.
        """
        for name, value in values.items():
            refuse_unknown(state.spec, name)
            check(state.spec, name, value)
        self._given.setdefault(state.layer, {}).update(values)

    def forget(self) -> None:
        """Drop given values and marks."""
        self._given.clear()
        self.marks.forget()
        self._heard = None

    def by_functions(self, spec: PolicySpec) -> bool:
        """Whether functions and defaults cover all values that the policy reads, and nothing was given."""
        said = (name in self.functions or default is not None for name, default in spec.supplied)
        return not self._given and all(said)

    def hear(self, module: nn.Module, hidden: Tensor | None) -> None:
        """Record the hidden states passed to a module."""
        self._heard = None if hidden is None else (module, hidden)

    def of_forward(self, state: SlotState, module: nn.Module, call: AttentionCall, turn_ends: Sequence[int] = ()) -> Tensor:
        """Return a forward's per-token values, as in `AttentionCall.supplied`.

        Args:
            turn_ends: where turns end in the text.

        Raises:
            KvdslError: if a value is missing and has no default, or has a wrong kind or shape.
        """
        values, heard = self._given.pop(state.layer, {}), self._heard
        self._heard = None
        for name, function in self.functions.items():
            if name not in values:
                if heard is None or heard[0] is not module:
                    raise KvdslError(
                        f"{type(module).__name__} was not called with hidden states that kvdsl can read: give `{name}` before each "
                        f"forward, `cache.give(layer, {name}=x)`"
                    )
                with torch.no_grad():
                    values[name] = function(module, heard[1])
        with torch.no_grad():
            values |= self._of_text(state, call, turn_ends)
            return in_rows(
                state.spec, values, call.key, layer=state.layer, head_offset=state.head_offset, processes=state.processes
            )

    def _of_text(self, state: SlotState, call: AttentionCall, turn_ends: Sequence[int]) -> dict[str, Tensor]:
        """Return what the text says of the new tokens: spans, turn and ids; [batch, 1, tokens] each."""
        found, shape = {}, (len(call.key), 1, call.key.shape[2])
        if state.spec.spans:
            position = new_positions(state, call)[:, None]
            found = {name: self.marks.of_tokens(name, position) for name, _ in state.spec.spans}
        if "turn" in state.spec.hears:
            turn = (
                state.numbers[..., state.spec.numbers.index("turns")]
                if state.allocated
                else call.key.new_zeros(len(call.key))
            )
            found["turn"] = turn.reshape(len(call.key), -1)[:, :1, None].float().expand(shape)
            for at in turn_ends:
                found["turn"] = found["turn"] + (new_positions(state, call)[:, None] >= at)
        if "token" in state.spec.hears:
            if self.ids is None or self.ids.shape != (shape[0], shape[2]):
                raise KvdslError(
                    f"{state.spec.name} reads `token`, but this forward brought no ids: give the model `input_ids`"
                )
            found["token"] = self.ids[:, None].float()
        return found

    def use(self, model: nn.Module, spec: PolicySpec, functions: Mapping[str, Supplier | None]) -> None:
        """Set the functions for the policy's `input` values, None to use a default or `give`, and hook the model's attention modules.

        Raises:
            KvdslError: if the policy reads no such value, or one is not a function.
        """
        for name, function in functions.items():
            refuse_unknown(spec, name)
            if function is not None and not callable(function):
                raise KvdslError(
                    f"`{name}` of {spec.name} is {type(function).__name__}; give a function `f(module, hidden_states)`, or the "
                    f"values of one forward by `cache.give(layer, {name}=x)`"
                )
        self.functions = {name: function for name, function in functions.items() if function is not None}
        if self.functions:
            for part in {type(module) for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)}:
                if not hasattr(part.__call__, _HEARS):
                    part.__call__ = _over(part.__call__)  # type: ignore[method-assign]


def _over(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `__call__` of an attention module's class: record its inputs first."""

    @functools.wraps(own)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _hear(self, args, kwargs)
        return own(self, *args, **kwargs)

    setattr(call, _HEARS, True)
    return call


def _hear(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Record a module's hidden states if a cache with functions is among its arguments. `torch.compile` traces this."""
    for given in (*args, *kwargs.values()):
        if isinstance(given, Cache):
            supplying: Supplying | None = getattr(given, "_supplying", None)
            if supplying is not None and supplying.functions:
                supplying.hear(module, kwargs.get("hidden_states", args[0] if args else None))
