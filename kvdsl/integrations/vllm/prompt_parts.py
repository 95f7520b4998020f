"""Attention from a part of a prompt to itself and to the blocks before it, which any request may have filled."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from vllm import _custom_ops as ops
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

from kvdsl.integrations.vllm.answer_step import Part

_SIZE = 128
"""Tokens of a block of the copy: vLLM's own default on CPUs, and no slower than 32, 64 or 256."""

_FASTER = torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether vLLM's kernel is faster than torch's attention."""


@dataclass(frozen=True)
class PromptParts:
    """One layer's attention of prompts.

    vLLM's kernel serves where it is faster than torch's attention: with AVX-512 and AMX by up to 1.7×, although it needs a copy of keys
    and values in its own kind of blocks; with AVX2 it takes twice torch's time. It also has sinks and a cap of logits, which torch lacks.

    Attributes:
        blocks: keys and values, [blocks, kv_heads, 2, tokens, dim].
        scale: factor of logits. cap: bound of logits by tanh; 0 for none. sinks: one logit a head, or None.
    """

    blocks: Tensor
    scale: float
    cap: float
    sinks: Tensor | None

    _copies: ClassVar[threading.local] = threading.local()
    """The copy, which all layers of a step use one after another."""

    def read(self, part: Part, table: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Attend from the tokens of a part, whose keys and values lie in their blocks already.

        Args:
            table: int32 [requests, blocks].
            query, key, value: of all tokens of the step, [tokens, heads, dim] each. output: gets the attention, of the same shape as query.
        """
        rows, length = slice(part.first, part.last), part.before + part.last - part.first
        own = table[part.request, : cdiv(length, self.blocks.shape[3])].tolist() if part.before else []
        if self.sinks is not None or self.cap or (_FASTER and query.shape[-1] % 16 == 0):
            keys, values = self._copy(length, own, key[rows], value[rows])
            self._read_as_vllm(query[rows], keys, values, length, output[rows])
            return
        q, k, v = (x[rows].transpose(0, 1) for x in (query, key, value))
        if own:
            k, v = (self.blocks[own, :, one].transpose(0, 1).flatten(1, 2)[:, :length] for one in (0, 1))
        mask = torch.ones(q.shape[1], length, dtype=torch.bool).tril(part.before) if own else None
        found = scaled_dot_product_attention(
            q[None], k[None], v[None], mask, is_causal=mask is None, scale=self.scale, enable_gqa=True
        )
        output[rows] = found[0].transpose(0, 1)

    def _copy(self, length: int, own: list[int], key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values as vLLM's kernel reads them: those of a request's own blocks, or the ones given if there are none."""
        _, heads, _, size, dim = self.blocks.shape
        count, kind = cdiv(length, _SIZE), _get_attn_isa(key.dtype, _SIZE, dim)
        room = getattr(self._copies, "room", None)
        if room is None or len(room) < count or room.shape[1:] != (heads, 2 * _SIZE, dim) or room.dtype != key.dtype:
            room = self._copies.room = key.new_empty(count, heads, 2 * _SIZE, dim)
        room[count - 1].zero_()  # no token lies behind the last one
        keys, values = room[:count].chunk(2, dim=2)
        place = torch.arange(length)
        for number, block in enumerate(own):
            first = number * size
            k, v = (self.blocks[block, :, one, : length - first].transpose(0, 1) for one in (0, 1))
            ops.cpu_attn_reshape_and_cache(k, v, keys, values, place[first : first + len(k)], kind)
        if not own:
            ops.cpu_attn_reshape_and_cache(key, value, keys, values, place, kind)
        return keys, values

    def _read_as_vllm(self, query: Tensor, keys: Tensor, values: Tensor, length: int, output: Tensor) -> None:
        """Causal attention of the last tokens, [tokens, heads, dim], by vLLM's kernel."""
        count, heads, _, dim = keys.shape
        starts, lengths = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, len(query)], [length]))
        plan = ops.cpu_attn_get_scheduler_metadata(
            num_reqs=1, num_heads=query.shape[1], num_kv_heads=heads, head_dim=dim, seq_lens=lengths, dtype=query.dtype,
            query_start_loc=starts, causal=True, sliding_window_size=-1, isa=_get_attn_isa(query.dtype, _SIZE, dim), enable_kv_split=True,
        )  # fmt: skip
        sinks = self.sinks if self.sinks is None or self.sinks.dtype == torch.bfloat16 else self.sinks.float()
        ops.cpu_attention_with_kv_cache(
            query=query.contiguous(), key_cache=keys, value_cache=values, output=output, query_start_loc=starts, seq_lens=lengths,
            scale=self.scale, causal=True, alibi_slopes=None, sliding_window=-1, softcap=self.cap, scheduler_metadata=plan, s_aux=sinks,
            block_table=torch.arange(count, dtype=torch.int32)[None],
        )  # fmt: skip
