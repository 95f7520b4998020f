"""Admission of a model: hook its classes, and test once that this changes nothing.

In the self-test, a cache that keeps everything must give the logits of transformers' own cache.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.attention import serve_attention
from kvdsl.runtime.hf.forwards import serve_forwards
from kvdsl.runtime.hf.generation import serve_generation
from kvdsl.runtime.hf.models import at_rest, execution_device, refuse_unsupported, text_model
from kvdsl.runtime.hf.versions import text_config, with_cache
from kvdsl.runtime.spec import PolicySpec

TOKENS = 7
"""Length of the test: a prompt of six tokens (the second row pads two), and one decoded token."""

PADDING = 2

TOLERANCE = {torch.float32: 0.01}
"""Largest relative deviation of the logits. In 16-bit dtypes, rounding errors grow over the layers."""

_HALF_TOLERANCE = 0.3

KEEP_EVERYTHING = PolicySpec(
    name="Probe",
    stem="probe",
    params=(),
    numbers=(),
    resolve=lambda given: {},
    columns=(),
    column_rules=(),
    bounded=False,
    group="mean",
    reads_attention=False,
    torch_kernels=None,
    cpu_source=Path(),
    triton_source=Path(),
)


def compare(model: PreTrainedModel, keeps_everything: Callable[[PreTrainedModel], Any]) -> None:
    """Compare logits of a prompt and a decoded token between transformers' own cache and a cache that keeps everything.

    Costs four short forwards. Other threads see no change. Models without weights are skipped.

    Args:
        model: in evaluation mode.
        keeps_everything: makes a cache of `KEEP_EVERYTHING` for the model.

    Raises:
        KvdslError: if the model bypasses kvdsl's attention, or its attention does more than kvdsl supports.
    """
    if execution_device(model).type == "meta":
        return
    name = type(model).__name__
    with torch.no_grad():
        expected = _run(model, lambda: DynamicCache(config=text_config(model)), "fails with transformers' own cache, too: ")
        ours = _run(model, lambda: keeps_everything(model), "")
    if not bool(expected.isfinite().all()):
        raise KvdslError(
            f"{name} cannot be served: its logits are not finite under its own attention, so the self-test cannot compare them"
        )
    deviation = float((ours - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm())
    if not deviation <= TOLERANCE.get(model.dtype, _HALF_TOLERANCE):
        raise KvdslError(
            f"{name} cannot be served: its logits differ by {deviation:.2g} (relative) when attention goes "
            f"through slots that keep everything, so it does something to keys, values or masks that kvdsl does not know"
        )


def _inputs(model: PreTrainedModel, begin: int, end: int) -> dict[str, Tensor]:
    """Return tokens begin .. end of the test as `generate` passes them: two rows, the second left-padded."""
    device = execution_device(model)
    tokens = (torch.arange(2 * TOKENS, device=device) * 7919 + 11) % model.get_input_embeddings().weight.shape[0]
    mask = torch.ones(2, TOKENS, dtype=torch.long, device=device)
    mask[1, :PADDING] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": tokens.view(2, TOKENS)[:, begin:end], "attention_mask": mask[:, :end]}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = positions[:, begin:end]
    return inputs


def _run(model: PreTrainedModel, make: Callable[[], Any], what: str) -> Tensor:
    """Return the logits of the last two tokens, float32 [2, 2, vocabulary].

    Raises:
        KvdslError: if the model fails; the message includes `what`.
    """
    try:
        cache = make()
        prompt = model(**_inputs(model, 0, TOKENS - 1), **with_cache(cache), use_cache=True)
        step = model(**_inputs(model, TOKENS - 1, TOKENS), **with_cache(cache), use_cache=True)
    except Exception as error:
        reason = str(error) if isinstance(error, KvdslError) else f"{type(error).__name__}: {error}"
        raise KvdslError(f"{type(model).__name__} cannot be served: {what}{reason}") from error
    return torch.cat([_logits(prompt)[:, -1:], _logits(step)], dim=1)


def _logits(output: Any) -> Tensor:
    """Return logits, or hidden states of a model without a head; float32 [batch, tokens, any]."""
    found: Tensor = output.logits if hasattr(output, "logits") else output[0]
    return found.float()


lock = threading.RLock()
"""Only one thread admits a model at a time."""

_admitted: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def admit(model: PreTrainedModel, keeps_everything: Callable[[PreTrainedModel], Cache]) -> None:
    """Prepare a model for kvdsl caches, with the self-test the first time.

    Args:
        keeps_everything: makes a cache of `KEEP_EVERYTHING` for a model.

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
        compare(at_rest(model), keeps_everything)
        _admitted.add(part)
