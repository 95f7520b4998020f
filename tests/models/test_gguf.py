"""A GGUF file becomes a folder that holds the same model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvdsl.errors import KvdslError
from kvdsl.models.gguf import convert

gguf = pytest.importorskip("gguf", reason="conversion needs the package gguf")

HIDDEN, HEADS, KV_HEADS, FEED, LAYERS = 96, 3, 1, 160, 2  # SmolLM2's ratios: a group of 3
WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefgh", "ab", "cd"]
SPECIAL = {"bos": 1, "eos": 2, "pad": 2, "unk": 0}


def write_tiny(
    file: Path,
    kind: str = "llama",
    pre: str = "smollm",
    words: Sequence[str] = WORDS,
    types: Sequence[int] = (3, 3, 3) + (1,) * 10,
    special: Mapping[str, int] = SPECIAL,
    output: str | None = None,
) -> None:
    """A model of two layers with quantised weights, as llama.cpp writes it.

    Args:
        output: "shared" for an output layer that is the embedding, quantised with more bits; "own" for one of its own.
    """
    writer = gguf.GGUFWriter(file, kind)
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
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types(types)
    writer.add_token_merges(["a b", "c d"])
    for name, number in special.items():
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    generator = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> Any:
        return (torch.randn(shape, generator=generator) / 8).numpy()

    def add(name: str, weights: Any, bits: str = "Q4_1") -> None:
        if weights.ndim == 1:
            writer.add_tensor(name, weights + 1)
        else:
            quantised = gguf.GGMLQuantizationType[bits]
            writer.add_tensor(name, gguf.quants.quantize(weights, quantised), raw_dtype=quantised)

    head = HIDDEN // HEADS
    embedding = drawn(len(words), HIDDEN)
    add("token_embd.weight", embedding)
    add("output_norm.weight", drawn(HIDDEN))
    if output is not None:
        add("output.weight", embedding if output == "shared" else drawn(len(words), HIDDEN), "Q8_0")
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        add(at + "attn_norm.weight", drawn(HIDDEN))
        add(at + "ffn_norm.weight", drawn(HIDDEN))
        add(at + "attn_q.weight", drawn(HIDDEN, HIDDEN))
        add(at + "attn_k.weight", drawn(KV_HEADS * head, HIDDEN))
        add(at + "attn_v.weight", drawn(KV_HEADS * head, HIDDEN))
        if kind == "qwen2":
            for which, size in (("q", HIDDEN), ("k", KV_HEADS * head), ("v", KV_HEADS * head)):
                add(at + f"attn_{which}.bias", drawn(size))
        add(at + "attn_output.weight", drawn(HIDDEN, HIDDEN))
        add(at + "ffn_gate.weight", drawn(FEED, HIDDEN))
        add(at + "ffn_up.weight", drawn(FEED, HIDDEN))
        add(at + "ffn_down.weight", drawn(HIDDEN, FEED))
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


QWEN = [
    "a",
    "b",
    "c",
    "d",
    "\u0120",
    "1",
    "ab",
    "cd",
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_call>",
    "[PAD12]",
]
QWEN_TYPES = [1] * 8 + [3] * 3 + [4, 5]


def convert_qwen(folder: Path, output: str) -> Path:
    write_tiny(
        folder / "tiny.gguf", "qwen2", "qwen2", QWEN, QWEN_TYPES, special={"bos": 8, "eos": 10, "pad": 8}, output=output
    )
    made = folder / "folder"
    made.mkdir()
    convert(folder / "tiny.gguf", made, "bfloat16")
    return made


def test_an_embedding_that_the_file_holds_twice_is_stored_once(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = convert_qwen(tmp_path, "shared")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    ours = AutoModelForCausalLM.from_pretrained(folder)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.bfloat16)
    assert ours.dtype == torch.bfloat16
    for weights in (ours.lm_head.weight, ours.model.embed_tokens.weight):  # the copy in eight bits, not the one in four
        torch.testing.assert_close(weights, read.lm_head.weight, rtol=0, atol=0)
    torch.testing.assert_close(
        ours.model.layers[1].self_attn.k_proj.bias, read.model.layers[1].self_attn.k_proj.bias, rtol=0, atol=0
    )


def test_an_output_layer_of_its_own_stays(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = convert_qwen(tmp_path, "own")
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(folder / "model.safetensors")


def test_a_tokenizer_of_qwen2(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(convert_qwen(tmp_path, "shared"))
    assert tokenizer.tokenize("abcd ab11") == ["ab", "cd", "\u0120", "ab", "1", "1"]
    assert tokenizer("<|im_start|><tool_call>a")["input_ids"] == [9, 11, 0]
    assert tokenizer.decode([9, 11, 0], skip_special_tokens=True) == "<tool_call>a"  # which is text
    assert [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id] == [8, 10, 8]
    assert len(tokenizer) == len(QWEN) - 1  # no text is a row that only pads the embedding


def test_a_tokenizer_that_is_not_known_is_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny.gguf", pre="llama-bpe")
    with pytest.raises(KvdslError, match=r"the tokenizer gpt2/llama-bpe is not supported; only SmolLM's and Qwen2's are"):
        convert(tmp_path / "tiny.gguf", tmp_path)
