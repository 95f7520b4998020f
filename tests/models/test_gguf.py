"""A GGUF file becomes a folder that holds the same model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvdsl.errors import KvdslError
from kvdsl.models.gguf import convert

gguf = pytest.importorskip("gguf", reason="conversion needs the package gguf")

HIDDEN, HEADS, KV_HEADS, FEED, LAYERS = 96, 3, 1, 160, 2  # SmolLM2's ratios: a group of 3
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh", "ab", "cd"]


def write_tiny(file: Path) -> None:
    """A Llama of two layers with quantised weights, as llama.cpp writes it."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    generator = torch.Generator().manual_seed(3)

    def add(name: str, *shape: int) -> None:
        weights = (torch.randn(shape, generator=generator) / 8).numpy()
        if len(shape) == 1:
            writer.add_tensor(name, weights + 1)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quants.quantize(weights, kind), raw_dtype=kind)

    head = HIDDEN // HEADS
    add("token_embd.weight", len(WORDS), HIDDEN)
    add("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        add(at + "attn_norm.weight", HIDDEN)
        add(at + "ffn_norm.weight", HIDDEN)
        add(at + "attn_q.weight", HIDDEN, HIDDEN)
        add(at + "attn_k.weight", KV_HEADS * head, HIDDEN)
        add(at + "attn_v.weight", KV_HEADS * head, HIDDEN)
        add(at + "attn_output.weight", HIDDEN, HIDDEN)
        add(at + "ffn_gate.weight", FEED, HIDDEN)
        add(at + "ffn_up.weight", FEED, HIDDEN)
        add(at + "ffn_down.weight", HIDDEN, FEED)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_folder_holds_what_the_file_stands_for(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_tiny(tmp_path / "tiny.gguf")
    folder = tmp_path / "folder"
    folder.mkdir()
    convert(tmp_path / "tiny.gguf", folder)

    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == 100000.0  # transformers 4 looks for it here, transformers 5 in rope_parameters
    assert "quantization_config" not in config and config["architectures"] == ["LlamaForCausalLM"]
    assert str(tmp_path) not in (folder / "config.json").read_text()

    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32).eval()
    ours = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert ours.dtype == torch.float32
    ids = torch.tensor([[3, 4, 11, 12, 7]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, read(ids).logits, rtol=0, atol=0)

    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert dict(tokenizer("abcd")) == {"input_ids": [11, 12], "attention_mask": [1, 1]}
    told = json.loads((folder / "tokenizer_config.json").read_text())
    assert told["tokenizer_class"] == "PreTrainedTokenizerFast"  # which transformers 4 and 5 know
    assert [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id] == [1, 2, 2, 0]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "<|im_start|>ab<|im_end|>"


def test_weights_that_cannot_be_written_are_one_line(tmp_path: Path) -> None:
    """As on a full disk: safetensors' own error, which is none of Python's."""
    write_tiny(tmp_path / "tiny.gguf")
    folder = tmp_path / "folder"
    (folder / "model.safetensors").mkdir(parents=True)
    with pytest.raises(
        KvdslError, match=r"the weights cannot be written into .*folder .*: free some space, or set KVDSL_DATA_DIR"
    ):
        convert(tmp_path / "tiny.gguf", folder)
