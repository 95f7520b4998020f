"""The names, parameters and fields of vLLM that kvdsl uses. vLLM may change any of them."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from typing import Any

_SPECS, _MANAGERS, _ATTENTION = (
    "vllm.v1.kv_cache_interface",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.attention.backend",
)

_REGISTRY = "vllm.v1.attention.backends.registry"

USED: dict[str, dict[str, str]] = {
    "vllm.config": {
        "get_current_vllm_config": "",
        "get_current_vllm_config_or_none": "",
        "VllmConfig.use_v2_model_runner": "",
        "CacheConfig": "block_size user_specified_block_size",
        "ModelConfig.get_num_kv_heads": "parallel_config",
        "ModelConfig.get_head_size": "",
    },
    "vllm.v1.kv_cache_spec_registry": {
        "KVCacheSpecRegistry._ensure_registered": "",
        "KVCacheSpecRegistry.register": "manager_class uniform_type_base_spec",
    },
    _SPECS: {
        "KVCacheLayout.LBHNC": "",
        "CircularBufferSpec": "block_size num_head_slots tokens_per_state state_content_bytes dcp_sharded",
        "FullAttentionSpec": "block_size num_kv_heads head_size dtype sliding_window",
        "FullAttentionSpec.merge": "specs",
        "FullAttentionSpec.max_num_blocks_per_req": "vllm_config max_len",
        "FullAttentionSpec.max_memory_usage_bytes": "vllm_config",
        "SlidingWindowSpec": "block_size num_kv_heads head_size dtype sliding_window",
        "replace_as": "drop",
    },
    _MANAGERS: {
        "CircularBufferManager": "",
        "FullAttentionManager.remove_skipped_blocks": "request_id processed_computed_tokens num_prompt_tokens",
        "FullAttentionManager.get_num_blocks_to_allocate": "request_id num_tokens",
        "FullAttentionManager.allocate_new_blocks": "request_id num_tokens num_tokens_main_model",
        "FullAttentionManager.cache_blocks": "request num_tokens retention_interval replay_boundaries",
        "SlidingWindowManager.cache_blocks": "request num_tokens retention_interval replay_boundaries",
    },
    _ATTENTION: {
        "AttentionBackend.customize_spec": "",
        "AttentionBackend.supported_kv_cache_layouts": "",
        "AttentionBackend.get_supported_kernel_block_sizes": "",
        "AttentionImpl": "",
        "AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE": "",
        "AttentionMetadataBuilder.build": "common_prefix_len common_attn_metadata fast_build",
        "AttentionMetadataBuilder.build_for_cudagraph_capture": "common_attn_metadata",
        "AttentionMetadataBuilder.get_cudagraph_support": "vllm_config kv_cache_spec",
        "CommonAttentionMetadata": "query_start_loc query_start_loc_cpu seq_lens block_table_tensor max_query_len max_seq_len "
        "is_prefilling rswa_prefix_lens",
    },
    _REGISTRY: {"AttentionBackendEnum.CPU_ATTN": "", "register_backend": ""},
    "vllm.v1.attention.selector": {"_cached_get_attn_backend.cache_clear": ""},
    "vllm.v1.attention.backends.cpu_attn": {
        "CPUAttentionBackend": "",
        "CPUAttentionBackendImpl.do_kv_cache_update": "layer key value kv_cache slot_mapping",
        "CPUAttentionMetadataBuilder": "",
        "_get_attn_isa": "dtype block_size head_size",
    },
    "vllm.v1.attention.backends.fa_utils": {"get_flash_attn_version": "head_size"},
    "vllm.exceptions": {"VLLMValidationError": ""},
    "vllm.tokenizers": {"cached_tokenizer_from_config": "model_config"},
    "vllm.v1.engine.input_processor": {"InputProcessor.process_inputs": ""},
    "vllm.v1.request": {"Request.update_block_hashes": ""},
    "vllm.v1.sample.logits_processor": {"LogitsProcessor": "", "MoveDirectionality": ""},
    "vllm.v1.metrics.loggers": {"StatLoggerBase.record": "scheduler_stats iteration_stats mm_cache_stats engine_idx"},
}
"""By module: its names, and the parameters of a function or the fields of a class that kvdsl uses."""


def missing() -> list[str]:
    """List what this vLLM lacks."""
    found = []
    for module, names in USED.items():
        try:
            here: Any = importlib.import_module(module)
        except ImportError:
            found.append(module)
            continue
        for name, used in names.items():
            try:
                one = here
                for part in name.split("."):
                    one = getattr(one, part)
            except AttributeError:
                found.append(f"{module}.{name}")
                continue
            found += [f"{module}.{name}: {word}" for word in used.split() if word not in _words(one)]
    return found


def _words(one: Any) -> set[str]:
    """The fields of a dataclass, or the parameters of a function."""
    if dataclasses.is_dataclass(one):
        return {field.name for field in dataclasses.fields(one)} | set(dir(one))
    return set(inspect.signature(one).parameters)
