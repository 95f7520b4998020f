"""One layer's attention where requests share prompts: parts of prompts one by one, the tokens behind them together, in C++."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import AttentionImpl, AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.answer_step import Answer, Generated, Step
from kvdsl.integrations.vllm.evictions import Lies
from kvdsl.integrations.vllm.guesses import Guesses
from kvdsl.integrations.vllm.page import state_of
from kvdsl.integrations.vllm.prompt_parts import PromptParts
from kvdsl.integrations.vllm.settings import Plan
from kvdsl.integrations.vllm.texts import Texts
from kvdsl.integrations.vllm.token_values import mark_late
from kvdsl.runtime.backends import choose
from kvdsl.runtime.cpu.answers import Answers
from kvdsl.runtime.cpu.backend import CpuBackend
from kvdsl.runtime.cpu.prepared import DecodeArgs, point, strides_of
from kvdsl.runtime.state.slots import SlotState


class AnswerAttention(AttentionImpl):  # type: ignore[misc]
    """See vLLM's `AttentionImpl`.

    Attributes:
        aligned: whether an answer has slots as an accelerator needs them.
        number: the layer's, known from the first step on.

    Raises:
        KvdslError: for attention that is not causal, has a bias by distance, or a window in every layer; or for a policy without C++.
    """

    plan: ClassVar[Plan | None] = None
    """This process's: vLLM reads the cache's size where no configuration is set."""

    aligned: ClassVar[bool] = False

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None, kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        config = get_current_vllm_config()
        plan = Plan.of(config)
        if plan is None or not plan.settings.answers:
            raise KvdslError(
                "this is kvdsl's attention over shared prompts, and the configuration names no policy for it: make an engine "
                "right after its configuration"
            )
        more = {
            "a bias by distance": alibi_slopes, "keys of another layer": kv_sharing_target_layer_name,
            "attention to what follows": None if attn_type == AttentionType.DECODER else attn_type,
            "a sliding window, as all layers have": sliding_window if plan.windowed else None,
            "heads of a size that is no multiple of 16, and sinks or a cap of its logits":
                head_size if head_size % 16 and (logits_soft_cap or sinks is not None) else None,
        }  # fmt: skip
        found = [what for what, value in more.items() if value is not None]
        if found:
            raise KvdslError(
                f"a layer has {found[0]}, which is not served where prompts are shared: serve a policy with a budget in tokens (h2o, roco)"
            )
        AnswerAttention.plan = self._plan = plan
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.scale, self.kv_cache_dtype = float(scale), kv_cache_dtype
        self._dtype, self._cap, self._sinks = config.model_config.dtype, logits_soft_cap or 0.0, sinks
        self._guesses = config.speculative_config.num_speculative_tokens if config.speculative_config is not None else 0
        self._windowed = None
        self._make(config, sliding_window)

    def _make(self, config: Any, sliding_window: int | None) -> None:
        """Make what serves the layer."""
        texts = Texts.of(config)
        self._tracing = None if texts is None else texts.tracing
        if sliding_window is not None:
            self._windowed = CPUAttentionBackendImpl(
                self.num_heads, self.head_size, self.scale, self.num_kv_heads, None, sliding_window, self.kv_cache_dtype,
                self._cap or None, sinks=self._sinks,
            )  # fmt: skip
            return
        backend = choose(self._plan.settings.spec, "cpu", torch.device("cpu"), self._dtype)
        assert isinstance(backend, CpuBackend)
        self._kernel = backend.kernel
        self._told: Answers | None = None

    @property
    def serves_policy(self) -> bool:
        """Whether the policy serves the layer. A layer with a window, beside others, keeps its window."""
        return self._windowed is None

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Any,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of a step's tokens, [tokens, heads, dim] each; `output` gets it."""
        if attn_metadata is None:  # vLLM measures the memory of a step, or compiles
            return output.zero_()
        if self._windowed is not None:
            self._windowed.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
            self._windowed.forward(layer, query, key, value, kv_cache, attn_metadata, output)
            return output
        step: Step = attn_metadata
        if self._told is None:
            self._tell(extract_layer_index(layer.layer_name), kv_cache)
        if step.parts:
            self._blocks[step.block, :, 0, step.offset] = key[step.rows]
            self._blocks[step.block, :, 1, step.offset] = value[step.rows]
        for part in step.parts:
            self._parts.read(part, step.table, query, key, value, output)
        for state, tokens in step.rejected:
            self._undo.take_back(state, tokens)
        for number, generated in enumerate(step.generated):
            if self._guesses:
                self._undo.note(generated, step.table, first=number == 0)
            self._decode(generated, step.table, query, key, value, output)
        step.evictions.layer_is_done(kv_cache, self._counted, step)
        if self._tracing is not None:
            self._tracing.layer_is_done(self.number, self._held, step)
        return output

    def _find(self, layer: int, cache: Tensor) -> SlotState:
        """Note where things lie in the layer's blocks. Return an empty state of it."""
        count, heads, size, width = cache.shape
        assert cache.is_contiguous() and (heads, width) == (self.num_kv_heads, 2 * self.head_size)
        self.number, self._blocks = layer, cache.view(count, heads, 2, size, self.head_size)
        self._lies = lies = state_of(self._plan, heads, self.head_size, self._dtype, aligned=self.aligned)
        state = self._plan.settings.state(layer, self._plan.layers)
        state.column_index.ring_sizes = lies.ring_sizes
        self._index = state.column_index
        self._counted = Lies(lies.places["seen"], lies.places["position"], heads, lies.slots, 1 + cdiv(lies.slots, size))
        return state

    def _tell(self, layer: int, cache: Tensor) -> None:
        """Prepare the kernel's call: what does not change between steps."""
        state, heads = self._find(layer, cache), self.num_kv_heads
        self._parts = PromptParts(self._blocks, self.scale, self._cap, self._sinks)
        self._rings, self._numbers = state.column_index.ring_rows(), state.settings.resolve(torch.ones(1)).contiguous()
        args = DecodeArgs(
            batch=1, kv_heads=heads, group=self.num_heads // heads, key_dim=self.head_size, value_dim=self.head_size,
            slots=self._lies.slots, tokens=1, **strides_of(self._numbers), layer=layer, softcap=self._cap,
            head_offset=get_tensor_model_parallel_rank() * heads, seed=state.seed & 0xFFFFFFFF, threads=1, scale=self.scale,
        )  # fmt: skip
        point(args, ring_rows=self._rings, params=self._numbers)
        places = self._lies.places
        self._told = Answers(self._kernel, args, self._blocks, places, self._sinks)
        self._undo = Guesses(self._blocks, places["position"], self._lies.slots, self._guesses)

    def _decode(self, generated: Generated, table: Tensor, *vectors: Tensor) -> None:
        """Attend from the tokens and update the policy's state, in one call of C++."""
        assert self._told is not None
        which, token_values, supplied = (
            (generated.row, generated.request, generated.place, generated.prompt),
            generated.token_values,
            None,
        )
        if token_values is not None:
            supplied = token_values.of_call(self.num_kv_heads)
            for state, late in token_values.late.items():
                mark_late(self._plan.settings.spec, self._columns_of(state), self.held(state), late)
        query, key, value, output = vectors
        self._told.decode_rows(table, which, query, key, value, output, supplied)

    def _columns_of(self, state: int) -> dict[str, Tensor]:
        """An answer's state columns by name, [kv_heads, slots] each, as they lie in their block."""
        rows, at = self._index.rows, self._lies.places["columns"]
        numbers = rows * self.num_kv_heads * self._lies.slots
        table = self._blocks[state].flatten().view(torch.uint8)[at : at + 4 * numbers].view(torch.float32)
        return self._index.single(table.view(rows, self.num_kv_heads, self._lies.slots))

    def _held(self, answer: Answer) -> tuple[int, Tensor]:
        """Return how many tokens a request has read, and the places of those that it holds, int32 [kv_heads, tokens], -1 for none."""
        prompt = torch.arange(min(answer.prompt, answer.read), dtype=torch.int32).expand(self.num_kv_heads, -1)
        return answer.read, prompt if answer.read <= answer.prompt else torch.cat([prompt, self.held(answer.state)], 1)

    def held(self, block: int) -> Tensor:
        """The places of the tokens that an answer holds, int32 [kv_heads, slots], -1 where there is none.

        Args:
            block: that of its state.
        """
        state = self._blocks[block].flatten().view(torch.uint8)
        at, count = self._lies.places["position"], self.num_kv_heads * self._lies.slots
        return state[at : at + 4 * count].view(torch.int32).view(self.num_kv_heads, -1).clone()
