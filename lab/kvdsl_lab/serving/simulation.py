"""vLLM's own scheduler and cache manager before a worker that does nothing: a formula says how long its steps would take."""

from __future__ import annotations

import atexit
import json
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvdsl.integrations.vllm.settings import Settings
from kvdsl.memory import OPTIONS
from kvdsl_lab.serving.machine import Machine, Work
from kvdsl_lab.serving.traffic import Asked


@dataclass(frozen=True)
class Reading:
    """What attention behind prompts reads of the cache.

    Attributes:
        token: bytes that it reads for a token that is there, in all layers.
        most: tokens that are there at most; None where all stay.
    """

    token: int
    most: int | None

    def bytes(self, context: int) -> int:
        """For a request of so many tokens."""
        return self.token * (context if self.most is None else min(context, self.most))


@dataclass(frozen=True)
class Cache:
    """What an engine is, beside its model.

    Attributes:
        policy: None for vLLM's own full attention.
        bytes: of the whole cache.
        longest: tokens of a prompt and its answer, and of a step: prompts come whole.
        at_once: requests that a step may have at most.
        dtype: of the model and of its cache.
        block: tokens of a block of vLLM's own cache; None for as many as it takes by itself on this machine.
    """

    policy: Settings | None
    bytes: int
    longest: int
    at_once: int
    dtype: str = "bfloat16"
    block: int | None = None


def configured(model: str, cache: Cache) -> tuple[VllmConfig, KVCacheConfig, Reading]:
    """What vLLM would make of a model and a cache: by its own functions, and the plug-in's.

    Args:
        model: a folder with a config.json; nothing else of it is read.
    """
    asked = {}
    if cache.policy is not None:
        memory = {name: getattr(cache.policy, name) for name in OPTIONS}
        asked = {"kvdsl": {"policy": cache.policy.policy, **dict(cache.policy.given), **memory}}
    config = EngineArgs(
        model, skip_tokenizer_init=True, dtype=cache.dtype, max_model_len=cache.longest, max_num_seqs=cache.at_once,
        max_num_batched_tokens=max(cache.longest, cache.at_once), enable_prefix_caching=False, async_scheduling=False,
        additional_config=asked,
    ).create_engine_config()  # fmt: skip
    block = cache.block or config.cache_config.block_size
    layers = config.model_config.get_num_layers(config.parallel_config)
    heads, dim = config.model_config.get_num_kv_heads(config.parallel_config), config.model_config.get_head_size()
    spec: Any = FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=dim, dtype=config.model_config.dtype)
    reading = Reading(2 * layers * heads * dim * config.model_config.dtype.itemsize, None)
    if cache.policy is not None:
        from kvdsl.integrations.vllm.backend import PolicyBackend
        from kvdsl.integrations.vllm.page import page

        with set_current_vllm_config(config):
            spec = PolicyBackend.customize_spec(spec)
        found = page(cache.policy, heads, dim, config.model_config.dtype, layers=layers, longest=cache.longest)
        reading = Reading(layers * found.bytes // found.slots, found.slots)
    register_all_kvcache_specs(config)
    if getattr(spec, "non_causal", False):  # as vLLM's engine does where it finds this
        config.scheduler_config.enable_chunked_prefill = False
    resolve_kv_cache_layout(config, [["LBHNC"]], [spec])  # one that both have; blocks are as large in any
    (kv,) = get_kv_cache_configs(config, [{f"model.layers.{n}.self_attn.attn": spec for n in range(layers)}], [cache.bytes])
    config.cache_config.num_gpu_blocks, config.cache_config.block_size = kv.num_blocks, block
    return config, kv, reading


def work_of(output: SchedulerOutput, requests: Mapping[str, Request], reading: Reading) -> Work:
    """What a step does that has just been scheduled, by requests' names."""
    decoding = read = pairs = 0
    for name, tokens in output.num_scheduled_tokens.items():
        request = requests[name]
        context = request.num_computed_tokens  # the step's are among them
        if context - tokens >= request.num_prompt_tokens:
            decoding += 1
            read += reading.bytes(context)
        else:
            pairs += tokens * context - tokens * (tokens - 1) // 2
    return Work(output.total_num_scheduled_tokens, decoding, read, pairs)


class Simulated:
    """An engine whose worker does nothing; see `driving.Engine`.

    Attributes:
        scheduling: seconds that vLLM's scheduler itself has taken, on this machine.
    """

    def __init__(self, config: VllmConfig, kv: KVCacheConfig, reading: Reading, machine: Machine) -> None:
        block_size, hash_block_size = resolve_kv_cache_block_sizes(kv, config)
        self.scheduler = Scheduler(config, kv, StructuredOutputManager(config), block_size, hash_block_size)
        self.seconds = self.scheduling = 0.0
        self.preemptions = 0
        self._reading, self._machine = reading, machine

    def add(self, number: int, asked: Asked) -> None:
        wanted = SamplingParams(max_tokens=asked.new, ignore_eos=True, temperature=0)
        self.scheduler.add_request(Request(str(number), [0] * asked.prompt, wanted, None))

    def step(self) -> Iterable[tuple[int, bool]]:
        began = time.perf_counter()
        output = self.scheduler.schedule()
        self.scheduling += time.perf_counter() - began
        requests = self.scheduler.requests
        self.seconds += self._machine.seconds(work_of(output, requests, self._reading))
        self.preemptions += len(output.preempted_req_ids or ())
        names = list(output.num_scheduled_tokens)
        # A prompt that goes on in the next step gets no token yet.
        sampled = [[0] if requests[name].num_computed_tokens >= requests[name].num_tokens else [] for name in names]
        done = ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: n for n, name in enumerate(names)}, sampled_token_ids=sampled
        )
        began = time.perf_counter()
        told = self.scheduler.update_from_output(output, done)
        self.scheduling += time.perf_counter() - began
        return [(int(one.request_id), one.finished) for several in told.values() for one in several.outputs]

    def running(self) -> int:
        return len(self.scheduler.running)


LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
"""What vLLM asks of the shape of Llama 3.1 with 70 billion parameters."""


@cache
def _shape_of_llama_70b() -> str:
    """A folder with a config.json and nothing else, as long as this process lives."""
    folder = tempfile.TemporaryDirectory(prefix="kvdsl-shape-")
    atexit.register(folder.cleanup)
    (Path(folder.name) / "config.json").write_text(json.dumps(LLAMA_70B), encoding="utf-8")
    return folder.name


def folder_of(model: str) -> str:
    """Where a model's config.json is: of a name of `kvdsl models`, of `reference`, or of `llama70b`, which is a shape only."""
    if model == "llama70b":
        return _shape_of_llama_70b()
    from kvdsl.models import model_folder
    from kvdsl_lab.assets import reference_model_path

    return str(reference_model_path() if model == "reference" else model_folder(model))
