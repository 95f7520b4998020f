#!/usr/bin/env python
"""Three turns of a chat in vLLM: how much of each prompt is found in the cache, and what the first token costs.

.venv/vllm/bin/python -m scripts.serving.vllm_turns --policy h2o_answer --set budget=64 --json > results/cpu/vllm_turns.json

A turn's prompt is the one before, the answer to it, and a new question. `whole`: with all of the answer; `stripped`: with its last tokens
alone, as templates do that strip what a model thought. The first token's cost is the time that a process of one thread had the processor.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from typing import Any

import click

from kvdsl.cli.common import set_option

TURNS = 3


@click.command()
@click.option("--model", default=None, help="A name of `kvdsl models` [default: the reference model].")
@click.option("--policy", default="h2o_answer", show_default=True, help="Which serves beside full attention.")
@set_option
@click.option("--system", type=click.IntRange(1), default=1000, show_default=True, help="Tokens with which the chat begins.")
@click.option("--question", type=click.IntRange(1), default=50, show_default=True, help="Tokens of a question.")
@click.option("--answer", type=click.IntRange(2), default=300, show_default=True, help="Tokens of an answer.")
@click.option(
    "--shown", type=click.IntRange(1), default=60, show_default=True, help="Of these, what templates do not strip."
)
@click.option(
    "--chats", type=click.IntRange(1), default=3, show_default=True, help="Chats, one after the other, with other systems."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--serve", hidden=True, help="Be the engine of a contestant.")
def main(model: str | None, policy: str, settings: dict[str, str], system: int, question: int, answer: int, shown: int, chats: int,
         as_json: bool, serve: str | None) -> None:  # fmt: skip
    """Lead chats under full attention, and under a policy."""
    given = {name: int(value) for name, value in settings.items()}
    if serve is not None:
        llm = _engine(serve, given, model, system + TURNS * (question + answer) + 16)
        print(
            "rows",
            json.dumps([row for kept in (answer, shown) for row in _chat(llm, system, question, answer, kept, chats)]),
        )
        return
    from kvdsl.environment import environment

    told = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    rows = []
    for name in ("full", policy):
        command = [sys.executable, "-m", "scripts.serving.vllm_turns", *sys.argv[1:], "--serve", name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=os.environ | told)
        found = json.loads(done.stdout.rpartition("rows ")[2])
        rows += [{"policy": name, **row} for row in found]
    for row in rows:
        click.echo(" ".join(f"{name}={value}" for name, value in row.items()), err=as_json)
    if as_json:
        about = {
            "model": model or "reference",
            "params": given,
            "system": system,
            "question": question,
            "answer": answer,
            "shown": shown,
        }
        click.echo(json.dumps({"environment": environment(dtype="fp32", seed=0), **about, "rows": rows}, indent=1))


def _engine(name: str, given: dict[str, int], model: str | None, longest: int) -> Any:
    import torch
    from vllm import LLM

    from kvdsl.models import model_folder
    from kvdsl_lab.assets import reference_model_path

    torch.set_num_threads(1)
    asked = {} if name == "full" else {"additional_config": {"kvdsl": {"policy": name, **given}}}
    place = str(reference_model_path() if model is None else model_folder(model))
    return LLM(
        place,
        dtype="float32",
        max_model_len=longest,
        max_num_batched_tokens=longest,
        enforce_eager=True,
        block_size=32,
        **asked,
    )


def _chat(llm: Any, system: int, question: int, answer: int, kept: int, chats: int) -> list[dict[str, Any]]:
    """By turn: tokens of the prompt, those found in the cache, and the medians of the first tokens' costs."""
    from statistics import median

    from vllm import SamplingParams

    draw, taken, rows = random.Random(0), [[] for _ in range(TURNS)], []  # type: ignore[var-annotated]
    for chat in range(chats + 1):
        prompt = [draw.randrange(10, 4000) for _ in range(system)]
        rows = []
        llm.reset_prefix_cache()
        for turn in range(TURNS):
            prompt += [draw.randrange(10, 4000) for _ in range(question)]
            wanted = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
            began = time.process_time()
            llm.llm_engine.add_request(f"{kept} {chat} {turn}", {"prompt_token_ids": list(prompt)}, wanted)
            outs = llm.llm_engine.step()
            while not outs:
                outs = llm.llm_engine.step()
            if chat:  # the first warms up
                taken[turn].append(time.process_time() - began)
            (out,) = outs
            rows.append({"kept": kept, "turn": turn + 1, "prompt": len(prompt), "hits": out.num_cached_tokens})
            while llm.llm_engine.has_unfinished_requests():
                for out in llm.llm_engine.step():
                    last = out
            prompt += list(last.outputs[0].token_ids)[-kept:]
    return [{**row, "first_token_s": round(median(times), 3)} for row, times in zip(rows, taken, strict=True)]


if __name__ == "__main__":
    main()
