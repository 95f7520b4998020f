"""Attention from a step's tokens to prompts in vLLM's blocks, with log-sum-exps. vLLM's own kernel serves where it can, else torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv


@dataclass(frozen=True)
class Segments:
    """Stretches of a step's tokens, one after the other: a part of a prompt, or one token behind a prompt.

    Attributes:
        starts: int32 [segments + 1], where they begin, and the end of the last one.
        read: int32 [segments], how many of its prompt's tokens a segment's last token sees. Those before it see one less each.
        table: int32 [segments, blocks], the requests' blocks.
        lengths: tokens of each.
        longest: a bound of `read`.
    """

    starts: Tensor
    read: Tensor
    table: Tensor
    lengths: Sequence[int]
    longest: int

    @property
    def tokens(self) -> int:
        """How many tokens there are."""
        return sum(self.lengths)


class Prompts:
    """One layer's.

    Args:
        blocks: keys and values, [blocks, kv_heads, 2, tokens, dim].
        scale: factor of logits. cap: bound of logits by tanh; 0 for none.
    """

    def __init__(self, blocks: Tensor, scale: float, cap: float) -> None:
        self._blocks, self._scale, self._cap = blocks, scale, cap
        self._kernel = _kernel(blocks)

    def read(self, segments: Segments, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention, like query [tokens, heads, dim], and the log-sum-exps, float32 [tokens, heads]."""
        if self._kernel is None:
            return self._by_torch(segments, query)
        keys, values = (self._blocks[:, :, one].transpose(1, 2) for one in (0, 1))
        out, lse = self._kernel(
            q=query, k=keys, v=values, cu_seqlens_q=segments.starts, max_seqlen_q=max(segments.lengths), seqused_k=segments.read,
            max_seqlen_k=segments.longest, block_table=segments.table, softmax_scale=self._scale, softcap=self._cap, causal=True,
            return_softmax_lse=True,
        )  # fmt: skip
        return out, lse.T.contiguous()

    def _by_torch(self, segments: Segments, query: Tensor) -> tuple[Tensor, Tensor]:
        """In float32, segment by segment, without waiting for the device."""
        _, heads, _, size, dim = self._blocks.shape
        blocks = min(cdiv(segments.longest, size), segments.table.shape[1])
        place = torch.arange(blocks * size, device=query.device)
        out, lse, first = torch.empty_like(query), query.new_empty(query.shape[:2], dtype=torch.float32), 0
        for number, length in enumerate(segments.lengths):
            rows, read = slice(first, first + length), segments.read[number]
            found = (
                self._blocks[segments.table[number, :blocks]].permute(2, 1, 0, 3, 4).reshape(2, heads, 1, -1, dim).float()
            )
            keys, values = found.masked_fill((place >= read)[:, None], 0.0)
            q = query[rows].float().view(length, heads, -1, dim).permute(1, 2, 0, 3)
            logits = q @ keys.mT * self._scale
            if self._cap:
                logits = self._cap * torch.tanh(logits / self._cap)
            sees = read - length + 1 + torch.arange(length, device=query.device)
            logits = logits.masked_fill(place >= sees[:, None], -torch.inf)
            sums = logits.logsumexp(-1, keepdim=True)
            out[rows] = ((logits - sums).exp() @ values).permute(2, 0, 1, 3).flatten(1, 2).to(out.dtype)
            lse[rows] = sums[..., 0].permute(2, 0, 1).flatten(1, 2)
            first += length
        return out, lse


def _kernel(blocks: Tensor) -> Any:
    """Return vLLM's kernel for these keys and values; None where none serves."""
    _, _, _, size, dim = blocks.shape
    if not current_platform.is_cuda() or blocks.dtype == torch.float32 or size % 16 or dim % 8:
        return None
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

    version = get_flash_attn_version(head_size=dim)
    return None if version is None else partial(flash_attn_varlen_func, fa_version=version)
