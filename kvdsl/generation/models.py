"""Load a model, and encode texts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.models import place_of

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def load_model(name: str | None, dtype: str | None = None) -> tuple[Any, Any]:
    """Load a causal language model for inference on the best device, and its tokenizer.

    Args:
        name: a name of `kvdsl models`, a folder, or the id of a model on the Hugging Face hub; None for the reference model.
        dtype: `fp32`, `bf16` or `fp16`; None for float32 (the shipped model) or the checkpoint's dtype.

    Raises:
        KvdslError: for an unknown model or dtype, with a one-line message. Names of `kvdsl models` are never downloaded here.
    """
    if dtype is not None and dtype not in DTYPES:
        raise KvdslError(f"`{dtype}` is not a dtype; use one of {', '.join(DTYPES)}")
    kind = None if dtype is None else DTYPES[dtype]
    if name is None:
        from kvdsl.assets import load_reference_model

        with quiet():
            model, tokenizer = load_reference_model(kind)
    else:
        model, tokenizer = _pretrained(name, kind)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval(), tokenizer


def _pretrained(name: str, dtype: torch.dtype | None) -> tuple[Any, Any]:
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = place_of(name)
    try:
        with quiet():
            return AutoModelForCausalLM.from_pretrained(place, dtype=dtype or "auto"), AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise KvdslError(f"cannot load the model `{name}`: {_first_sentence(error)}") from error


def _first_sentence(error: Exception) -> str:
    """Return the first line, and further ones while a line ends as if more follows."""
    found = ""
    for line in filter(None, map(str.strip, str(error).splitlines())):
        found = f"{found} {line}".strip()
        if not found.endswith((":", ",")):
            break
    return found[:300] or type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress bars and warnings of transformers."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


# -- text --------------------------------------------------------------------------------------------------------------


def ends_of(model: Any) -> list[int]:
    """Return the tokens with which a model ends what it writes."""
    own = model.generation_config.eos_token_id
    return [own] if isinstance(own, int) else own or []


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return token ids without special tokens."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def prompt_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return token ids with the special tokens that the tokenizer adds."""
    return list(tokenizer(text, verbose=False)["input_ids"])


def first_token(tokenizer: Any) -> list[int]:
    """Return the first token of every measured text: the BOS token, if there is one.

    Some tokenizers do not add it themselves, such as SmolLM2's, whose BOS is `<|im_start|>`.
    """
    bos = tokenizer.bos_token_id
    return [] if bos is None else [int(bos)]


def windows(tokenizer: Any, text: str, length: int, count: int, *, apart: bool = False) -> Tensor:
    """Return `count` evenly spaced stretches of the text, each `length` tokens including its BOS: int64 [count, length].

    Raises:
        KvdslError: if the text is too short for one, or for all of them without overlap if they must be `apart`.
    """
    bos, ids = first_token(tokenizer), encode(tokenizer, text)
    body = length - len(bos)
    if apart and len(ids) < count * body:
        raise KvdslError(
            f"the text has {len(ids)} tokens, too few for {count} stretches of {length} that do not overlap; use a longer text, fewer "
            f"stretches or shorter ones"
        )
    if body < 1 or len(ids) < body:
        raise KvdslError(
            f"the text has {len(ids)} tokens, fewer than the {body} that one stretch needs; use a longer text or fewer tokens"
        )
    last = len(ids) - body
    starts = [last * index // max(1, count - 1) for index in range(count)]
    return torch.tensor([bos + ids[start : start + body] for start in starts])


def check_length(model: Any, tokens: int) -> None:
    """Raise KvdslError if a text is longer than the model's limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and tokens > limit:
        raise KvdslError(f"{tokens} tokens exceed the model's limit of {limit}; use fewer")
