"""How every engine of a process comes to have the attention that its own configuration asks for.

On GPUs, where vLLM chooses among many, a configuration that asks for a policy names kvdsl's. On CPUs `chosen` has one for each
configuration, and vLLM, which keeps what it was given first, is made to ask anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.releases import NAME
from kvdsl.integrations.vllm.settings import asked


def have_it_chosen(platform: Any) -> None:
    """Have every configuration get its own attention: all are shown to this platform of vLLM."""
    shown = platform.check_and_update_config
    if getattr(shown, "tells_kvdsl", False):
        return
    tell: Callable[[Any], None] = _ask_anew if platform.is_cpu() else _name

    def check_and_update_config(config: Any) -> None:
        shown(config)
        tell(config)

    check_and_update_config.tells_kvdsl = True  # type: ignore[attr-defined]
    platform.check_and_update_config = check_and_update_config


def _ask_anew(_: Any) -> None:
    """Have vLLM ask `chosen` again for the layers to come."""
    from vllm.v1.attention.selector import _cached_get_attn_backend

    _cached_get_attn_backend.cache_clear()


def _name(config: Any) -> None:
    """Name kvdsl's attention where a policy is asked for.

    Raises:
        KvdslError: for another release, where another attention is asked for, or for a policy over shared prompts.
    """
    settings = asked(config)
    if settings is None:
        return
    import vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvdsl.integrations.vllm.releases import refuse_release

    refuse_release(vllm.__version__)
    if settings.answers:
        raise KvdslError(
            f"{settings.spec.name} keeps prompts whole, and prompts that requests share are served on CPUs so far: serve a policy with a "
            f"budget in tokens (h2o, roco)"
        )
    ours, attention = AttentionBackendEnum[NAME], config.attention_config
    named = (attention.backend, *attention.backend_per_kind.values())
    other = next((found for found in named if found not in (None, ours)), None)
    if other is not None:
        raise KvdslError(
            f"a policy is attention of its own, and this configuration has chosen {other.name}: leave --attention-backend out, or serve "
            f"this model without a policy if it is the model's own choice"
        )
    if attention.backend is None:
        attention.backend = ours
        logging.getLogger("vllm.kvdsl").warning(
            "kvdsl has run in vLLM on one GPU so far, an H200, and for minutes: compare some answers with those of transformers"
        )
