"""Biases of keys, which decide whether a layer's keys and values may be rounded (option `kv_dtype`).

A scale that covers a large bias leaves the rest of a key few codes, and the rest is what tells tokens apart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from kvdsl.errors import KvdslError

LARGE: float = 4
"""The root mean square above which a bias is large. Without their bias, the keys of trained models have one of about 1."""

_PROJECTION = re.compile(r"(^|_)(k|wk|key|kv|qkv|wqkv|pack)(_|$)|^c_attn$", re.IGNORECASE)
"""Names of what computes keys, alone (`k_proj`, `key`) or with queries and values (`qkv_proj`, `query_key_value`, `c_attn`)."""

_NORM = re.compile(r"^((k|key|qk)_?(norm|layernorm|ln)|norm_k)$")
"""Names of what normalises keys after that. Then its own bias is the keys'."""

Read = Callable[[nn.Module, str], Tensor | None]


def bound(head_dim: int) -> float:
    """Return the largest norm of a KV head's key bias with which keys are rounded."""
    return LARGE * math.sqrt(head_dim)


def bias_norm(attention: nn.Module, head_dim: int, read: Read = getattr) -> float | None:
    """Return the largest norm of a KV head's key bias; 0 without one, None if the module has no projection of keys.

    If one projection computes queries and values as well, theirs count too.

    Args:
        read: returns a parameter of a module by name.

    Raises:
        KvdslError: if a bias cannot be read.
    """
    parts = {name: part for name, part in attention.named_children() if not isinstance(part, nn.Identity)}
    makers = {name: part for name, part in parts.items() if _PROJECTION.search(name) and not _NORM.search(name)}
    if not makers:
        return None
    last = {name: part for name, part in parts.items() if _NORM.search(name)} or makers
    return max(_norm(name, read(part, "bias"), head_dim) if hasattr(part, "bias") else 0.0 for name, part in last.items())


def _norm(name: str, bias: Tensor | None, head_dim: int) -> float:
    if not isinstance(bias, Tensor):
        return 0.0
    if bias.device.type == "meta" or not bias.numel():
        raise KvdslError(
            f"the bias of `{name}` is not in memory ({bias.device.type}, {bias.numel()} numbers), and `kv_dtype` rounds no layer whose "
            f"keys have a large one: load the weights first, or leave `kv_dtype` out"
        )
    found = (bias.to_local() if hasattr(bias, "to_local") else bias).detach().float()
    heads = found.view(-1, head_dim) if found.numel() % head_dim == 0 else found.view(1, -1)
    return float(heads.norm(dim=-1).max())


def told(large: Mapping[int, float]) -> str:
    """Return layers with the norms of their biases, such as "0 (278.6), 8 (278.1)", for messages."""
    return ", ".join(f"{layer} ({norm:.4g})" for layer, norm in large.items())
