"""Convert GGUF files to transformers folders: quantised weights become float32, or rounded bfloat16."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvdsl.errors import KvdslError
from kvdsl.models import ELSEWHERE


def check_can_convert() -> None:
    """Refuse before downloading if packages for the conversion are missing.

    Raises:
        KvdslError: with the packages to install.
    """
    missing = [name for name in ("torch", "transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise KvdslError(f"converting the weights needs {' and '.join(missing)}: pip install 'kvdsl[models]'")


def convert(gguf: Path, folder: Path, dtype: str = "float32") -> None:
    """Write the model and the tokenizer of a GGUF file into a folder that `from_pretrained` reads.

    An embedding shared with the output layer is stored once, even if the file holds it twice.

    Args:
        dtype: of the stored weights, as torch names it.

    Raises:
        KvdslError: if its tokenizer is of an unknown kind, transformers cannot read the weights, or they cannot be written.
    """
    import torch
    from gguf import GGUFReader
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from kvdsl.generation.models import quiet

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _write_tokenizer(fields, folder)
    try:
        with quiet(), _bars_on_terminals():
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=getattr(torch, dtype))
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise KvdslError(f"transformers cannot read {gguf.name}: {error}") from error
    _tie(model, {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors})
    # Not `save_pretrained`: transformers 5 treats a model read from GGUF as quantised, and refuses.
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    try:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # also for a full disk
        raise KvdslError(
            f"the weights cannot be written into {folder} ({error}): free some space, or {ELSEWHERE}"
        ) from error
    _write_json(folder / "config.json", _config(model, dtype))
    ends = {name: fields[key] for name, key in _special(fields).items() if name != "unk"}
    _write_json(folder / "generation_config.json", {f"{name}_token_id": number for name, number in ends.items()})


_QUANTISATION = 0.2
"""The largest relative error of rounding to four bits. Separately trained matrices differ by more than one."""


def _tie(model: Any, sizes: Mapping[str, int]) -> None:
    """Share one embedding if the file holds it twice, as llama.cpp writes it, quantised differently for input and output.

    The copy with more bits is used for both.

    Args:
        sizes: bytes of the file's tensors.
    """
    inputs, outputs = model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data
    if model.config.tie_word_embeddings or inputs.shape != outputs.shape:
        return
    if (inputs.float() - outputs.float()).norm() > _QUANTISATION * outputs.float().norm():
        return
    if sizes["output.weight"] >= sizes["token_embd.weight"]:
        inputs.copy_(outputs)
    model.config.tie_word_embeddings = True


def _config(model: Any, dtype: str) -> dict[str, Any]:
    """Return the model's config in a form that any supported transformers reads."""
    config: dict[str, Any] = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": dtype}
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:  # where transformers 4 looks for it; it would silently use 10,000
        config["rope_theta"] = rope["rope_theta"]
    return config


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""The special tokens' names in transformers and GGUF."""

_CONTROL, _USER_DEFINED, _UNUSED = 3, 4, 5
"""Token types of a GGUF file: special tokens, added text tokens, and unused rows of the embedding."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Qwen2's pattern of words: a contraction, letters, one digit, punctuation, or space; from its config on the hub."""


def _special(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the field with each special token's id, for those that the model has."""
    keys = {name: f"tokenizer.ggml.{ggml}_token_id" for name, ggml in _SPECIAL.items()}
    return {name: key for name, key in keys.items() if key in fields}


def _write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """Write the tokenizer from the file's data. transformers 4 and 5 would derive different ones, but read this one alike.

    Raises:
        KvdslError: if it splits text in an unknown way.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    kind, words = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
    if kind != "gpt2" or words not in ("smollm", "qwen2") or fields.get("tokenizer.ggml.add_bos_token", False):
        raise KvdslError(f"the tokenizer {kind}/{words} is not supported; only SmolLM's and Qwen2's are")
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    known = {token: number for number, (token, type) in enumerate(zip(tokens, types, strict=True)) if type != _UNUSED}
    made = Tokenizer(models.BPE(known, merges))
    if words == "qwen2":
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [AddedToken(token, special=True) for token, type in zip(tokens, types, strict=True) if type == _CONTROL]
    )
    made.add_tokens(
        [AddedToken(token, normalized=False) for token, type in zip(tokens, types, strict=True) if type == _USER_DEFINED]
    )
    made.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": tokens[fields[key]] for name, key in _special(fields).items()}
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": fields[f"{fields['general.architecture']}.context_length"], "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }  # fmt: skip
    _write_json(folder / "tokenizer_config.json", names | told)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Show the loader's progress bar only on terminals."""
    if sys.stderr.isatty():
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()):
        yield
