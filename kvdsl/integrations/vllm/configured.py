"""How vLLM comes to take kvdsl's attention on GPUs, where it chooses among many: a configuration that asks for a policy names it.

Other than on CPUs (`chosen`), an engine that comes later in the same process may ask otherwise.
"""

from __future__ import annotations

import logging
from typing import Any

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.releases import NAME
from kvdsl.integrations.vllm.settings import asked


def have_it_chosen(platform: Any) -> None:
    """Have this platform of vLLM, which every configuration is shown to, name kvdsl's attention where a policy is asked for."""
    shown = platform.check_and_update_config
    if getattr(shown, "names_kvdsl", False):
        return

    def check_and_update_config(config: Any) -> None:
        shown(config)
        if asked(config) is not None:
            _name(config)

    check_and_update_config.names_kvdsl = True  # type: ignore[attr-defined]
    platform.check_and_update_config = check_and_update_config


def _name(config: Any) -> None:
    """Raise KvdslError for another release, or where another attention is asked for."""
    import vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvdsl.integrations.vllm.releases import refuse_release

    refuse_release(vllm.__version__)
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
