"""Models of known shapes with random weights: what a token costs does not depend on what the weights are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvdsl.errors import KvdslError
from kvdsl.generation.models import DTYPES, quiet

_LLAMA = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096}

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-2-7b": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32,
    },
    "llama-2-13b": _LLAMA | {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 40,
    },
    "llama-30b": _LLAMA | {
        "hidden_size": 6656, "intermediate_size": 17920, "num_hidden_layers": 60, "num_attention_heads": 52,
        "num_key_value_heads": 52, "max_position_embeddings": 2048,
    },
    "longchat-7b-32k": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "max_position_embeddings": 32768,
    },
    "llama-3.1-8b": _LLAMA | {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 5e5,
    },
    "gpt-neox-20b": {
        "model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
        "num_attention_heads": 64, "vocab_size": 50432, "max_position_embeddings": 2048,
    },
    "smollm2-135m": _LLAMA | {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "rope_theta": 1e5,
        "tie_word_embeddings": True,
    },
    "tiny": _LLAMA | {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 128,
    },
}  # fmt: skip
"""Name -> the published model's config, as far as it decides what a token costs; `tiny` is for trying things out."""


def parse_shape(text: str) -> tuple[str, int]:
    """`llama-2-7b:2` as a name and a number of layers; without a number, all of the model's.

    Raises:
        KvdslError: if there is no such shape, or no such number.
    """
    name, colon, layers = text.partition(":")
    if name not in SHAPES:
        raise KvdslError(
            f"there is no shape `{name}`; choose of {', '.join(SHAPES)}, and give for example `{name}:2` for two layers"
        )
    own = int(SHAPES[name]["num_hidden_layers"])
    if not colon:
        return name, own
    if not layers.isdecimal() or not 1 <= int(layers) <= own:
        raise KvdslError(f"`{text}` asks for `{layers}` layers; `{name}` has 1 to {own}")
    return name, int(layers)


def shaped_model(text: str, dtype: str | None = None, seed: int = 0) -> Any:
    """A model of that shape, ready for inference on the best device; its embeddings and its head are whole.

    Args:
        text: as `parse_shape` reads it.
        dtype: `fp32` (the default), `bf16` or `fp16`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    name, layers = parse_shape(text)
    shape = dict(SHAPES[name]) | {"num_hidden_layers": layers}
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    torch.manual_seed(seed)
    with quiet():
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype or "fp32"])
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
