"""What attention is made of, wherever it is not left to torch's fused kernels. All arithmetic is float32."""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.state.order import ranks
from kvdsl.runtime.state.slots import SlotState


def scores(call: AttentionCall, query: Tensor, key: Tensor, bias: Tensor | None = None) -> Tensor:
    """Scaled dot products, capped where the model caps them, with its bias: [batch, kv_heads, group, queries, slots].

    Args:
        query: [batch, kv_heads, group, queries, dim].
        key: [batch, kv_heads, slots, dim].
        bias: as `bias_of` gives it, if the model has slopes.
    """
    assert (call.slopes is None) == (bias is None), "a model's slopes would be forgotten"
    logit = torch.einsum("bhgqd,bhsd->bhgqs", query.float(), key.float()) * call.scaling
    logit = logit if call.softcap is None else call.softcap * torch.tanh(logit / call.softcap)
    return logit if bias is None else logit + bias


def bias_of(call: AttentionCall, heads: slice, distance: Tensor) -> Tensor:
    """What distances take from the logits (ALiBi), float32 [batch, kv_heads, group, queries, slots].

    Args:
        call: one with `slopes`.
        heads: the KV heads that are meant.
        distance: how many places slots stand behind queries, [batch, kv_heads, queries, slots], kv_heads those of `heads`.
    """
    assert call.slopes is not None
    slopes = call.slopes.float().view(call.key.shape[1], -1)[heads]
    return -slopes[:, :, None, None] * distance.unsqueeze(2)


def distances(state: SlotState, kept: dict[str, Tensor], live: Tensor, newest: Tensor) -> Tensor:
    """How many places the slots stand behind each query, [batch, kv_heads, queries, slots]; arguments as in `turned_queries`."""
    if not state.spec.compact:
        return newest - kept["position"].unsqueeze(2)
    return live.long() - 1 - rank_of(kept).unsqueeze(2)


def rank_of(kept: dict[str, Tensor]) -> Tensor:
    """How many live slots hold an earlier token, [batch, kv_heads, slots]: known of the state's own slots, otherwise counted."""
    return kept["rank"] if "rank" in kept else ranks(kept["position"])


def softmax(logit: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the slots, [batch, kv_heads, group, queries, slots]; learned sinks, one for each query head here, join the denominator."""
    if sinks is not None:
        batch, heads, group, queries, _ = logit.shape
        sink = sinks.float().view(1, heads, group, 1, 1).expand(batch, heads, group, queries, 1)
        return torch.cat([logit, sink], -1).softmax(-1)[..., :-1]
    return logit.softmax(-1)


def turned_keys(state: SlotState, call: AttentionCall, kept: dict[str, Tensor]) -> Tensor:
    """The keys at the positions where attention sees them: under compact positions each at its rank among the live ones."""
    if not state.spec.compact or call.rope is None:
        return kept["keys"]
    if state.spec.rope_cached and "rank" in kept:  # the state's own slots
        return call.rope.rotate_by(kept["keys"], state.half_keys, kept["rank"] - kept["position"])
    return call.rope.rotate(kept["keys"], rank_of(kept) - kept["position"])


def turned_queries(state: SlotState, call: AttentionCall, query: Tensor, live: Tensor, newest: Tensor) -> Tensor:
    """The queries, [batch, kv_heads, group, queries, dim], each at the position of its own token's key.

    Args:
        live: [batch, kv_heads, queries, 1], the slots that each query finds, its own token's included: the last of them.
        newest: [batch, 1, queries, 1], the position of each query's token.
    """
    if not state.spec.compact or call.rope is None:
        return query
    return call.rope.rotate(query, (live.long() - 1 - newest).squeeze(-1).unsqueeze(2))


def in_rows(x: Tensor) -> Tensor:
    """The tensor with its last dim in one piece, which kernels rely on; the others may have any strides."""
    return x if x.stride(-1) == 1 else x.contiguous()
