"""Admitting a model: its classes learn to look for caches of ours, and the first time a self-test shows that this changes nothing.

Through slots that keep everything, its logits must be those of transformers' own cache.
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
"""Length of the test: a prompt of six tokens, of which the second row pads two, and one more."""

PADDING = 2

TOLERANCE = {torch.float32: 0.01}
"""Largest relative deviation of the logits; in half precisions rounding alone spreads over the layers."""

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
    """Run the same tokens, a prompt and one decoded, through transformers' own cache and through slots that keep everything.

    Costs four short forwards. Changes nothing that another thread could see, and does nothing for a model without weights.

    Args:
        model: in evaluation mode.
        keeps_everything: makes a cache of `KEEP_EVERYTHING` for the model.

    Raises:
        KvdslError: if the attention is not reached, or does more than kvdsl knows.
    """
    if execution_device(model).type == "meta":
        return
    name = type(model).__name__
    with torch.no_grad():
        expected = _run(model, lambda: DynamicCache(config=text_config(model)), "fails with transformers' own cache, too: ")
        ours = _run(model, lambda: keeps_everything(model), "")
    if not bool(expected.isfinite().all()):
        raise KvdslError(
            f"{name} cannot be served: its logits are not finite under its own attention, so that nothing can be compared"
        )
    deviation = float((ours - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm())
    if not deviation <= TOLERANCE.get(model.dtype, _HALF_TOLERANCE):
        raise KvdslError(
            f"{name} cannot be served: its logits differ by {deviation:.2g} (relative) when attention goes "
            f"through slots that keep everything, so it does something to keys, values or masks that kvdsl does not know"
        )


def _inputs(model: PreTrainedModel, begin: int, end: int) -> dict[str, Tensor]:
    """Some of the test's tokens, as `generate` would pass them: two rows of arbitrary ids, the second left-padded."""
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
    """Logits of the last two tokens through a cache, float32 [2, 2, vocabulary].

    Raises:
        KvdslError: if the model fails; what it says begins with `what`.
    """
    try:
        cache = make()
        prompt = model(**_inputs(model, 0, TOKENS - 1), **with_cache(cache), use_cache=True)
        step = model(**_inputs(model, TOKENS - 1, TOKENS), **with_cache(cache), use_cache=True)
    except Exception as error:
        told = str(error) if isinstance(error, KvdslError) else f"{type(error).__name__}: {error}"
        raise KvdslError(f"{type(model).__name__} cannot be served: {what}{told}") from error
    return torch.cat([_logits(prompt)[:, -1:], _logits(step)], dim=1)


def _logits(output: Any) -> Tensor:
    """Logits of a language model, hidden states of a bare one; float32 [batch, tokens, any]."""
    found: Tensor = output.logits if hasattr(output, "logits") else output[0]
    return found.float()


lock = threading.RLock()
"""One thread at a time looks at a new model; the others wait for what it finds."""

_admitted: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


def admit(model: PreTrainedModel, keeps_everything: Callable[[PreTrainedModel], Cache]) -> None:
    """Prepare a model for caches of ours.

    Args:
        keeps_everything: makes a cache of `KEEP_EVERYTHING` for a model. Through it the logits must be those of transformers' cache.

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
