"""What comes with kvdsl-lab: a small language model and public-domain books to try policies on.

`lab/scripts/train_reference_model.py` made the model. Its files are checked against their digests before
they are loaded. torch and transformers are imported only by `load_reference_model`: the compiler may
import this package without them.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from kvdsl.errors import KvdslError

ASSETS = Path(__file__).resolve().parent


class AssetError(KvdslError):
    """A shipped file is missing, or is not the one that was shipped."""


def reference_model_path() -> Path:
    """The Hugging Face folder of the reference model (`AutoModelForCausalLM.from_pretrained` reads it)."""
    return ASSETS / "reference_model"


def check_digests(folder: Path) -> None:
    """Compare every file that `digest.json` names with its SHA-256; raise AssetError at the first that
    differs.
    """
    try:
        expected: dict[str, str] = json.loads((folder / "digest.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise AssetError(f"{folder} holds no digest.json: reinstall kvdsl-lab, or `export` the model again") from error
    for name, digest in expected.items():
        path = folder / name
        if not path.exists():
            raise AssetError(f"{path} is missing: reinstall kvdsl-lab, or `export` the model again")
        if hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise AssetError(
                f"{path} is not the file that digest.json describes: it is damaged or was changed. "
                "Reinstall kvdsl-lab; to use weights of your own, load their folder with transformers."
            )


def reference_weights() -> str:
    """Which weights ship, in eight digits: the start of their SHA-256."""
    digests: dict[str, str] = json.loads((reference_model_path() / "digest.json").read_text(encoding="utf-8"))
    return digests["model.safetensors"][:8]


def weights_of(name: str | None, commit: str | None = None) -> str:
    """What tells a model's weights from others of the same name.

    Args:
        name: as for `load_model`.
        commit: of the hub, for a model from there.
    """
    if name is None:
        return reference_weights()
    if commit is not None:
        return commit
    from kvdsl.models import place_of

    files = sorted(Path(place_of(name)).glob("*.safetensors")) + sorted(Path(place_of(name)).glob("*.bin"))
    told = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:8] if told else name


def load_reference_model(dtype: Any = None, folder: Path | None = None) -> tuple[Any, Any]:
    """The reference model, ready for inference, and its tokenizer.

    `dtype` is a torch dtype (float32 if None; the file holds bfloat16). `folder` takes another export of
    the recipe.
    """
    folder = folder or reference_model_path()
    check_digests(folder)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return model.to(dtype or torch.float32).eval(), tokenizer


@cache
def book_index() -> dict[str, dict[str, Any]]:
    """Name of each shipped book -> its title, author, year and file. The first one is the default."""
    index: dict[str, dict[str, Any]] = json.loads((ASSETS / "books/index.json").read_text(encoding="utf-8"))
    return index


def book_text(name: str | None = None) -> str:
    """The text of a shipped book (the first of the index, if no name is given)."""
    index = book_index()
    name = name or next(iter(index))
    if name not in index:
        raise AssetError(f"no shipped book is called {name!r}; there are {', '.join(index)}")
    return (ASSETS / "books" / index[name]["file"]).read_text(encoding="utf-8")


def all_books() -> str:
    """The texts of all shipped books, one after the other."""
    return "\n\n".join(book_text(name) for name in book_index())
