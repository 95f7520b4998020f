#!/usr/bin/env python
"""A long time of serving in vLLM: requests of many lengths come and go, some of them aborted at any moment, in the prompt too.

.venv/vllm/bin/python -m scripts.serving.vllm_soak --requests 10000 --json > results/cpu/vllm_soak.json
.venv/vllm/bin/python -m scripts.serving.vllm_soak --policy h2o_answer --set budget=12 --common 200 --blocks 300

Every answer is compared with what the same request gets alone; in the end every page is free again, and memory is where it was when the
engine was warm. It fails if one answer is another (but where two tokens are as likely as each other, to rounding), if a page is lost, or
if the process has grown much. `make soak` is for a machine that has the night.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from kvdsl.cli.common import set_option

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

LONGEST, KINDS, WARM = 1024, 150, 0.2
NEAR = 1e-4
"""Of log-probabilities: two tokens this near are a tie."""

GROWTH = 150
"""MiB that the process may grow once it is warm: allocators take some."""


@dataclass(frozen=True)
class Kind:
    """A request, and what it gets alone: tokens, and the two highest log-probabilities of every step."""

    prompt: list[int]
    new: int
    tokens: list[int]
    gaps: list[float]


@dataclass
class Tally:
    """What has come of the requests."""

    finished: int = 0
    aborted: int = 0
    tied: int = 0
    wrong: list[str] = field(default_factory=list)


@click.command()
@click.option("--requests", type=click.IntRange(1), default=10_000, show_default=True)
@click.option("--policy", default="h2o", show_default=True, help="Which serves.")
@set_option
@click.option(
    "--at-once",
    type=click.IntRange(16),
    default=192,
    show_default=True,
    help="Tokens of a step; longer prompts come in parts.",
)
@click.option(
    "--together", type=click.IntRange(1), default=24, show_default=True, help="Requests that are served at a time."
)
@click.option(
    "--aborts", type=click.FloatRange(0, 1), default=0.25, show_default=True, help="Share of the requests that are aborted."
)
@click.option("--common", type=click.IntRange(0), default=0, help="Tokens with which every second prompt begins.")
@click.option("--blocks", type=click.IntRange(2), help="Blocks of the cache, in place of all that there is room for.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    requests: int,
    policy: str,
    settings: dict[str, str],
    at_once: int,
    together: int,
    aborts: float,
    common: int,
    blocks: int | None,
    seed: int,
    as_json: bool,
) -> None:
    """Serve the embedded model for a long time. The policy has a budget of 48 tokens, unless --set says something else."""
    from vllm import LLM

    from kvdsl.environment import environment
    from kvdsl_lab.assets import reference_model_path

    draw = random.Random(seed)
    given = {name: int(value) for name, value in (settings or {"budget": "48"}).items()}
    llm = LLM(
        str(reference_model_path()), dtype="float32", max_model_len=LONGEST, max_num_batched_tokens=at_once, enforce_eager=True,
        max_num_seqs=together, block_size=16, num_gpu_blocks_override=blocks, disable_log_stats=False,
        additional_config={"kvdsl": {"policy": policy, **given}},
    )  # fmt: skip
    kinds = _kinds(llm, draw, common)
    free, began = _free_pages(llm), time.perf_counter()
    tally, memory = _soak(llm.llm_engine, kinds, requests, aborts, together, draw)
    found = {
        "environment": environment(dtype="fp32", seed=seed), "policy": policy, "params": given, "at_once": at_once, "together": together,
        "common": common, "blocks": blocks, "requests": requests, "finished": tally.finished, "aborted": tally.aborted, "tied": tally.tied,
        "wrong": tally.wrong[:20],
        "pages_lost": free - _free_pages(llm), "unfinished_prompts": _unfinished(llm),
        "hits": _counted(llm, "prefix_cache_hits"), "asked": _counted(llm, "prefix_cache_queries"),
        "preemptions": _counted(llm, "num_preemptions"), "seconds": round(time.perf_counter() - began, 1),
        "resident_mib": memory,
    }  # fmt: skip
    click.echo(json.dumps(found, indent=1) if as_json else "\n".join(f"{name}: {value}" for name, value in found.items()))
    grown = memory["end"] - memory["warm"] > GROWTH
    sys.exit(1 if tally.wrong or found["pages_lost"] or grown else 0)


def _kinds(llm: Any, draw: random.Random, common: int) -> list[Kind]:
    """Requests of 1 to 900 tokens, served one by one."""
    kinds, begin = [], [draw.randrange(10, 4000) for _ in range(common)]
    for number in range(KINDS):
        prompt = [draw.randrange(10, 4000) for _ in range(round(900 ** draw.random()))]
        prompt = (begin + prompt)[:900] if number % 2 else prompt
        new = draw.randint(1, 48)
        answer = llm.generate([{"prompt_token_ids": prompt}], _wanted(new), use_tqdm=False)[0].outputs[0]
        kinds.append(Kind(prompt, new, list(answer.token_ids), [_gap(step) for step in answer.logprobs]))
    return kinds


def _wanted(new: int) -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=new, temperature=0, logprobs=2, ignore_eos=True)


def _gap(step: Any) -> float:
    """By how much the likeliest token is likelier than the next."""
    first, second = sorted((one.logprob for one in step.values()), reverse=True)[:2]
    return float(first - second)


def _soak(
    engine: Any, kinds: list[Kind], requests: int, aborts: float, together: int, draw: random.Random
) -> tuple[Tally, dict[str, float]]:
    tally, active, doomed = Tally(), {}, {}
    warm = 0.0
    with click.progressbar(length=requests, file=sys.stderr) as bar:
        begun = 0
        while begun < requests or active:
            while begun < requests and len(active) < 2 * together and draw.random() < 0.7:
                name, kind = str(begun), draw.choice(kinds)
                engine.add_request(name, {"prompt_token_ids": kind.prompt}, _wanted(kind.new))
                active[name] = kind
                if draw.random() < aborts:
                    doomed[name] = draw.randint(0, 30)  # steps from now
                begun += 1
            for output in engine.step():
                if output.finished and (kind := active.pop(output.request_id, None)) is not None:
                    doomed.pop(output.request_id, None)
                    _compare(tally, output.request_id, kind, list(output.outputs[0].token_ids))
                    bar.update(1)
            for name in [name for name, steps in doomed.items() if steps <= 0]:
                engine.abort_request([name])
                tally.aborted += 1
                del active[name], doomed[name]
                bar.update(1)
            doomed = {name: steps - 1 for name, steps in doomed.items()}
            if not warm and begun >= WARM * requests:
                warm = _resident()
    return tally, {"warm": round(warm), "end": round(_resident())}


def _compare(tally: Tally, name: str, kind: Kind, tokens: list[int]) -> None:
    tally.finished += 1
    if tokens == kind.tokens:
        return
    at = next((n for n, (ours, alone) in enumerate(zip(tokens, kind.tokens, strict=False)) if ours != alone), None)
    if at is not None and kind.gaps[at] < NEAR:
        tally.tied += 1
    else:
        tally.wrong.append(
            f"request {name} ({len(kind.prompt)} tokens): {tokens[:8]}… is not {kind.tokens[:8]}…, from token {at} on"
        )


def _free_pages(llm: Any) -> int:
    return int(llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def _unfinished(llm: Any) -> int:
    """Prompts that were aborted before they ended, whose pages nobody has had since."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    layers = runner.compilation_config.static_forward_context.values()
    return max(len(getattr(layer.impl, "reading", ())) for layer in layers)


def _counted(llm: Any, name: str) -> int:
    """What vLLM has counted since it began."""
    return sum(int(one.value) for one in llm.get_metrics() if one.name == f"vllm:{name}")


def _resident() -> float:
    """MiB of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


if __name__ == "__main__":
    main()
