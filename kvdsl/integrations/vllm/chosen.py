"""`Backend`: kvdsl's attention where the configuration names a policy, else vLLM's own.

vLLM looks the class up by this module's name when it makes an engine's first layer. The configuration is known then. vLLM keeps the class
until another configuration is made (`configured`).
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.settings import asked


class Unasked(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's own, which raises if the configuration names a policy."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        if asked(get_current_vllm_config_or_none()) is not None:
            raise KvdslError(
                "a configuration without kvdsl was made in this process meanwhile: make an engine right after its configuration"
            )
        found: type[Any] = CPUAttentionBackend.get_impl_cls()
        return found


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    settings = asked(get_current_vllm_config_or_none())
    if settings is None:
        return Unasked
    import vllm

    from kvdsl.integrations.vllm.releases import refuse_release

    refuse_release(vllm.__version__)
    if settings.answers:
        from kvdsl.integrations.vllm.answers import AnswerBackend

        return AnswerBackend
    from kvdsl.integrations.vllm.backend import PolicyBackend

    return PolicyBackend
