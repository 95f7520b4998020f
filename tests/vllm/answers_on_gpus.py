"""An engine that serves shared prompts as on a GPU, with the kernels in Triton's interpreter: what requests get is what they get alone.

TRITON_INTERPRET=1 python -m tests.vllm.answers_on_gpus POLICY v2    (or v1, vLLM's first runner; or graphs, see `played_capture`)
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.vllm import conftest  # noqa: F401 - how the engine runs
from tests.vllm.in_rows import take
from tests.vllm.played_capture import Graphs
from tests.vllm.texts import drawn

NEW = 18
"""Tokens of an answer: more than stay."""


def serve(policy: str, runner: str) -> dict[str, Any]:
    """Serve requests and compare them with transformers. Return the hits, how many steps were sorted on the host and how many were not,
    and how much another policy differs.
    """
    import kvdsl.integrations.vllm.answers as answers
    from kvdsl.integrations.vllm.answers_on_gpus import AnswerBackendOnGpus, StepBuilderOnGpus
    from tests.vllm.test_answers import Served, check, engine, farthest, nothing_is_lost, scheduler, wanted

    build, kinds = StepBuilderOnGpus.build, list[bool]()

    def noting(*given: Any, **named: Any) -> Any:
        found = build(*given, **named)
        kinds.append(found is not None and found.sorted is None)
        return found

    StepBuilderOnGpus.build = noting  # type: ignore[method-assign]
    answers.AnswerBackend = AnswerBackendOnGpus  # type: ignore[misc]
    llm = engine(policy, max_num_seqs=4, max_model_len=256)
    graphs = Graphs(llm) if runner == "graphs" else None

    def abort(served: Served) -> None:
        if served.steps == 2:
            served.add("aborted", drawn(7), wanted(NEW))
        if served.steps == 7:
            served.llm.llm_engine.abort_request(["aborted"])

    def preempt(served: Served) -> None:
        if served.steps == NEW // 2:
            assert scheduler(served.llm).reset_prefix_cache(reset_running_requests=True)

    hits = []
    again = {"b": drawn(130)} | ({} if graphs is None else {"last": drawn(130)[:129]})  # all but one token are in the cache
    for named, during in (({"a": drawn(47), "b": drawn(130)}, abort), (again, None), ({"a": drawn(9)}, preempt)):
        found = Served(llm, during)
        for name, text in named.items():
            found.add(name, text, wanted(NEW))
        check(policy, found.run(), named)
        assert found.outputs.keys() == named.keys() <= found.held.keys()
        hits.append(found.outputs["a" if "a" in named else "b"].num_cached_tokens)
        assert nothing_is_lost(llm)
    return {
        "hits": hits,
        "steps": [kinds.count(False), kinds.count(True)],
        "replayed": sorted(graphs.replayed) if graphs is not None else [],
        "other": farthest(found.outputs["a"].outputs[0], drawn(9), "full"),
    }


if __name__ == "__main__":
    take(sys.argv[2])
    print("told:", json.dumps(serve(*sys.argv[1:3])))
