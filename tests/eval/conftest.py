"""A model with random weights and the shipped tokenizer: enough to check what is computed, in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvdsl_lab.assets import reference_model_path


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(reference_model_path(), local_files_only=True)


@pytest.fixture
def model(tokenizer: Any) -> Any:
    return model_of(tokenizer, layers=2)


@pytest.fixture
def tiny(model: Any, tokenizer: Any, tmp_path: Path) -> str:
    """A folder with both."""
    return saved(model, tokenizer, tmp_path / "model")


def saved(model: Any, tokenizer: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def model_of(tokenizer: Any, layers: int, positions: int = 256) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=positions, bos_token_id=tokenizer.bos_token_id, eos_token_id=None,
        pad_token_id=None, initializer_range=0.5,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()
