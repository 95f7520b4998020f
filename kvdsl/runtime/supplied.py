"""Per-token values from the caller (the policy's `input` lines): checks, and the tensor that backends read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError

if TYPE_CHECKING:
    from kvdsl.runtime.backend import AttentionCall
    from kvdsl.runtime.spec import PolicySpec


def supplied_of(spec: PolicySpec, call: AttentionCall) -> Tensor:
    """Return a call's per-token values, float32 [values, batch, kv_heads, tokens], contiguous. If the call has none, use the defaults.

    Raises:
        KvdslError: if a value is missing and has no default.
    """
    if call.supplied is not None:
        return call.supplied.contiguous()
    return in_rows(spec, {}, call.key)


def in_rows(
    spec: PolicySpec,
    values: Mapping[str, Tensor],
    key: Tensor,
    *,
    layer: int = 0,
    head_offset: int = 0,
    processes: int = 1,
) -> Tensor:
    """Stack per-token values in the order of the policy's lines, float32 [values, batch, kv_heads, tokens].

    Args:
        values: by name, [batch, kv_heads or 1, tokens] each. Missing ones take their default.
        key: the tokens' keys, [batch, kv_heads, tokens, any].
        layer: for messages.
        head_offset, processes: this process's first KV head, and the number of processes that share the layer's heads. Values may
            cover the heads of all processes.

    Raises:
        KvdslError: if a value is missing and has no default, or has a wrong kind or shape.
    """
    batch, kv_heads, tokens, _ = key.shape
    made = torch.empty(len(spec.supplied), batch, kv_heads, tokens, dtype=torch.float32, device=key.device)
    for row, (name, default) in zip(made, spec.supplied, strict=True):
        if name in values:
            check(spec, name, values[name])
            found = values[name].detach()
            if processes > 1 and found.shape[1] == kv_heads * processes:
                found = found[:, head_offset : head_offset + kv_heads]
            _check_shape(spec, name, found, (batch, kv_heads, tokens), layer)
            row.copy_(found)
        elif default is not None:
            row.fill_(default)
        else:
            raise KvdslError(missing(spec, name, layer))
    return made


def _check_shape(spec: PolicySpec, name: str, value: Tensor, wanted: tuple[int, int, int], layer: int) -> None:
    batch, kv_heads, tokens = wanted
    if value.shape[0] != batch or value.shape[1] not in (1, kv_heads) or value.shape[2] != tokens:
        raise KvdslError(
            f"`{name}` of {spec.name} is {list(value.shape)} in layer {layer}; give [batch, KV heads or 1, new tokens], here "
            f"[{batch}, {kv_heads} or 1, {tokens}]"
        )


def check(spec: PolicySpec, name: str, value: Any) -> None:
    """Raise KvdslError unless the value is a float tensor with three axes."""
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim != 3:
        what = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise KvdslError(f"`{name}` of {spec.name} is {what}; give a float tensor [batch, KV heads or 1, new tokens]")


def refuse_unknown(spec: PolicySpec, name: str) -> None:
    """Raise KvdslError for a value that the policy does not read from the caller."""
    names = [known for known, _ in spec.supplied if known not in (*dict(spec.spans), *spec.hears)]
    if name not in names:
        asks = f"it asks for {', '.join(f'`{known}`' for known in names)}" if names else "it asks its caller for nothing"
        raise KvdslError(f"{spec.name} has no `{name}` that could be given: {asks}")


def missing(spec: PolicySpec, name: str, layer: int) -> str:
    """Return the message for a value that is missing."""
    return (
        f"`{name}` of {spec.name} is given by the caller, and nothing was given for layer {layer}: construct the cache with a function, "
        f"`{spec.name}Cache(model, {name}=f)`, where `f(module, hidden_states)` returns a tensor [batch, KV heads or 1, new tokens]; call "
        f"`cache.give({layer}, {name}=x)` before the forward; or write a default in the policy, `input {name} = 0`"
    )
