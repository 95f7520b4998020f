"""Admitting a model: its classes learn to look for caches of ours, and the first time it is checked that this changes nothing by itself."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvdsl.runtime.hf import probe
from kvdsl.runtime.hf.attention import serve_attention
from kvdsl.runtime.hf.forwards import serve_forwards
from kvdsl.runtime.hf.generation import serve_generation
from kvdsl.runtime.hf.models import at_rest, refuse_unsupported, text_model, unwrap

lock = threading.RLock()
"""One thread at a time looks at a new model; the others wait for what it finds."""

_admitted: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()

_releases: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()


def admit(model: PreTrainedModel, keeps_everything: Callable[[PreTrainedModel], Cache]) -> None:
    """Prepare a model for caches of ours.

    Args:
        keeps_everything: makes a cache of `probe.KEEP_EVERYTHING` for a model. Through it the logits must be those of transformers' cache.

    Raises:
        KvdslError: if the model cannot be served.
    """
    refuse_unsupported(model)
    part = text_model(model)
    with lock:
        serve_forwards(model)
        serve_generation(model)
        if part in _admitted:
            return
        serve_attention(model)
        probe.compare(at_rest(model), keeps_everything)
        _admitted.add(part)


def release(model: Any) -> None:
    """Refuse every cache that was made for the model from now on. The model itself is as it was all the time."""
    model = unwrap(model)
    with lock:
        _releases[model] = releases(model) + 1


def releases(model: PreTrainedModel | None) -> int:
    """How often `release` was called for the model."""
    return _releases.get(model, 0) if model is not None else 0
