"""The self-test of a newly bound model: through slots that keep everything, its logits must stay what they were."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import with_cache
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


def plain_logits(model: PreTrainedModel) -> Tensor | None:
    """Logits of the last two tokens by the model's current attention, float32 [2, 2, vocabulary]; None without weights."""
    if model.device.type == "meta":
        return None
    with quietly(model), torch.no_grad():
        return _logits(model(**_inputs(model, 0, TOKENS), use_cache=False))[:, -2:]


def compare(model: PreTrainedModel, expected: Tensor | None, keeps_everything: Callable[[], Any]) -> None:
    """Run the same tokens, a prompt and one decoded, through slots that keep everything; costs two forwards.

    Args:
        keeps_everything: makes a cache of `KEEP_EVERYTHING` for the model.

    Raises:
        KvdslError: if the attention is not reached, or does more than kvdsl knows.
    """
    if expected is None:
        return
    try:
        with quietly(model), torch.no_grad():
            ours = _through_slots(model, keeps_everything())
    except Exception as error:
        what = str(error) if isinstance(error, KvdslError) else f"{type(error).__name__}: {error}"
        raise KvdslError(f"{type(model).__name__} cannot be served: {what}") from error
    deviation = float((ours - expected).norm() / (expected - expected.mean(-1, keepdim=True)).norm())
    if not deviation <= TOLERANCE.get(model.dtype, _HALF_TOLERANCE):
        raise KvdslError(
            f"{type(model).__name__} cannot be served: its logits differ by {deviation:.2g} (relative) when attention goes "
            f"through slots that keep everything, so it does something to keys, values or masks that kvdsl does not know"
        )


def _inputs(model: PreTrainedModel, begin: int, end: int) -> dict[str, Tensor]:
    """Some of the test's tokens, as `generate` would pass them: two rows of arbitrary ids, the second left-padded."""
    embedding = model.get_input_embeddings().weight
    tokens = (torch.arange(2 * TOKENS, device=embedding.device) * 7919 + 11) % embedding.shape[0]
    mask = torch.ones(2, TOKENS, dtype=torch.long, device=embedding.device)
    mask[1, :PADDING] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": tokens.view(2, TOKENS)[:, begin:end], "attention_mask": mask[:, :end]}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = positions[:, begin:end]
    return inputs


def _through_slots(model: PreTrainedModel, cache: Any) -> Tensor:
    try:
        prompt = model(**_inputs(model, 0, TOKENS - 1), **with_cache(cache), use_cache=True)
        step = model(**_inputs(model, TOKENS - 1, TOKENS), **with_cache(cache), use_cache=True)
    finally:
        cache.check_closed()
    return torch.cat([_logits(prompt)[:, -1:], _logits(step)], dim=1)


def _logits(output: Any) -> Tensor:
    """Logits of a language model, hidden states of a bare one; float32 [batch, tokens, any]."""
    found: Tensor = output.logits if hasattr(output, "logits") else output[0]
    return found.float()


@contextmanager
def quietly(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode for a while; every module gets its own mode back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
