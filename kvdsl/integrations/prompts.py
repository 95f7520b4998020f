"""What a policy keeps of a prompt, for caches that are not kvdsl's: one layer's keys and values in, the survivors' out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.given import param
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.order import FREE, ranks


@dataclass(frozen=True)
class Survivors:
    """What one layer keeps, in the order of the text.

    Attributes:
        keys, values: [batch, kv_heads, kept, dim], as many as the head that keeps most.
        position: int32 [batch, kv_heads, kept], where each stood in its row's text; FREE behind a head's last.
    """

    keys: Tensor
    values: Tensor
    position: Tensor

    @property
    def free(self) -> Tensor:
        """Where a head keeps nothing: bool [batch, kv_heads, kept]."""
        return self.position == FREE


def survivors(
    spec: PolicySpec,
    given: Mapping[str, float | None],
    call: AttentionCall,
    *,
    layer: int = 0,
    layers: int = 1,
    backend: str = "auto",
) -> Survivors:
    """Run one layer's prompt through a policy.

    Compute attention a second time, because a policy may read what any query gave. Under compact positions rotate the keys so that
    they stand next to each other, the last one where the text ends. Attention depends on distances only, so a query at the text's
    next position sees what the policy means.

    Args:
        given: the policy's params by name; those that are missing have their defaults.
        call: the whole prompt's queries, keys and values, rotated.

    Raises:
        KvdslError: if the policy cannot be served so, or if its params do not fit the prompt.
    """
    refuse(spec)
    checked = {name: param(spec.name, name, given.get(name)) for name in spec.params}
    state = slot_state(spec, checked, layer=layer, layers=layers)
    choose(spec, backend, call.key.device, call.key.dtype).prefill(state, call)
    kept = max(1, int((state.position >= 0).sum(-1).max()))
    keys, values, position = (tensor[:, :, :kept].clone() for tensor in (state.keys, state.values, state.position))
    if spec.compact and call.rope is not None:
        keys = _together(keys, position, state.seen, call.rope)
    return Survivors(keys, values, position)


def _together(keys: Tensor, position: Tensor, seen: Tensor, rope: Rope) -> Tensor:
    """The keys next to each other, the last one at the end of its row's text."""
    live = (position >= 0).sum(-1, keepdim=True)
    wanted = seen[:, None, None] - live + ranks(position)
    return rope.rotate(keys, (wanted - position).masked_fill(position < 0, 0)).to(keys.dtype)


def refuse(spec: PolicySpec) -> None:
    """Raise KvdslError for a policy whose meaning a prompt's survivors, one layer at a time, cannot hold."""
    if not spec.bounded or spec.when == "decode":
        raise KvdslError(
            f"{spec.name} evicts nothing while a prompt is read, and a cache that is not kvdsl's evicts nothing later: generate "
            f"with kvdsl's own cache instead"
        )
    if spec.kv_dtype != "model":
        raise KvdslError(
            "what is left of the prompt goes into a cache that is not kvdsl's, in the model's dtype: leave `kv_dtype` out"
        )
    if spec.selects:
        raise KvdslError(
            f"{spec.name} attends to a selection, which only kvdsl's own attention does: generate with kvdsl's cache"
        )
    if spec.victims == "layers" or spec.across_layers:
        what = "agree on their victims" if spec.victims == "layers" else "share a budget"
        raise KvdslError(f"the layers of {spec.name} {what}, but here each decides alone: generate with kvdsl's cache")
