"""Refuse what vLLM cannot serve under a policy before the first request, each with one line that says what to do instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvdsl.budget import is_rate, spelled
from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.settings import traced
from kvdsl.lab import lab
from kvdsl.runtime.biases import told
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.layout import SlotAfterSlot
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.table import Table

_PROMPTS = 2**17
"""Try all prompts up to this length: a number may depend on the prompt only in some range of lengths."""


_SHAPES = {"page": "`pages`", "sketch_dims": "`sketch`"}
"""Numbers that are sizes of tensors, and the statements that set them."""


def refuse_layers(states: Sequence[SlotState]) -> None:
    """Raise KvdslError for a policy that is refused in some layer, or whose state differs in shape between layers.

    Args:
        states: of all layers, empty.
    """
    for state in states:
        refuse_policy(state)
    spec, numbers = states[0].spec, [state.settings.named(state.settings.served()[0]) for state in states]
    for name, what in {**_SHAPES, **{size: "`over last N queries`" for _, size in spec.rings}}.items():
        if name in spec.numbers and len({float(found[name]) for found in numbers}) > 1:
            raise KvdslError(
                f"{what} of {spec.name} differs between layers, and a page of vLLM's cache has one size for all: state a number that does "
                f"not read `layer`"
            )


def refuse_biases(norms: Mapping[int, float], spec: PolicySpec) -> None:
    """Raise KvdslError for layers whose keys have a bias that rules rounding out.

    Args:
        norms: of the biases, by layer; 0 for one with which keys are rounded.
    """
    large = {layer: norm for layer, norm in norms.items() if norm}
    if large:
        raise KvdslError(
            f"`kv_dtype` is `{spec.kv_dtype}`, but in these layers the model adds a bias to keys whose norm, in brackets, is above "
            f"4 × √head_dim: {told(large)}. Rounding would lose what tells these keys apart, and pages have one dtype for all layers: "
            f"leave `kv_dtype` out, or generate with kvdsl's cache in transformers, where such layers keep the model's dtype"
        )


def refuse_policy(state: SlotState) -> None:
    """Raise KvdslError for a policy whose state for a request has no size that is known before the request is.

    Args:
        state: empty.
    """
    spec, given = state.spec, state.settings.params
    state.settings.refuse_hopeless()
    budget = given.get("budget")
    if budget is not None and is_rate(budget):
        raise KvdslError(
            f"`budget` of {spec.name} is {spelled(budget)}, a ratio of each prompt; a page of vLLM's cache has one size for all requests: "
            f"give a number of tokens (1024)"
        )
    if spec.bounded and spec.when == "decode":
        raise KvdslError(
            f"{spec.name} evicts in `decode` only, which is not served in vLLM's pages yet; h2o, roco and tova are"
        )
    if spec.tensors is not None:
        raise KvdslError(
            f"{spec.name} reads tensors of files, which is not served in vLLM's pages yet; h2o, roco and tova are"
        )
    if (
        spec.reuses
        or spec.victims == "layers"
        or spec.across
        or spec.across_layers
        or type(state.layout) is not SlotAfterSlot
    ):
        raise KvdslError(
            f"{spec.name} chooses for other layers, shares a budget or lies in blocks, which is not served in vLLM's pages yet; h2o, "
            f"roco, quest and streaming_llm are, in place"
        )
    asked = [name for name, _ in spec.supplied if name not in (*dict(spec.spans), *spec.hears)]
    if asked:
        raise KvdslError(
            f"{spec.name} asks its caller for `{asked[0]}`, which is not served in vLLM's pages; h2o, roco and tova are"
        )
    if not _same_for_all_prompts(state):
        raise KvdslError(
            f"numbers of {spec.name} depend on the prompt, so that no page of one size holds every request; state them in tokens"
        )
    if spec.hard_cap and _may_leave_more(state):
        raise KvdslError(
            f"under `cap hard` a prompt of {spec.name} may leave more than a page holds, since `trigger` waits for it: leave the trigger "
            f"or the cap out"
        )


def _may_leave_more(state: SlotState) -> bool:
    """Whether the trigger lets a prompt leave more than the cap, which holds for later tokens."""
    numbers = Table(state.spec, state.settings.served()[0])
    trigger, slack = (numbers.named.get(name, torch.tensor(default)) for name, default in (("trigger", 1.0), ("slack", 0.0)))
    return numbers.never_settles or bool((trigger - 1 > slack).any())


def _same_for_all_prompts(state: SlotState) -> bool:
    """Whether the policy's numbers are the same for every prompt up to `_PROMPTS` tokens, and for a very long one."""
    served = state.settings.served()
    if len(served) < 2 or not bool((served[0] == served[1]).all()):
        return False
    try:
        numbers = state.settings.resolve(torch.arange(1, _PROMPTS + 1))
    except KvdslError:
        return False
    return bool((numbers == served[0]).all())


def refuse_configuration(config: Any, spec: PolicySpec) -> None:
    """Raise KvdslError for a `VllmConfig` with something that is not served beside the policy."""
    guesses = config.speculative_config
    if guesses is not None and guesses.method != "ngram":
        raise KvdslError(
            f"kvdsl serves speculative decoding by n-grams only, not by `{guesses.method}`, whose own layers would have pages: say "
            f'--speculative-config \'{{"method": "ngram", …}}\''
        )
    if guesses is not None and spec.reads_chats:
        raise KvdslError(
            f"{spec.name} reads spans, turns or tokens, which guessed tokens do not have yet: leave --speculative-config out"
        )
    if config.kv_transfer_config is not None:
        raise KvdslError("kvdsl's pages cannot be sent by a KV connector: leave --kv-transfer-config out")
    if config.cache_config.cache_dtype != "auto":
        raise KvdslError(
            "kvdsl stores keys and values itself: leave --kv-cache-dtype out; `kv_dtype` of the policy (`kvdsl serve --kv-dtype int8`) "
            "makes pages smaller"
        )
    if config.model_config.is_mm_prefix_lm:
        raise KvdslError(
            "this model's images attend to what follows them as well, and kvdsl serves causal attention: have it take text only, by "
            "--limit-mm-per-prompt '{\"image\": 0}'"
        )
    if config.model_config.is_hybrid:
        raise KvdslError(
            "this model has layers that are no attention, whose state would lie among kvdsl's pages: serve it without a policy"
        )
    if spec.compact and config.model_config.quantization == "gguf":
        raise KvdslError(
            f"vLLM rotates keys of GGUF files in other pairs, and {spec.name} rotates them again: serve the model's own weights, or a "
            f"policy that leaves positions as they are (h2o, roco)"
        )
    parallel = config.parallel_config
    if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
        raise KvdslError("kvdsl does not spread a request's tokens over processes in vLLM: leave context parallelism out")
    if parallel.pipeline_parallel_size > 1:
        raise KvdslError("kvdsl does not spread layers over processes in vLLM yet: leave --pipeline-parallel-size out")
    if parallel.use_ubatching:
        raise KvdslError("kvdsl serves one batch at a time in vLLM: leave --enable-dbo and --ubatch-size out")
    processes, heads = parallel.tensor_parallel_size, config.model_config.get_total_num_kv_heads()
    if heads % processes:
        raise KvdslError(
            f"{heads} KV heads do not divide evenly over {processes} processes: choose a --tensor-parallel-size that does"
        )
    if processes > 1 and spec.agreement is not None:
        raise KvdslError(
            f"the KV heads of {spec.name} {spec.agreement}, but tensor parallelism spreads them over {processes} processes: leave "
            f"--tensor-parallel-size out, or serve a policy whose heads decide by themselves (h2o, roco)"
        )


def refuse_trace(config: Any) -> None:
    """Raise KvdslError for a trace of a `VllmConfig` that could not be made."""
    out = traced(config)
    if out is None:
        return
    if config.parallel_config.tensor_parallel_size > 1:
        raise KvdslError(
            "a trace is of all KV heads, which are spread over processes here: leave --tensor-parallel-size out"
        )
    if config.speculative_config is not None:
        raise KvdslError("a request whose tokens are guessed is not traced: leave --speculative-config out")
    refuse_trace_file(Path(out))


def refuse_trace_file(out: Path) -> None:
    """Raise KvdslError if no trace could be written there."""
    if not out.resolve().parent.is_dir():
        raise KvdslError(f"there is no folder for the trace {out}: make it, or name another file")
    lab("eval.trace", "a trace")


def refuse_layer(spec: Any, *served: type) -> None:
    """Raise KvdslError for a layer whose cache is neither of the whole text nor of a window of it.

    Args:
        served: vLLM's descriptions of these.
    """
    if type(spec) not in served:  # a subclass attends in a way that kvdsl does not see
        raise KvdslError(
            f"a layer's cache is vLLM's {type(spec).__name__}: kvdsl serves models in which every layer attends to the whole text or to "
            f"a sliding window; leave the policy out for this one"
        )
