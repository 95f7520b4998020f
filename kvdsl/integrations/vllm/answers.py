"""kvdsl's attention as vLLM sees it where requests share prompts. Prompts lie whole in vLLM's own blocks. kvdsl's kernels keep the
answer, under the policy, in the blocks behind them (`blocks`).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvdsl.integrations.vllm.answer_attention import AnswerAttention
from kvdsl.integrations.vllm.answer_step import Sorter
from kvdsl.integrations.vllm.backend import OwnBackend
from kvdsl.integrations.vllm.blocks import AnswerSpec, WindowSpec
from kvdsl.integrations.vllm.evictions import Evictions
from kvdsl.integrations.vllm.page import state_of
from kvdsl.integrations.vllm.refusals import refuse_configuration, refuse_layer, refuse_trace
from kvdsl.integrations.vllm.releases import ANSWERS
from kvdsl.integrations.vllm.settings import Plan
from kvdsl.integrations.vllm.texts import Texts


class AnswerBackend(OwnBackend):
    """Attention to a whole prompt and to what a policy keeps of the answer."""

    @staticmethod
    def get_name() -> str:
        return ANSWERS

    @staticmethod
    def get_impl_cls() -> type[AnswerAttention]:
        return AnswerAttention

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Blocks as vLLM has them, and those of an answer behind; a layer with a window beside others keeps vLLM's.

        Raises:
            KvdslError: if an answer's state does not fit into a block.
        """
        refuse_layer(spec, FullAttentionSpec, SlidingWindowSpec)
        if isinstance(spec, SlidingWindowSpec):
            return WindowSpec.of(spec)
        plan = Plan.of(get_current_vllm_config_or_none()) or AnswerAttention.plan
        assert plan is not None
        state = state_of(plan, spec.num_kv_heads, spec.head_size, spec.dtype, aligned=cls.get_impl_cls().aligned)
        state.check_fits(spec.block_size, spec.num_kv_heads * 2 * spec.head_size * spec.dtype.itemsize)
        return AnswerSpec.of(spec, state.slots)


class StepBuilder(AttentionMetadataBuilder[Any]):  # type: ignore[misc]
    """Sorts a step's tokens for the layers that see the whole text. vLLM's own builder serves layers with a window."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        assert AnswerAttention.plan is not None
        refuse_configuration(vllm_config, AnswerAttention.plan.settings.spec)
        refuse_trace(vllm_config)
        # Makes vLLM pass the prompts' lengths, see `backend.StepBuilder`.
        vllm_config.model_config.model_arch_config.rswa_window = vllm_config.model_config.max_model_len
        self._windowed = None
        if isinstance(kv_cache_spec, WindowSpec):
            self._windowed = CPUAttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)
            self._windowed.window_size = kv_cache_spec.sliding_window
            return
        evictions = Evictions.of_engine(vllm_config, get_tensor_model_parallel_rank(), len(layer_names))
        self._sorter = Sorter(kv_cache_spec.block_size, evictions, Texts.of(vllm_config))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Sort a step; None for one that vLLM makes up to compile or to warm up, without lengths of prompts."""
        if common_attn_metadata.rswa_prefix_lens is None:
            return None
        if self._windowed is not None:
            return self._windowed.build(common_prefix_len, common_attn_metadata, fast_build)
        return self._sorter.sort(common_attn_metadata)
