"""What the caller gives of each token: by functions of what an attention module is given, or beforehand.

Attention sees queries, keys and values only. So while a cache with functions lives, a hook runs before every module of the model that
knows its layer, and notes what that is given if it comes with this cache; the attention that follows takes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kvdsl.errors import KvdslError
from kvdsl.runtime.linked import Linked
from kvdsl.runtime.plain import plain_tensors
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.supplied import check, in_rows, refuse_unknown

Supplier = Callable[[nn.Module, Tensor], Tensor]
"""From an attention module and its hidden states, [batch, tokens, any], to a float tensor [batch, KV heads or 1, tokens]."""


class Supplying(Linked):
    """Shared by the layers of one cache.

    Attributes:
        functions: by the value's name; none after unpickling, until somebody gives them again.
    """

    LINKS = ("_heard",)

    def __init__(self) -> None:
        self.functions: dict[str, Supplier] = {}
        self._given: dict[int, dict[str, Tensor]] = {}
        self._heard: tuple[nn.Module, Tensor] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Supplying:
        """The same functions; what was given is taken along."""
        made = Supplying()
        made.functions = dict(self.functions)
        made._given = {layer: dict(values) for layer, values in self._given.items()}
        memo[id(self)] = made
        return made

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"functions": {}}

    def give(self, state: SlotState, values: Mapping[str, Tensor]) -> None:
        """What a layer's next forward takes, before what functions say.

        Raises:
            KvdslError: if the policy asks for no such value, or if it is no tensor of floats with three axes.
        """
        for name, value in values.items():
            refuse_unknown(state.spec, name)
            check(state.spec, name, value)
        self._given.setdefault(state.layer, {}).update(values)

    def forget(self) -> None:
        """Nothing has been given."""
        self._given.clear()
        self._heard = None

    def of_forward(self, state: SlotState, module: nn.Module, key: Tensor, head_offset: int) -> Tensor:
        """What is given of a forward's tokens, as in `AttentionCall.supplied`.

        Raises:
            KvdslError: if something is missing that has no default, or if it is of another kind or shape.
        """
        values, heard = self._given.pop(state.layer, {}), self._heard
        self._heard = None
        for name, function in self.functions.items():
            if name not in values:
                if heard is None or heard[0] is not module:
                    raise KvdslError(
                        f"{type(module).__name__} was not given its hidden states in a way that kvdsl can hear: give `{name}` before each "
                        f"forward, `cache.give(layer, {name}=x)`"
                    )
                with torch.no_grad():
                    values[name] = function(module, heard[1])
        with plain_tensors():
            return in_rows(state.spec, values, key, layer=state.layer, head_offset=head_offset, processes=state.processes)

    # -- listening -----------------------------------------------------------------------------------------------------

    def listen(self, cache: Any, model: nn.Module) -> None:
        """Hear what the model's attention modules are given together with this cache, as long as that lives."""
        if not self.functions:
            return
        here, this = weakref.ref(self), weakref.ref(cache)

        @torch.compiler.disable(reason="what a function gives of tokens is found outside of graphs")  # type: ignore[untyped-decorator]
        def hear(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            supplying, own = here(), this()
            if supplying is not None and own is not None and any(given is own for given in (*args, *kwargs.values())):
                hidden = kwargs.get("hidden_states", args[0] if args else None)
                supplying._heard = None if hidden is None else (module, hidden)

        layers = [module for module in model.modules() if isinstance(getattr(module, "layer_idx", None), int)]
        handles = [module.register_forward_pre_hook(hear, with_kwargs=True) for module in layers]
        weakref.finalize(cache, _remove, handles).atexit = False


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
