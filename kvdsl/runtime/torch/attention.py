"""Attention in float32, where torch's fused kernels are not used."""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.state.order import ranks
from kvdsl.runtime.state.slots import SlotState


def scores(call: AttentionCall, query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute logits: scaled dot products, softcapped, plus bias. Returns [batch, kv_heads, group, queries, slots].

    Args:
        query: [batch, kv_heads, group, queries, dim].
        key: [batch, kv_heads, slots, dim].
        bias: from `bias_of`; required if the model has slopes.
    """
    assert (call.slopes is None) == (bias is None), "a model's slopes would be forgotten"
    logit = torch.einsum("bhgqd,bhsd->bhgqs", query.float(), key.float()) * call.scaling
    logit = logit if call.softcap is None else call.softcap * torch.tanh(logit / call.softcap)
    return logit if bias is None else logit + bias


def bias_of(call: AttentionCall, heads: slice, distance: Tensor) -> Tensor:
    """Return the ALiBi bias, float32 [batch, kv_heads, group, queries, slots].

    Args:
        call: has `slopes`.
        heads: the KV heads to compute.
        distance: places between slot and query, [batch, kv_heads, queries, slots], for these KV heads.
    """
    assert call.slopes is not None
    slopes = call.slopes.float().view(call.key.shape[1], -1)[heads]
    return -slopes[:, :, None, None] * distance.unsqueeze(2)


def distances(state: SlotState, kept: dict[str, Tensor], live: Tensor, newest: Tensor) -> Tensor:
    """Return the places between slots and queries, [batch, kv_heads, queries, slots]. Arguments as in `turned_queries`."""
    if not state.spec.compact:
        return newest - kept["position"].unsqueeze(2)
    return live.long() - 1 - rank_of(kept).unsqueeze(2)


def rank_of(kept: dict[str, Tensor]) -> Tensor:
    """Return how many live slots hold an earlier token, [batch, kv_heads, slots]: the state's ranks if `kept` has them."""
    return kept["rank"] if "rank" in kept else ranks(kept["position"])


def softmax(logit: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over slots, [batch, kv_heads, group, queries, slots]. Learned sinks, one per query head, join the denominator."""
    if sinks is not None:
        batch, heads, group, queries, _ = logit.shape
        sink = sinks.float().view(1, heads, group, 1, 1).expand(batch, heads, group, queries, 1)
        return torch.cat([logit, sink], -1).softmax(-1)[..., :-1]
    return logit.softmax(-1)


def turned_keys(state: SlotState, call: AttentionCall, kept: dict[str, Tensor]) -> Tensor:
    """Return the keys at the positions that attention uses: under compact positions, their ranks among the live slots."""
    if not state.spec.compact or call.rope is None:
        return kept["keys"]
    if state.spec.rope_cached and "rank" in kept:  # `kept` is the state's own slots
        return call.rope.rotate_by(kept["keys"], state.half_keys, kept["rank"] - kept["position"])
    return call.rope.rotate(kept["keys"], rank_of(kept) - kept["position"])


def turned_queries(state: SlotState, call: AttentionCall, query: Tensor, live: Tensor, newest: Tensor) -> Tensor:
    """Return queries, [batch, kv_heads, group, queries, dim], at the positions of their own tokens' keys.

    Args:
        live: [batch, kv_heads, queries, 1], live slots that each query finds. Its own token is the last of them.
        newest: [batch, 1, queries, 1], the position of each query's token.
    """
    if not state.spec.compact or call.rope is None:
        return query
    return call.rope.rotate(query, (live.long() - 1 - newest).squeeze(-1).unsqueeze(2))


def in_rows(x: Tensor) -> Tensor:
    """Make the last dim contiguous, as kernels require. Other strides may be any."""
    return x if x.stride(-1) == 1 else x.contiguous()
