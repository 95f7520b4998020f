"""`Backend`: kvdsl's attention where the configuration asks for a policy, else the one that vLLM would have taken.

vLLM looks the class up by this module's name when it makes the first layer, when the configuration is known, and keeps it as long as the
process lives. So an engine that comes later in the same process and asks otherwise is refused.
"""

from __future__ import annotations

from typing import Any

from vllm.config import get_current_vllm_config_or_none
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.settings import asked


class Unasked(CPUAttentionBackend):  # type: ignore[misc]
    """vLLM's own, which says so where a policy is asked for all the same."""

    @staticmethod
    def get_impl_cls() -> type[Any]:
        if asked(get_current_vllm_config_or_none()) is not None:
            raise KvdslError(
                "an engine without kvdsl was made in this process before, and vLLM keeps its attention: ask for a policy in a new process"
            )
        found: type[Any] = CPUAttentionBackend.get_impl_cls()
        return found


def __getattr__(name: str) -> Any:
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if asked(get_current_vllm_config_or_none()) is None:
        return Unasked
    import vllm

    from kvdsl.integrations.vllm.releases import refuse_release

    refuse_release(vllm.__version__)
    from kvdsl.integrations.vllm.backend import PolicyBackend

    return PolicyBackend
