"""One layer's attention in vLLM: short prompts together, others one by one, whole or in parts, until what they left lies in their pages;
decoded tokens in one call of C++.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.page import page
from kvdsl.integrations.vllm.rotation import rotation
from kvdsl.integrations.vllm.settings import Plan
from kvdsl.runtime.backends import choose
from kvdsl.runtime.call import AttentionCall
from kvdsl.runtime.cpu.backend import CpuBackend
from kvdsl.runtime.cpu.rows import Rows
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.undo import UndoLog

if TYPE_CHECKING:
    from kvdsl.integrations.vllm.backend import Decoded, Prompt, Step


SHORT = 256
"""Tokens of a prompt that is worth reading with others: of a longer one padding costs more than a call does by itself."""

_LEAST = 64
"""Prompts up to this are read together, whatever their lengths."""


def gathered(prompts: list[Prompt]) -> list[list[Prompt]]:
    """Prompts that are read in one call: short ones that come whole, which padding makes less than twice as long; each other one alone."""
    found: dict[tuple[int, int], list[Prompt]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        tokens = prompt.last - prompt.first
        together = prompt.begins and prompt.ends and tokens <= SHORT
        found[(0, (max(_LEAST, tokens) - 1).bit_length()) if together else (1, number)].append(prompt)
    return list(found.values())


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
        for prompt in attn_metadata.prompts:
            if prompt.page not in self.states:
                block = self._block(kv_cache, prompt.page)
                self._know(extract_layer_index(layer.layer_name), block, prompt.page, query, key, value)
        for prompts in gathered(attn_metadata.prompts):
            rows = [slice(prompt.first, prompt.last) for prompt in prompts]
            calls = [self._call(query[part], key[part], value[part]) for part in rows]
            if len(prompts) == 1:
                output[rows[0]] = self._read(prompts[0], calls[0])
                continue
            for part, out in zip(rows, self._read_together(prompts, calls), strict=True):
                output[part] = out
        for number, steps in attn_metadata.rejected:
            self._logs[number].take_back(self.states[number], steps)
        for place, decoded in enumerate(attn_metadata.decoded):
            if self._guesses:
                self._note(decoded, first=place == 0)
            self._decode(decoded, query, key, value, output)
        attn_metadata.evictions.layer_is_done(kv_cache, self._page_of_policy, attn_metadata)
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
            part = slice(row, row + 1)
            found = self._backend.decode(self.states[number], self._call(query[part], key[part], value[part]))
            output[part] = found[0].view(1, self.num_heads, -1)

    def _call(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionCall:
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        return AttentionCall(query, key, value, None, self.scale, *self._more, self._rope)

    def _block(self, kv_cache: Tensor, number: int) -> Tensor:
        return kv_cache[number].view(-1).view(torch.uint8)[: self._page.bytes]

    def _state(self, layer: int) -> SlotState:
        return self._settings.state(layer, self._layers, self._head_offset)

    def _know(self, layer: int, block: Tensor, number: int, query: Tensor, key: Tensor, value: Tensor) -> None:
        """A page that is used for the first time: its state's tensors are those in the block, whoever has it."""
        call = self._call(query[:1], key[:1], value[:1])
        state = self.states[number] = self._state(layer)
        state.window = call.window
        self._page.adopt(state, block)
        if self._together is not None:
            self._together.know(number, state, call, self._longest)

    def _read(self, prompt: Prompt, call: AttentionCall) -> Tensor:
        """A prompt, or a part: a state of its own reads it, whose tensors move into the page in the end."""
        if prompt.begins:  # whoever had the page before has gone, maybe amid its prompt
            self.reading[prompt.page] = self._state(self.states[prompt.page].layer)
        state = self.reading[prompt.page]
        out = self._backend.prefill(state, call._replace(goes_on=not prompt.ends))
        if prompt.ends:
            self._page.fill(self.states[prompt.page], self.reading.pop(prompt.page))
        return out[0].view(call.query.shape[2], self.num_heads, -1)

    def _read_together(self, prompts: list[Prompt], calls: list[AttentionCall]) -> list[Tensor]:
        """Whole prompts, as rows of one padded batch."""
        lengths = torch.tensor([call.query.shape[2] for call in calls])
        most = int(lengths.max())
        query, key, value = (
            torch.cat([pad(x, (0, 0, 0, most - x.shape[2])) for x in several])
            for several in zip(*(call[:3] for call in calls), strict=True)
        )
        real = torch.arange(most) < lengths[:, None]
        state = self._state(self.states[prompts[0].page].layer)
        out = self._backend.prefill(state, calls[0]._replace(query=query, key=key, value=value, real=real))
        for row, prompt in enumerate(prompts):
            self.reading.pop(prompt.page, None)
            self._page.fill(self.states[prompt.page], state, row)
        return [one[:length].view(length, self.num_heads, -1) for one, length in zip(out, lengths.tolist(), strict=True)]
