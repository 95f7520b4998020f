"""GGUF files as transformers folders: weights in float32, exactly what the quantised ones stand for."""

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
from kvdsl.models.place import ELSEWHERE


def check_can_convert() -> None:
    """Refuse before anything is fetched, where what conversion needs is not installed.

    Raises:
        KvdslError: naming what to install.
    """
    missing = [name for name in ("torch", "transformers", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise KvdslError(f"converting the weights needs {' and '.join(missing)}: pip install 'kvdsl[models]'")


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file into a folder that `from_pretrained` reads.

    Raises:
        KvdslError: if its tokenizer is of a kind that is not known here, transformers cannot read the weights, or they cannot be written.
    """
    import torch
    from gguf import GGUFReader
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    from kvdsl.generation.models import quiet

    fields = {name: field.contents() for name, field in GGUFReader(gguf).fields.items()}
    _write_tokenizer(fields, folder)
    try:
        with quiet(), _bars_on_terminals():
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise KvdslError(f"transformers cannot read {gguf.name}: {error}") from error
    # Not `save_pretrained`: transformers 5 takes a model that was read from GGUF for a quantised one, and refuses.
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    try:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk, too
        raise KvdslError(
            f"the weights cannot be written into {folder} ({error}): free some space, or {ELSEWHERE}"
        ) from error
    _write_json(folder / "config.json", _config(model))
    ends = {name: fields[f"tokenizer.ggml.{ggml}_token_id"] for name, ggml in _SPECIAL.items() if name != "unk"}
    _write_json(folder / "generation_config.json", {f"{name}_token_id": number for name, number in ends.items()})


def _config(model: Any) -> dict[str, Any]:
    """The model's config as any supported transformers reads it."""
    config: dict[str, Any] = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:  # where transformers 4 looks for it; it would take 10,000 without a word
        config["rope_theta"] = rope["rope_theta"]
    return config


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""What transformers and GGUF call the special tokens."""

_CONTROL = 3
"""The type of a special token in a GGUF file."""


def _write_tokenizer(fields: Mapping[str, Any], folder: Path) -> None:
    """The tokenizer, made from what the file says: transformers 4 and 5 would make different ones of it, and read this one alike.

    Raises:
        KvdslError: if it splits text in a way that is not known here.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm") or fields.get("tokenizer.ggml.add_bos_token", False):
        raise KvdslError(f"the tokenizer {kind} is not known; only SmolLM's is")
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    types = fields["tokenizer.ggml.token_type"]
    made.add_special_tokens(
        [AddedToken(token, special=True) for token, type in zip(tokens, types, strict=True) if type == _CONTROL]
    )
    made.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": tokens[fields[f"tokenizer.ggml.{ggml}_token_id"]] for name, ggml in _SPECIAL.items()}
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": fields["llama.context_length"], "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }  # fmt: skip
    _write_json(folder / "tokenizer_config.json", names | told)


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """The loader's progress bar, where there is somebody to see it."""
    if sys.stderr.isatty():
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()):
        yield
