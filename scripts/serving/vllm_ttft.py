#!/usr/bin/env python
"""Time to the first token in vLLM: prompts under policies beside vLLM's own full attention.

.venv/vllm/bin/python -m scripts.serving.vllm_ttft --model smollm2 --json > results/cpu/vllm_ttft.json

Every contestant is an engine in a process of its own, with one thread. What counts is the time that it had the processor, which is what
the first token would take on an idle one; they take turns, because other work on the machine slows caches and clocks down, too.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from statistics import median
from typing import Any

import click

BEYOND = 16
"""Positions beside those of the longest prompt."""


@click.command()
@click.option("--model", default=None, help="A name of `kvdsl models` [default: the reference model].")
@click.option("--policies", default="h2o,roco,tova,streaming_llm", show_default=True)
@click.option("--budget", type=click.IntRange(2), default=256, show_default=True)
@click.option("--lengths", default="512,2048,8192", show_default=True, help="Tokens of a prompt.")
@click.option("--together", default="1,8", show_default=True, help="How many prompts come at once.")
@click.option(
    "--most", type=click.IntRange(1), default=16384, show_default=True, help="Tokens of all prompts that come at once."
)
@click.option(
    "--cached",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.0,
    show_default=True,
    help="Share of each prompt that prefix caching finds; 0 turns prefix caching off.",
)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--serve", hidden=True, help="Be the engine of a contestant.")
def main(model: str | None, policies: str, budget: int, lengths: str, together: str, most: int, cached: float, rounds: int,
         as_json: bool, serve: str | None) -> None:  # fmt: skip
    """Read prompts of several lengths, alone and several at once."""
    sizes = [
        (int(n), int(count)) for n in lengths.split(",") for count in together.split(",") if int(n) * int(count) <= most
    ]
    if serve is not None:
        _serve(serve, budget, model, max(n for n, _ in sizes), max(n * count for n, count in sizes), cached)
        return
    from kvdsl.environment import environment

    names = ["full", *policies.split(",")]
    engines = {name: _start(name, sys.argv[1:]) for name in names}
    rows = []
    for length, count in sizes:
        taken: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(rounds + 1):
            for name in names:
                seconds = _ask(engines[name], length, count, turn)
                if turn:  # the first warms up
                    taken[name].append(seconds)
        for name in names:
            ratios = [ours / full for ours, full in zip(taken[name], taken["full"], strict=True)]
            rows.append({
                "policy": name, "prompt": length, "together": count, "seconds": round(median(taken[name]), 4),
                "ratio": round(median(ratios), 3), "ratios": [round(ratio, 3) for ratio in ratios],
            })  # fmt: skip
            click.echo(
                f"{length} x {count} {name}: {rows[-1]['seconds']} s, {rows[-1]['ratio']} {rows[-1]['ratios']}", err=as_json
            )
    for engine in engines.values():
        engine.stdin.close()
        engine.wait()
    if as_json:
        found = {
            "environment": environment(dtype="fp32", seed=0),
            "model": model or "reference",
            "budget": budget,
            "cached": cached,
            "rows": rows,
        }
        click.echo(json.dumps(found, indent=1))


def _start(name: str, words: list[str]) -> Any:
    command = [sys.executable, "-m", "scripts.serving.vllm_ttft", *words, "--serve", name]
    told = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | told)


def _ask(engine: Any, length: int, count: int, turn: int) -> float:
    engine.stdin.write(f"{length} {count} {turn}\n")
    engine.stdin.flush()
    for line in engine.stdout:
        if line.startswith("seconds "):
            return float(line.split()[1])
    raise RuntimeError("an engine has ended")


def _serve(name: str, budget: int, model: str | None, longest: int, at_once: int, cached: float) -> None:
    """Answer prompts of random tokens by one token, and say how much of the processor all of them took.

    Prompts of one length begin with the same tokens, `cached` of each, which are read before the time is taken.
    """
    import torch
    from vllm import LLM, SamplingParams

    from kvdsl.models import model_folder
    from kvdsl_lab.assets import reference_model_path

    torch.set_num_threads(1)
    asked = {} if name == "full" else {"additional_config": {"kvdsl": {"policy": name, "budget": budget}}}
    place = str(reference_model_path() if model is None else model_folder(model))
    llm = LLM(
        place, dtype="float32", max_model_len=longest + BEYOND, max_num_batched_tokens=at_once + BEYOND, enforce_eager=True,
        max_num_seqs=16, enable_prefix_caching=cached > 0, **asked,
    )  # fmt: skip
    wanted = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    for line in sys.stdin:
        length, count, seed = map(int, line.split())
        shared = _tokens(random.Random(length), int(cached * length))
        draw = random.Random(seed)
        prompts = [{"prompt_token_ids": shared + _tokens(draw, length - len(shared))} for _ in range(count)]
        if shared:
            llm.generate([{"prompt_token_ids": [*shared, 5]}], wanted, use_tqdm=False)
        began = time.process_time()
        llm.generate(prompts, wanted, use_tqdm=False)
        print("seconds", time.process_time() - began, flush=True)


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(10, 4000) for _ in range(count)]


if __name__ == "__main__":
    main()
