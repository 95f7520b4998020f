"""kvdsl policies in vLLM. A policy with a budget in tokens keeps a request in one block of vLLM's cache, whatever the request's length.
Under a policy whose budget is `prompt` and some tokens, prompts lie in vLLM's own blocks, which requests share.

vLLM loads `register` in each of its processes (entry point `vllm.general_plugins`). It stays inactive without a `kvdsl` entry in the
configuration:

    vllm serve MODEL --additional-config '{"kvdsl": {"policy": "h2o", "budget": 1024}}'

`kvdsl serve` is the short way. What is served, and what is refused at start-up: docs/howto/serving.md.
"""

from __future__ import annotations


def register() -> None:
    """Register the cache's kind and the attention in vLLM. A second call does nothing.

    Nothing here may depend on the configuration, which vLLM reads later: `chosen` decides then, on GPUs `configured`.
    """
    import vllm
    from vllm.platforms import current_platform

    from kvdsl.integrations.vllm.ledger import begin_run
    from kvdsl.integrations.vllm.releases import refusal

    begin_run()
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        # On CPUs vLLM has a single backend: this one.
        register_backend(AttentionBackendEnum.CPU_ATTN, "kvdsl.integrations.vllm.chosen.Backend")
    elif not current_platform.is_cuda():
        _warn(current_platform.device_name)
        return
    from kvdsl.integrations.vllm.configured import have_it_chosen

    have_it_chosen(current_platform)
    if refusal(vllm.__version__) is None:
        _register_caches()


def _register_caches() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from kvdsl.integrations.vllm.blocks import AnswerManager, AnswerSpec, PageSpec, WindowManager, WindowSpec
    from kvdsl.integrations.vllm.releases import ANSWERS, NAME

    KVCacheSpecRegistry._ensure_registered()  # vLLM registers its own only while there is none
    KVCacheSpecRegistry.register(PageSpec, manager_class=CircularBufferManager)
    KVCacheSpecRegistry.register(AnswerSpec, manager_class=AnswerManager, uniform_type_base_spec=FullAttentionSpec)
    KVCacheSpecRegistry.register(WindowSpec, manager_class=WindowManager, uniform_type_base_spec=SlidingWindowSpec)
    answers = "answers.AnswerBackend" if current_platform.is_cpu() else "answers_on_gpus.AnswerBackendOnGpus"
    for name, where in ((NAME, "backend.PolicyBackend"), (ANSWERS, answers)):
        if name not in AttentionBackendEnum.__members__:  # vLLM looks a backend's name up among these
            register_backend(name, f"kvdsl.integrations.vllm.{where}")


def _warn(device: str) -> None:
    """Log that kvdsl does not serve on a device, if the command line names kvdsl."""
    import logging
    import sys

    if any("kvdsl" in word for word in sys.argv[1:]):
        logging.getLogger("vllm.kvdsl").error(
            "kvdsl serves in vLLM on CPUs and NVIDIA's GPUs so far, not on %s: the full cache is used", device
        )
