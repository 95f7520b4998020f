"""Give every engine of a process the attention that its own configuration names, and the texts that its policy reads.

On GPUs vLLM chooses among many backends, so a configuration with a policy gets kvdsl's name. On CPUs `chosen` has one for each
configuration, and vLLM's cached choice is cleared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.releases import ANSWERS, NAME, TEXTS
from kvdsl.integrations.vllm.request_marks import KEY, request_marks
from kvdsl.integrations.vllm.settings import Plan, Settings, asked, traced

_CPU_STEP = 32
"""vLLM's kernels for CPUs prefer blocks of a multiple of so many tokens."""


def have_it_chosen(platform: Any) -> None:
    """Have every configuration get its own attention and texts: vLLM shows all of them to its platform."""
    shown = platform.check_and_update_config
    if getattr(shown, "by_kvdsl", False):
        return
    choose: Callable[[Any], None] = _prepare if platform.is_cpu() else _name

    def check_and_update_config(config: Any) -> None:
        shown(config)
        choose(config)
        _have_texts(config)

    check_and_update_config.by_kvdsl = True  # type: ignore[attr-defined]
    platform.check_and_update_config = check_and_update_config


def _have_texts(config: Any) -> None:
    """Have the engine pass the requests' texts to a policy that reads spans, turns or tokens, and to a trace."""
    settings = asked(config)
    reads = settings is not None and settings.spec.reads_chats
    if config.model_config is None or config.speculative_config is not None or not (reads or traced(config)):
        return
    known = config.model_config.logits_processors or []
    if TEXTS not in known:
        config.model_config.logits_processors = [*known, TEXTS]
    if reads:
        _have_requests_checked()


def _have_requests_checked() -> None:
    """Check marks when vLLM receives a request, so that an error answers that request alone."""
    from vllm.v1.engine.input_processor import InputProcessor

    taken_in = InputProcessor.process_inputs
    if getattr(taken_in, "by_kvdsl", False):
        return

    @wraps(taken_in)
    def process_inputs(self: Any, *args: Any, **more: Any) -> Any:
        request, settings = taken_in(self, *args, **more), asked(self.vllm_config)
        if settings is not None and settings.spec.reads_chats and request.sampling_params is not None:
            _check(settings, request)
        return request

    process_inputs.by_kvdsl = True  # type: ignore[attr-defined]
    InputProcessor.process_inputs = process_inputs


def _check(settings: Settings, request: Any) -> None:
    """Raise vLLM's validation error, which answers the request alone, if its marks are wrong."""
    from vllm.exceptions import VLLMValidationError

    try:
        if request.prompt_token_ids is None:
            raise KvdslError(
                f"{settings.spec.name} reads spans, turns or tokens of a prompt: give text or token ids, not embeddings"
            )
        request_marks(settings.spec, request.sampling_params.extra_args, request.prompt_token_ids)
    except KvdslError as error:
        raise VLLMValidationError(str(error), parameter=KEY) from error


def _prepare(config: Any) -> None:
    """Have vLLM look up `chosen` again for the next layers, and size the blocks over shared prompts."""
    from vllm.v1.attention.selector import _cached_get_attn_backend

    _cached_get_attn_backend.cache_clear()
    if config.model_config is not None and not config.cache_config.user_specified_block_size:
        with suppress(KvdslError):  # what is refused is refused by the layers, which say why
            _size_blocks(config)


def _size_blocks(config: Any) -> None:
    """Make blocks as small as an answer's state allows: the state has a block of its own."""
    plan, model = Plan.of(config), config.model_config
    if plan is None or not plan.settings.answers:
        return
    from kvdsl.integrations.vllm.page import state_of

    heads, dim = model.get_num_kv_heads(config.parallel_config), model.get_head_size()
    state = state_of(plan, heads, dim, model.dtype)
    config.cache_config.block_size = state.least_block(_CPU_STEP, heads * 2 * dim * model.dtype.itemsize)


def _name(config: Any) -> None:
    """Name kvdsl's attention in a configuration with a policy.

    Raises:
        KvdslError: for another release, another attention, or a policy that GPUs do not serve in vLLM.
    """
    settings = asked(config)
    if settings is None:
        return
    import vllm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from kvdsl.integrations.vllm.releases import refuse_release

    refuse_release(vllm.__version__)
    if settings.spec.reads_chats:
        raise KvdslError(
            f"{settings.spec.name} reads spans, turns or tokens, which is served in vLLM on CPUs so far: serve h2o or roco, or use "
            f"`kvdsl.chat` with transformers"
        )
    ours, attention = AttentionBackendEnum[ANSWERS if settings.answers else NAME], config.attention_config
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
            "kvdsl has run in vLLM on one GPU so far, an H200, and for minutes%s: compare some answers with those of transformers",
            ", but never over shared prompts" if settings.answers else "",
        )
