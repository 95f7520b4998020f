"""An engine whose pages are the rows of one state, as on a GPU, with the kernels in Triton's interpreter: what it says, and what it keeps.

TRITON_INTERPRET=1 python -m tests.vllm.in_rows triton POLICY v2

Or `cpu`, where pages are blocks; or `v1`, vLLM's first runner; or `graphs` or `stale`, see `played_capture`.
"""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tests.vllm import conftest  # noqa: F401 - how the engine runs
from tests.vllm.played_capture import Graphs
from tests.vllm.texts import IN_ROWS, drawn

PROMPTS = [drawn(length) for length in IN_ROWS]
ANSWERS = [9, 14, 5, 12]


def serve(backend: str, policy: str, runner: str) -> dict[str, Any]:
    """Tokens and log-probabilities of every request, and the positions that a layer's pages hold, by page and KV head."""
    from vllm import LLM, SamplingParams

    import kvdsl.integrations.vllm.attention as attention
    from kvdsl.integrations.vllm.backend import StepBuilder
    from kvdsl.integrations.vllm.step import EveryOne
    from kvdsl.runtime import backends
    from kvdsl_lab.assets import reference_model_path

    whole, build = [False], StepBuilder.build

    def noting(*given: Any, **named: Any) -> Any:
        found = build(*given, **named)
        whole[0] |= isinstance(found, EveryOne)
        return found

    StepBuilder.build = noting
    attention.choose = lambda spec, _, device, dtype: backends.choose(spec, backend, device, dtype)  # type: ignore[attr-defined]
    served = LLM(
        str(reference_model_path()), dtype="float32", max_model_len=256, max_num_batched_tokens=256, enforce_eager=True,
        num_gpu_blocks_override=9, max_num_seqs=len(PROMPTS), additional_config={"kvdsl": {"policy": policy, "budget": 48}},
    )  # fmt: skip
    graphs = Graphs(served, stale=runner == "stale") if runner in ("graphs", "stale") else None
    params = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True, logprobs=1) for n in ANSWERS]
    found = served.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    assert whole[0] == (backend == "triton")
    layers = served.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    pages = range(1, 1 + len(PROMPTS))
    return {
        "tokens": [list(one.outputs[0].token_ids) for one in found],
        "logprobs": [[next(iter(each.values())).logprob for each in one.outputs[0].logprobs or ()] for one in found],
        "replayed": [] if graphs is None else sorted(graphs.replayed),
        "held": [[_live(layer.impl.caches.held(page)[1]) for page in pages] for layer in layers],
    }


def _live(position: Tensor) -> list[list[int]]:
    return [sorted(one for one in head if one >= 0) for head in position.tolist()]


def take(runner: str) -> None:
    """Have vLLM take its first or second runner. That asks for a Triton that makes code for CPUs, where the interpreter is as good."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner != "v1"))
    if runner != "v1":
        from triton.backends import backends

        backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)


if __name__ == "__main__":
    take(sys.argv[3])
    print("told:", json.dumps(serve(*sys.argv[1:4])))
