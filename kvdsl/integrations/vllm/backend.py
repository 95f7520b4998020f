"""kvdsl's attention as vLLM sees it: the kind of a layer's cache, and the builder that sorts a step's requests."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder, MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, SlidingWindowSpec, replace_as

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.attention import PolicyAttention
from kvdsl.integrations.vllm.blocks import PageSpec
from kvdsl.integrations.vllm.caches import InRows
from kvdsl.integrations.vllm.evictions import Evictions
from kvdsl.integrations.vllm.page import page
from kvdsl.integrations.vllm.refusals import refuse_biases, refuse_configuration, refuse_layer, refuse_trace
from kvdsl.integrations.vllm.releases import NAME
from kvdsl.integrations.vllm.settings import Plan
from kvdsl.integrations.vllm.step import Decoded, EveryOne, Prompt, Step, batches
from kvdsl.integrations.vllm.texts import Texts
from kvdsl.integrations.vllm.token_values import TokenValues


class OwnBackend(AttentionBackend):  # type: ignore[misc]
    """What both attentions of kvdsl's have: they write keys and values themselves, in the model's dtype, into blocks of any size."""

    supported_dtypes: ClassVar = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar = ["auto"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False


class PolicyBackend(OwnBackend):
    """Attention under a policy that keeps a request in one page."""

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[PolicyAttention]:
        return PolicyAttention

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """A page in place of blocks of tokens for every layer that attends. Layers of one kind have pages of one size."""
        refuse_layer(spec, FullAttentionSpec, SlidingWindowSpec)
        plan = Plan.of(get_current_vllm_config_or_none()) or PolicyAttention.plan
        assert plan is not None
        found = page(
            plan.layer(spec.sliding_window),
            spec.num_kv_heads,
            spec.head_size,
            spec.dtype,
            layers=plan.layers,
            longest=plan.longest,
            aligned=not current_platform.is_cpu(),
        )
        of_tokens = {field.name for field in fields(spec)} - {field.name for field in fields(PageSpec)}
        return replace_as(
            spec, PageSpec, drop=of_tokens, num_head_slots=1, tokens_per_state=-1, state_content_bytes=found.bytes,
            dcp_sharded=False, non_causal=plan.whole,
        )  # fmt: skip


class StepBuilder(AttentionMetadataBuilder[Step | EveryOne]):  # type: ignore[misc]
    """Sorts a step's requests for the layers that have pages of one kind."""

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """On GPUs vLLM captures steps in which each request has one token. It replays them for a prompt's last token, too, unless prompts
        come whole.
        """
        plan, scheduler = Plan.of(vllm_config), vllm_config.scheduler_config
        whole = plan is not None and plan.whole and not scheduler.long_prefill_token_threshold
        if current_platform.is_cpu() or not whole or not vllm_config.use_v2_model_runner:
            return AttentionCGSupport.NEVER
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        assert PolicyAttention.plan is not None
        refuse_configuration(vllm_config, PolicyAttention.plan.settings.spec)
        refuse_trace(vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        refuse_biases(
            {extract_layer_index(name): layers[name].impl.key_bias() for name in layer_names},
            PolicyAttention.plan.settings.spec,
        )
        # vLLM passes prompts' lengths only to attention that treats a prompt differently from what follows. It has one kind of that, with
        # this window, and checks only whether the number is there.
        vllm_config.model_config.model_arch_config.rswa_window = vllm_config.model_config.max_model_len
        own = [layers[name].impl.caches for name in layer_names]
        self._in_rows = isinstance(own[0], InRows)
        for one in own:
            if isinstance(one, InRows):
                one.let_go()
        self._captured = self.get_cudagraph_support(vllm_config, kv_cache_spec) != AttentionCGSupport.NEVER
        requests = vllm_config.scheduler_config.max_num_seqs
        self._every = EveryOne(
            torch.zeros(requests, dtype=torch.int32, device=device),
            torch.zeros(requests, 1, dtype=torch.bool, device=device),
        )
        self._evictions = Evictions.of_engine(vllm_config, get_tensor_model_parallel_rank(), len(layer_names))
        self._texts = Texts.of(vllm_config)
        self._read: dict[int, int] = {}
        """By page: how many tokens of its request have been read, guesses included."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step | EveryOne | None:
        """Sort a step. A request has tokens of its prompt, behind it, or both. None for a step that vLLM makes up to compile or to warm
        up, without lengths of prompts.
        """
        known = common_attn_metadata
        if known.rswa_prefix_lens is None:
            return None
        if self._in_rows and known.max_query_len == 1 and not bool(known.is_prefilling.any()):
            return self._every_one(known.block_table_tensor[:, 0])
        starts, lengths = known.query_start_loc_cpu.tolist(), known.seq_lens.tolist()
        pages, ends = known.block_table_tensor[:, 0].tolist(), known.rswa_prefix_lens.tolist()
        prompts: list[Prompt] = []
        rejected: list[tuple[int, int]] = []
        decoded: dict[int, list[tuple[int, int, TokenValues | None]]] = defaultdict(list)
        for request, (block, first, last, length, end) in enumerate(
            zip(pages, starts, starts[1:], lengths, ends, strict=False)
        ):
            if first == last:
                continue
            before = length - (last - first)
            if before and self._read[block] > before:
                rejected.append((block, self._read[block] - before))
            self._read[block] = length
            behind = max(first, min(last, first + end - before))  # the first row behind the prompt
            reader = None if self._texts is None else self._texts.rows[request].reader
            if behind > first:
                if before and self._captured:
                    raise KvdslError(
                        "a prompt that goes on is not served where vLLM captures steps: send it as a new request"
                    )
                read = before + behind - first
                token_values = None if reader is None else reader.of_prompt(before, read)
                prompts.append(Prompt(first, behind, block, begins=before == 0, ends=read == end, token_values=token_values))
            for number, row in enumerate(range(behind, last)):
                decoded[number].append((block, row, None if reader is None else reader.of_answer(before + row - first)))
        return Step(batches(prompts), [Decoded.of(found) for found in decoded.values()], rejected, self._evictions, pages)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> EveryOne:
        """Nobody's tokens: the table has no blocks."""
        return self._every_one(common_attn_metadata.block_table_tensor[:, 0])

    def _every_one(self, pages: Tensor) -> EveryOne:
        """A step that does not wait for the device: the kernels' arguments stay where they are. Block 0 belongs to no request."""
        count = len(pages)
        found = EveryOne(self._every.pages[:count], self._every.real[:count])
        found.pages.copy_(pages)
        torch.ne(pages[:, None], 0, out=found.real)
        return found
