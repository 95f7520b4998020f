"""One layer's attention in vLLM: short prompts together, others one by one, whole or in parts, until what they left lies in their pages;
decoded tokens in one call of C++.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.page import page
from kvdsl.integrations.vllm.rotation import rotation
from kvdsl.integrations.vllm.settings import Plan
from kvdsl.integrations.vllm.tracing import Texts
from kvdsl.runtime.backends import choose
from kvdsl.runtime.call import AttentionCall
from kvdsl.runtime.cpu.backend import CpuBackend
from kvdsl.runtime.cpu.rows import Rows
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.undo import UndoLog

if TYPE_CHECKING:
    from kvdsl.integrations.vllm.step import Batch, Decoded, Step


class PolicyAttention(AttentionImpl):  # type: ignore[misc]
    """See vLLM's `AttentionImpl`.

    Raises:
        KvdslError: for attention that is not causal, or has a bias by distance.
    """

    plan: ClassVar[Plan | None] = None
    """Of this process: vLLM asks for the page's size where no configuration is set."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None, kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        if alibi_slopes is not None or attn_type != AttentionType.DECODER or kv_sharing_target_layer_name is not None:
            raise KvdslError("kvdsl serves causal attention of a layer to its own tokens, without a bias by distance")
        config = get_current_vllm_config()
        plan = Plan.of(config)
        if plan is None:
            raise KvdslError(
                "an engine with kvdsl was made in this process before, and vLLM keeps its attention: leave the policy out in a new process"
            )
        PolicyAttention.plan = plan
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.scale, self.kv_cache_dtype = float(scale), kv_cache_dtype
        self._settings, self._layers, self._longest = plan.layer(sliding_window), plan.layers, plan.longest
        settings = self._settings
        self._sinks = sinks
        self._more = (logits_soft_cap or None, sliding_window, sinks)
        text = config.model_config.hf_text_config
        self._head_offset = get_tensor_model_parallel_rank() * self.num_kv_heads
        self._rope = rotation(text, head_size) if settings.spec.compact else None
        dtype = config.model_config.dtype
        self._page = page(settings, self.num_kv_heads, head_size, dtype, layers=plan.layers, longest=plan.longest)
        self._page_of_policy = self._page if settings is plan.settings else None
        self._backend = choose(settings.spec, "auto", torch.device("cpu"), dtype)
        self._together = Rows(self._backend) if isinstance(self._backend, CpuBackend) else None
        self.states: dict[int, SlotState] = {}
        self.reading: dict[int, SlotState] = {}
        """By page: prompts of which more may come. Nothing leaves before one has ended, so these grow."""
        self._guesses = config.speculative_config.num_speculative_tokens if config.speculative_config is not None else 0
        self._logs: dict[int, UndoLog] = {}
        """By page, where vLLM guesses: what the tokens behind the first of a step have changed."""

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Step | None, output: Tensor,
        output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of a step's tokens, [tokens, heads, dim] each; `output` gets it."""
        if attn_metadata is None:  # vLLM tries out how much memory a step takes
            return output.zero_()
        blocks = kv_cache.view(len(kv_cache), -1).view(torch.uint8)
        for prompt in attn_metadata.prompts():
            if prompt.page not in self.states:
                self._know(extract_layer_index(layer.layer_name), blocks, prompt.page, query, key, value)
        for batch in attn_metadata.batches:
            self._read(batch, query, key, value, output, blocks)
        for number, steps in attn_metadata.rejected:
            self._logs[number].take_back(self.states[number], steps)
        for place, decoded in enumerate(attn_metadata.decoded):
            if self._guesses:
                self._note(decoded, first=place == 0)
            self._decode(decoded, query, key, value, output)
        attn_metadata.evictions.layer_is_done(kv_cache, self._page_of_policy, attn_metadata)
        if Texts.here is not None and self._page_of_policy is not None:
            Texts.here.layer_is_done(extract_layer_index(layer.layer_name), self._state_in, attn_metadata)
        return output

    def _note(self, decoded: Decoded, first: bool) -> None:
        """Note what tokens may change that are taken back if they were guessed wrong; the first of a step is none of these."""
        for number in decoded.pages.tolist():
            if first:
                self._logs[number] = UndoLog(self._guesses)
            else:
                self._logs[number].note(self.states[number])

    def _decode(self, decoded: Decoded, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        if self._together is not None:
            self._together.decode(decoded.pages, decoded.rows, query, key, value, output, self._sinks)
            return
        for number, row in zip(decoded.pages.tolist(), decoded.rows.tolist(), strict=True):
            token = (x[None, row : row + 1] for x in (query, key, value))
            output[row] = self._backend.decode(self.states[number], self._call(*token))[0, 0]

    def _call(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None = None) -> AttentionCall:
        """Of vectors [requests, tokens, heads, dim]."""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return AttentionCall(query, key, value, real, self.scale, *self._more, self._rope)

    def _state_in(self, page: int) -> SlotState:
        """What a layer holds of the request that has this page."""
        return self.reading.get(page, self.states[page])

    def _state(self, layer: int) -> SlotState:
        return self._settings.state(layer, self._layers, self._head_offset)

    def _know(self, layer: int, blocks: Tensor, number: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """A page that is used for the first time: its state's tensors are those in the block, whoever has it."""
        call = self._call(query[None, :1], key[None, :1], value[None, :1])
        state = self.states[number] = self._state(layer)
        state.window = call.window
        self._page.adopt(state, blocks[number])
        if self._together is not None:
            self._together.know(number, state, call, self._longest)

    def _read(self, batch: Batch, query: Tensor, key: Tensor, value: Tensor, output: Tensor, blocks: Tensor) -> None:
        """Prompts, or a part of one: a state of their own reads them, whose tensors move into the pages in the end."""
        states = [self.states[prompt.page] for prompt in batch.prompts]
        first = batch.prompts[0]
        state = self._state(states[0].layer) if first.begins else self.reading[first.page]
        if len(states) == 1 and first.begins and first.ends:
            self._page.lend(state, blocks[first.page])
        for prompt in batch.prompts:  # whoever had the page before has gone, maybe amid its prompt
            self.reading.pop(prompt.page, None)
        query, key, value = (batch.of_step(x) for x in (query, key, value))
        call = self._call(query, key, value, batch.real)
        out = self._backend.prefill(state, call._replace(goes_on=not first.ends))
        batch.into_step(out, output)
        if first.ends:
            self._page.fill(blocks, batch.pages, states, state)
        else:
            self.reading[first.page] = state
