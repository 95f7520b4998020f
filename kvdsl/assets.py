"""A small language model and public-domain books to try policies on. They come with kvdsl-lab (`pip install 'kvdsl[lab]'`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvdsl.lab import lab


def load_reference_model(dtype: Any = None, folder: Path | None = None) -> tuple[Any, Any]:
    """The reference model, ready for inference, and its tokenizer.

    Args:
        dtype: a torch dtype; float32 if None.
        folder: another export of the recipe that made it.

    Raises:
        KvdslError: without kvdsl-lab.
        AssetError: if a file is missing or was changed.
    """
    model, tokenizer = lab("assets", "the reference model").load_reference_model(dtype, folder)
    return model, tokenizer


def book_text(name: str | None = None) -> str:
    """The text of a book (the first of the index, if no name is given).

    Raises:
        KvdslError: without kvdsl-lab.
        AssetError: if there is no book of that name.
    """
    return str(lab("assets", "the book").book_text(name))
