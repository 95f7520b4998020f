"""Tiny models of every class: a config's sizes are known by their names, and what that does not get right stands in a table."""

from __future__ import annotations

import copy
import re
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

VOCAB = 101
TOKENS = range(3, 90)
"""What texts are made of; ids above are for the special tokens that a config has."""

MOST_PARAMETERS = 4_000_000
POSITIONS = 512
HEADS = 4

SIZES: dict[int, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input unpadded_vocab_size decoder_vocab_size",
    POSITIONS: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions context_length "
    "model_max_length original_max_position_embeddings position_bias_max_distance max_length",
    96: "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim dff dim_ff d_inner ffn_hidden_size feed_forward_size "
    "intermediate_size_mlp dense_intermediate_size n_inner",
    64: "hidden_size n_embd d_model emb_dim embed_dim embedding_dim embedding_size word_embed_proj_dim attention_hidden_size "
    "lru_width input_embedding_size output_embedding_size backbone_hidden_size",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size q_lora_rank "
    "kv_lora_rank o_lora_rank shared_experts_intermediate_size moe_shared_expert_intermediate_size router_hidden_size "
    "pronunciation_embed_dim shape_embed_dim index_block_size num_mel_bins classifier_proj_size prompt_mid_dim "
    "pronunciation_vocab_size shape_vocab_size position_bias_num_buckets ple_embed_dim image_size",
    16: "head_dim qk_nope_head_dim v_head_dim qk_rope_head_dim index_head_dim linear_key_head_dim linear_value_head_dim "
    "linear_head_dim swa_head_dim dim_head kv_channels attention_head_size d_head hidden_size_per_layer_input "
    "query_pre_attn_scalar mamba_d_state state_size mamba_d_head mamba_head_dim ssm_state_size time_step_rank mamba_dt_rank "
    "loop_gate_rank adapter_rank chunk_size mamba_chunk_size index_topk rotary_dim laurel_rank hc_lowrank num_centroids "
    "keep_window_size rel_extent",
    8: "sliding_window sliding_window_size attention_window_size window_size local_attention patch_size d_rel "
    "centroid_intermediate_top_k gated_norm_rank",
    HEADS: "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads attention_heads "
    "linear_num_value_heads linear_num_heads swa_num_attention_heads num_decoder_attention_heads num_encoder_attention_heads "
    "index_n_heads num_experts n_routed_experts num_local_experts moe_num_experts",
    2: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers "
    "num_blocks depth num_experts_per_tok num_experts_per_token moe_topk moe_k linear_num_key_heads",
    1: "n_group topk_group num_expert_group n_groups mamba_n_groups first_k_dense_replace num_dense_layers "
    "num_kv_shared_layers zero_expert_num max_window_layers n_layers_per_attn_res_block vision_soft_tokens_per_image "
    "mm_tokens_per_image",
    0: "num_nextn_predict_layers",
}  # fmt: skip
"""What becomes of a number, by the names under which configs have it."""

_SIZE = {name: size for size, names in SIZES.items() for name in names.split()}
_LAYERS = ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_decoder_layers"]
_KV_HEADS = {"num_key_value_heads": "num_attention_heads", "swa_num_key_value_heads": "swa_num_attention_heads"}
_NO_TOKEN = {"eos_token_id", "forced_eos_token_id", "forced_bos_token_id", "begin_suppress_tokens", "suppress_tokens"}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1}
_OFF = re.compile(r"drop(out|_?path)|pdrop|layerdrop|jitter|mask_(time|feature)_prob")


_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
_MIX_OF_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_DOTS3_TEXT = {
    "layer_types": ["indexed_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "num_hidden_layers": 2,
    "head_dim": 32,
    "per_layer_config": {
        1: {
            "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "head_dim": 32,
            "qk_nope_head_dim": 16, "v_head_dim": 16, "qk_rope_head_dim": 16,
        }
    },
}  # fmt: skip
_GEMMA3N_TEXT = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    "intermediate_size": 96,
}
_GEMMA4_SHARED = {
    "hidden_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False, "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 2, "num_hidden_layers": 2, **_ALTERNATING,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_ZAMBA = {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4}
_QWEN4_TEXT = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16, "indexer_compress_ratio": 4,
}  # fmt: skip

EXTRAS: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1], "num_hidden_layers": 2},
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blt": {
        "encoder_hash_byte_group_vocab": VOCAB,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
    },
    "cohere_compass_text": {
        **_ALTERNATING,
        "num_hidden_layers": 2,
        "rope_parameters": {"sliding_attention": dict(_ROPE), "full_attention": dict(_ROPE)},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {**_MIX_OF_EXPERTS, "first_k_dense_replace": 1, "topk_method": "greedy"},
    "dory": {
        **_ALTERNATING,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
    },
    "dots1": _MIX_OF_EXPERTS,
    "dots3_note": {
        "text_config": _DOTS3_TEXT,
        "vision_config": {
            "adapter_in_dim": 64,
            "adapter_out_dim": 64,
            "mlp_layer_types": ["dense"] * 2,
            "per_layer_config": {},
        },
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64, "downsample_hidden_size": 16, "feature_size": 16},
    },
    "dots3_note_text": _DOTS3_TEXT,
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": 1},
    "gemma3n": {"text_config": _GEMMA3N_TEXT},
    "gemma3n_text": _GEMMA3N_TEXT,
    "gemma4_assistant": {"text_config": _GEMMA4_SHARED},
    "granitemoehybrid": {**_MAMBA, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "llama": {"num_key_value_heads": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16},
    "qwen2": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _QWEN4_TEXT},
    "qwen4_exp_text": _QWEN4_TEXT,
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "lsh_attn_chunk_length": 16,
        "local_attn_chunk_length": 16,
        "num_buckets": 2,
        "num_hidden_layers": 2,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {**_ZAMBA, "attention_head_dim": 32, "attention_hidden_size": 128},
    "zamba2": {**_ZAMBA, "attention_head_dim": 32, "attention_hidden_size": 128, "n_mamba_heads": 8, "mamba_headdim": 16},
}
"""By model type, what its sizes need beyond their names: attributes of the config, nested ones as dictionaries."""


class NotTiny(Exception):
    """A class of which no tiny model can be made or run here, and why."""


def tiny_config(model_type: str, extra: dict[str, Any] | None = None) -> PretrainedConfig:
    """The smallest config of this type whose parts all are there."""
    own = EXTRAS.get(model_type, {}) | (extra or {})
    kind = CONFIG_MAPPING[model_type]
    return kind(**shrunk(kind, own))


def shrunk(kind: type[PretrainedConfig], own: dict[str, Any]) -> dict[str, Any]:
    """What to construct a config with: small sizes, parts inside of it likewise, and `own` before all that."""
    try:
        usual = kind()
    except Exception:  # some defaults contradict each other
        usual = kind(**own)
    numbers = {name: value for name, value in vars(usual).items() if not name.startswith("_")}
    made: dict[str, Any] = {}
    for name, value in numbers.items():
        if isinstance(value, PretrainedConfig):
            made[name] = shrunk(type(value), own.get(name, {}))
            if "model_type" in value.to_dict():
                made[name]["model_type"] = value.model_type
        elif name not in own:
            made |= _smaller(name, value, numbers)
    made |= _fewer_layers(numbers, own)
    return made | {name: value for name, value in own.items() if not isinstance(numbers.get(name), PretrainedConfig)}


def _smaller(name: str, value: Any, numbers: dict[str, Any]) -> dict[str, Any]:
    """What becomes of one attribute, if anything."""
    if name in _NO_TOKEN:
        return {name: None}
    if name in _TOKENS:
        return {name: _TOKENS[name]}
    if name == "is_decoder":  # of models that read in both directions by default
        return {name: True}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return {}
    if _OFF.search(name):
        return {name: type(value)(0)}
    if name in ("initializer_range", "init_std", "embedding_initializer_range", "initializer_factor"):
        return {name: 0.2}
    if re.search(r"token_(id|index)$|_index$", name):
        taken = sorted(other for other in numbers if re.search(r"token_(id|index)$|_index$", other))
        return {name: VOCAB - 1 - taken.index(name) % (VOCAB - 1 - TOKENS.stop)}
    if name in _KV_HEADS:
        return {name: _kv_heads(int(value), numbers.get(_KV_HEADS[name]))}
    if name in _SIZE and value > _SIZE[name]:
        return {name: _SIZE[name]}
    return {}


def _kv_heads(usual: int, heads: Any) -> int:
    """KV heads: one, as many as query heads, or half, as the config's own sizes have it."""
    return HEADS if usual == heads else min(usual, HEADS // 2)


def _fewer_layers(numbers: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """A layer of every kind, two at least: their number, and every list that has an entry for each layer."""
    counts = [name for name in _LAYERS if isinstance(numbers.get(name), int)]
    if not counts or any(name in own for name in counts):
        return {}
    usual = numbers[counts[0]]
    lists = {
        name: value
        for name, value in numbers.items()
        if isinstance(value, list | tuple) and len(value) == usual > 1 and name not in own
    }
    kinds: dict[Any, int] = {}
    for index in range(usual):
        kinds.setdefault(tuple(str(x[index]) for x in lists.values() if isinstance(x[index], str)), index)
    chosen = sorted({*kinds.values(), *range(max(0, 2 - len(kinds)) + 1 if len(kinds) < 2 else 0)})
    made: dict[str, Any] = {name: [value[index] for index in chosen] for name, value in lists.items()}
    return made | {name: len(chosen) for name in counts}


def tiny_model(model_type: str, extra: dict[str, Any] | None = None) -> Any:
    """A fresh model of a type's causal language model, tiny, in evaluation mode; its weights are the same at every call.

    Raises:
        NotTiny: if it stays large.
    """
    config = tiny_config(model_type, extra)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(config, kind.config_class):  # one that reads text alone, of a type that knows more
        config = next((part for part in vars(config).values() if isinstance(part, kind.config_class)), config)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    if count > MOST_PARAMETERS:
        raise NotTiny(f"its sizes are not known by their names: {count:,} parameters")
    torch.manual_seed(7)
    model = kind(config).eval()
    _stir(model)
    settings = getattr(model, "generation_config", None)
    if settings is not None:
        settings.eos_token_id, settings.pad_token_id = None, 0
    return model


def _stir(model: torch.nn.Module) -> None:
    """Weights that begin as constants (norms, biases, sinks, gates) would hide mistakes: they get some noise."""
    draw = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point() and weight.numel() > 1 and bool((weight == weight.flatten()[0]).all()):
                weight.add_(0.1 * torch.randn(weight.shape, generator=draw))
