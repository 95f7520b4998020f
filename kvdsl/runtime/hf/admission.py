"""Admitting a model: it is bound, and the first time it is checked that this changes nothing by itself."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvdsl.runtime.hf import binding, probe
from kvdsl.runtime.hf.models import refuse_unsupported, text_model

_ADMITTED = "_kvdsl_admitted"


def admit(model: PreTrainedModel, keeps_everything: Callable[[], Cache]) -> binding.Binding:
    """Bind a model for one user more.

    Args:
        keeps_everything: makes a cache of `probe.KEEP_EVERYTHING` for the bound model. Through it the logits must be those of eager
            attention.

    Raises:
        KvdslError: if the model cannot be served; its attention is then as it was.
    """
    refuse_unsupported(model)
    part = text_model(model)
    if getattr(part, _ADMITTED, False):
        return binding.bind(model)
    with binding.lock:
        before = part.config._attn_implementation
        try:
            binding.set_attention(part, "eager")
            expected = probe.plain_logits(model)
        finally:
            part.set_attn_implementation(before)
        bound = binding.bind(model)
        try:
            probe.compare(model, expected, keeps_everything)
        except BaseException:
            bound.leave()
            raise
        setattr(part, _ADMITTED, True)
    return bound
