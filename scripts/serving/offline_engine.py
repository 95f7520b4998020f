#!/usr/bin/env python
"""An engine that scripts/serving/offline_bench.py talks to, line by line: vLLM, perhaps under a policy, or OpenVINO GenAI.

It is told as JSON what it is, then load after load `{"prompt": 100, "new": 400, "requests": 24, "seed": 1}`, and answers each with
`{"seconds": 3.5, "ttft_ms": 120.0}`, the median of its requests, which all come at once; null where an engine does not count from when
a request came. Of kvdsl it imports nothing itself, so that it runs where an engine is.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

Answer = Callable[[list[list[int]], int], "float | None"]
"""Goes on from prompts by so many tokens each; when a request had its first, in milliseconds, the median."""


def vllm(told: dict[str, Any]) -> Answer:
    """vLLM; `policy` is what its `additional_config` says of kvdsl, if anything, and `more` other arguments of `LLM`."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    more = told.get("more", {}) | ({"additional_config": {"kvdsl": told["policy"]}} if told.get("policy") else {})
    llm = LLM(
        told["model"], dtype=told["dtype"], max_model_len=told["longest"], max_num_batched_tokens=told["longest"],
        enable_prefix_caching=False, kv_cache_memory_bytes=told["cache_bytes"], disable_log_stats=False, **more,
    )  # fmt: skip

    def answer(prompts: list[list[int]], new: int) -> float:
        params = SamplingParams(max_tokens=new, min_tokens=new, ignore_eos=True, temperature=0)
        outs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        assert all(len(out.outputs[0].token_ids) == new for out in outs)
        return float(median(out.metrics.first_token_latency for out in outs)) * 1e3

    return answer


def openvino(told: dict[str, Any]) -> Answer:
    """OpenVINO GenAI's continuous batching; `budget`, if there is one, is that of its own eviction."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    scheduler = genai.SchedulerConfig()
    scheduler.num_kv_blocks = told["cache_bytes"] // told["block_bytes"]
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = told["longest"], 256
    scheduler.enable_prefix_caching = False
    if told.get("budget"):
        scheduler.use_cache_eviction = True
        start, recent = 32, told["budget"] // 2
        scheduler.cache_eviction_config = genai.CacheEvictionConfig(start, recent, told["budget"], genai.AggregationMode.SUM)
    precisions = {"INFERENCE_PRECISION_HINT": told["precision"], "KV_CACHE_PRECISION": told["kv_precision"]}
    pipeline = genai.ContinuousBatchingPipeline(told["model"], scheduler, "CPU", precisions)

    def answer(prompts: list[list[int]], new: int) -> None:
        config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos, config.do_sample = True, False
        ids = [openvino.Tensor(np.array([one], dtype=np.int64)) for one in prompts]
        outs = pipeline.generate(ids, [config] * len(ids))
        assert all(len(out.m_generation_ids[0]) == new for out in outs)

    return answer


def main() -> None:
    """Answer until nobody asks any more."""
    told = json.loads(sys.stdin.readline())
    answer = {"vllm": vllm, "openvino": openvino}[told["engine"]](told)
    for line in sys.stdin:
        load = json.loads(line)
        draw = random.Random(load["seed"])
        prompts = [
            [draw.randrange(1000, told["vocabulary"]) for _ in range(load["prompt"])] for _ in range(load["requests"])
        ]
        begun = time.perf_counter()
        first = answer(prompts, load["new"])
        found = {"seconds": time.perf_counter() - begun, "ttft_ms": first}
        print(f"@{json.dumps(found)}", flush=True)  # engines print, too


if __name__ == "__main__":
    main()
