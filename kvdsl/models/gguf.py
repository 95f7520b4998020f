"""GGUF files as transformers folders: weights in float32, exactly what the quantised ones stand for."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvdsl.errors import KvdslError


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
        KvdslError: if transformers cannot read it.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvdsl.generation.models import quiet

    try:
        with quiet(), _bars_on_terminals():
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise KvdslError(f"transformers cannot read {gguf.name}: {error}") from error
    # Not `save_pretrained`: transformers 5 takes a model that was read from GGUF for a quantised one, and refuses.
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(model), indent=2, default=str) + "\n", encoding="utf-8")
    model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _config(model: Any) -> dict[str, Any]:
    """The model's config as any supported transformers reads it."""
    config: dict[str, Any] = model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        config.pop(name, None)
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:  # where transformers 4 looks for it; it would take 10,000 without a word
        config["rope_theta"] = rope["rope_theta"]
    return config


@contextlib.contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """The loader's progress bar, where there is somebody to see it."""
    if sys.stderr.isatty():
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()):
        yield
