"""The classes by which vLLM knows kvdsl's attention: what a layer's cache is, and what a step's requests are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, AttentionMetadataBuilder, MultipleOf
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, replace_as

from kvdsl.integrations.vllm.attention import PolicyAttention
from kvdsl.integrations.vllm.evictions import Evictions
from kvdsl.integrations.vllm.ledger import Ledger
from kvdsl.integrations.vllm.page import page
from kvdsl.integrations.vllm.refusals import refuse_configuration, refuse_layer
from kvdsl.integrations.vllm.settings import asked, reads_whole
from kvdsl.integrations.vllm.spec import PageSpec


@dataclass(frozen=True)
class Prompt:
    """A request's prompt in a step, or a part of it.

    Attributes:
        first, last: its rows in the step's tokens, from `first` to before `last`.
        page: the block that will hold what the policy keeps.
        begins: whether the part is the first.
        ends: whether it is known to be the last. vLLM does not say so; but a step that has room for more tokens has all that there are.
    """

    first: int
    last: int
    page: int
    begins: bool
    ends: bool


@dataclass(frozen=True)
class Step:
    """What a step's requests are.

    Attributes:
        prompts: those whose prompts are being read.
        pages: of the others, each of which has one token; int64 [requests].
        rows: where in the step's tokens these are; int64 [requests].
        evictions: counts who has left, once all layers have attended.
    """

    prompts: list[Prompt]
    pages: Tensor
    rows: Tensor
    evictions: Evictions


class PolicyBackend(AttentionBackend):  # type: ignore[misc]
    """Attention under a policy, whose whole cache of a request is one page."""

    supported_dtypes: ClassVar = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar = ["auto"]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "KVDSL"

    @staticmethod
    def get_impl_cls() -> type[PolicyAttention]:
        return PolicyAttention

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """A page in place of blocks of tokens, for every layer that attends."""
        refuse_layer(spec, FullAttentionSpec)
        config = get_current_vllm_config_or_none()
        settings = asked(config) or PolicyAttention.settings
        assert settings is not None
        whole = PolicyAttention.whole if config is None else reads_whole(config)
        found = page(settings, spec.num_kv_heads, spec.head_size, spec.dtype)
        return replace_as(
            spec, PageSpec, drop=("sliding_window", "attention_chunk_size", "non_causal"), num_head_slots=1, tokens_per_state=-1,
            state_content_bytes=found.bytes, dcp_sharded=False, non_causal=whole,
        )  # fmt: skip


class StepBuilder(AttentionMetadataBuilder[Step]):  # type: ignore[misc]
    """Sorts a step's requests."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse_configuration(vllm_config)
        scheduler = vllm_config.scheduler_config
        most = scheduler.max_num_scheduled_tokens or scheduler.max_num_batched_tokens
        self._evictions = Evictions(len(layer_names), Ledger.make(vllm_config.parallel_config.data_parallel_index))
        self._room = 0 if scheduler.long_prefill_token_threshold else most
        """Tokens of a step. In one that has fewer no prompt was cut; it may have been if long ones are cut anyhow."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step:
        """A request has a part of its prompt, or one token after that."""
        known = common_attn_metadata
        starts, lengths = known.query_start_loc_cpu.tolist(), known.seq_lens.tolist()
        pages, reading = known.block_table_tensor[:, 0].tolist(), known.is_prefilling.tolist()
        ends = starts[known.num_reqs] < self._room
        prompts, decoded = [], []
        for request in range(known.num_reqs):
            first, last = starts[request], starts[request + 1]
            if reading[request] and last > first:
                prompts.append(Prompt(first, last, pages[request], begins=last - first == lengths[request], ends=ends))
            elif last - first == 1:
                decoded.append((pages[request], first))
            elif last > first:
                raise RuntimeError(f"{last - first} tokens came at once behind a prompt: kvdsl takes them one by one")
        table = torch.tensor(decoded, dtype=torch.int64).view(-1, 2)
        return Step(prompts, table[:, 0].contiguous(), table[:, 1].contiguous(), self._evictions)
