"""Tiny models of many families, made from configs with fixed seeds, and what to compare them by."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvdsl.runtime.hf.versions import with_cache

VOCAB = 101

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "attention_dropout": 0.0,
    "initializer_range": 0.2,  # attention that is far from uniform
}

_ALTERNATING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-windowed": ("Mistral", {"sliding_window": 8}),
    "gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, **_ALTERNATING}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "query_pre_attn_scalar": 16, **_ALTERNATING}),
    "phi3": ("Phi3", {}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5}),
    # beyond the families that are promised
    "qwen2-hybrid": ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1, **_ALTERNATING}),
    "mixtral": ("Mixtral", {"num_local_experts": 2, "sliding_window": None}),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.5}),
    "olmo2": ("Olmo2", {}),
    "cohere": ("Cohere", {}),
    "granite": ("Granite", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "smollm3": ("SmolLM3", {}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "gpt_oss": ("GptOss", {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, **_ALTERNATING}),
    "gpt2": ("GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "gptj": ("GPTJ", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64}),
    "codegen": ("CodeGen", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 64}),
}

PROMISED = tuple(FAMILIES)[:9]

_RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])

EARLY = _RELEASE < (5, 5)
"""A release that prepares its inputs from cache positions."""


def _windows_stumble() -> bool:
    window = DynamicSlidingWindowLayer(sliding_window=4)
    if not hasattr(window, "activate_past_recording"):
        return False
    window.activate_past_recording()
    key = torch.zeros(1, 1, 5, 2)
    window.update(key, key)
    told, _ = window.get_mask_sizes(1)
    return window.update(key[:, :, :1], key[:, :, :1])[0].shape[2] != told


WINDOWS_STUMBLE = _windows_stumble()
"""Whether transformers' own sliding windows, once they note the past, give more keys than their mask has: 5.17's do, without kvdsl too."""

SINCE = {"opt": (5, 5), "stablelm": (5, 5), "gptj": (5, 24), "codegen": (5, 24)}
"""From which release on the attention of some families can be reached."""

NOT_YET = {family: FAMILIES.pop(family) for family, since in SINCE.items() if since > _RELEASE}
"""Families whose attention this release does not let be reached."""


@cache
def model(family: str) -> Any:
    """A tiny causal language model in evaluation mode, the same at every call."""
    stem, extra = FAMILIES[family]
    return make(stem, **extra)


@cache
def untouched(family: str) -> Any:
    """The same model once more, which no test gives to a kvdsl cache; its attention is the plainest there is."""
    stem, extra = FAMILIES[family]
    made = make(stem, **extra)
    made.set_attn_implementation("eager")
    return made


def make(stem: str, **extra: Any) -> Any:
    """A fresh model of the named class with the small sizes, its weights from a fixed seed."""
    config = getattr(transformers, f"{stem}Config")(**{**_SMALL, **extra})
    config.eos_token_id = None
    name = stem.removesuffix("Text") if not hasattr(transformers, f"{stem}ForCausalLM") else stem
    suffix = "LMHeadModel" if stem == "GPT2" else "ForCausalLM"
    torch.manual_seed(7)
    made = getattr(transformers, name + suffix)(config).eval()
    if getattr(config, "attn_logit_softcapping", None) is not None and "attn_implementation" not in extra:
        made.set_attn_implementation("eager")  # transformers 4.57 lets it have `sdpa`, which drops the cap
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = 0
    return made


def multimodal(stem: str) -> Any:
    """A fresh tiny model that reads images as well."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    eye = {**sizes, "image_size": 16, "patch_size": 8}
    if stem == "Gemma3":
        text = transformers.Gemma3TextConfig(**{**_SMALL, "head_dim": 16, **_ALTERNATING})
        vision = transformers.SiglipVisionConfig(**eye)
        extra = {"mm_tokens_per_image": 1, "image_token_index": 100, "boi_token_index": 99, "eoi_token_index": 98}
    elif stem == "Llava":
        text = transformers.LlamaConfig(**_SMALL)
        vision = transformers.CLIPVisionConfig(**eye, projection_dim=16)
        extra = {"image_token_index": 100}
    else:
        rope = {"rope_type": "default", "type": "mrope", "mrope_section": [2, 2, 4], "rope_theta": 1e4}
        text = {**_SMALL, "rope_scaling": dict(rope), "rope_parameters": dict(rope)}
        vision = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2}
        extra = {"image_token_id": 100, "video_token_id": 99, "vision_start_token_id": 98, "vision_end_token_id": 97}
    config = getattr(transformers, f"{stem}Config")(text_config=text, vision_config=vision, **extra)
    torch.manual_seed(7)
    made = getattr(transformers, f"{stem}ForConditionalGeneration")(config).eval()
    made.generation_config.eos_token_id = None
    made.generation_config.pad_token_id = 0
    return made


def prompt(batch: int, length: int, seed: int = 1) -> Tensor:
    """Random token ids, none of which is padding: [batch, length]."""
    return torch.randint(3, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """Inputs of rows [length] each, padded on the left to the longest."""
    longest = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :] = row
        mask[index, longest - len(row) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


def greedy(
    model: Any, inputs: dict[str, Tensor], tokens: int, *, cache: Any = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """New tokens [batch, tokens] and their logits [batch, tokens, vocabulary], chosen greedily."""
    options = {"max_new_tokens": tokens, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    given = {} if cache is None else with_cache(cache)
    out = model.generate(**inputs, **options, **given, **kwargs)
    return out.sequences[:, inputs["input_ids"].shape[1] :], torch.stack(out.logits, 1)


def plain(ids: Tensor) -> dict[str, Tensor]:
    """Inputs without padding."""
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def place(model: Any, length: int) -> dict[str, Tensor]:
    """What releases that prepare inputs from cache positions cannot find out inside of a graph."""
    takes = "cache_position" in inspect.signature(model.forward).parameters
    return {"cache_position": torch.tensor([length])} if takes else {}


def assert_same_text(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], bound: float = 1e-4) -> None:
    """Logits within the bound until the tokens diverge, which they may only where the best two are that close."""
    for row in range(len(theirs[0])):
        for step in range(theirs[0].shape[1]):
            difference = (ours[1][row, step] - theirs[1][row, step]).abs().max()
            assert difference <= bound, f"row {row}, token {step}: logits differ by {difference:.2g}"
            if ours[0][row, step] != theirs[0][row, step]:
                best = theirs[1][row, step].topk(2).values
                assert best[0] - best[1] <= bound, f"row {row}, token {step}: another token at a clear choice"
                break
