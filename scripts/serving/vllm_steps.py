#!/usr/bin/env python
"""How long steps of a real engine take, and how it serves requests that come by chance: what the simulation is made and judged by.

.venv/vllm/bin/python -m scripts.serving.vllm_steps --model smollm2 --json > results/cpu/vllm_steps.json

Full attention and a policy answer the same requests, with equal bytes of cache. Constants are found from the steps of one run
(`kvdsl_lab.serving.machine`), and the requests of another are what `scripts/serving/vllm_simulate.py` must foretell. Every contestant is an
engine in a process of its own, with one thread; a second is one of the processor, so that other work on the machine counts less.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, astuple
from typing import Any

import click
import numpy as np

from kvdsl_lab.serving.driving import serve
from kvdsl_lab.serving.machine import Work, fitted
from kvdsl_lab.serving.traffic import CONVERSATION, Asked


@click.command()
@click.option("--model", default=None, help="A name of `kvdsl models` [default: the reference model].")
@click.option("--policy", default="h2o", show_default=True, help="Beside full attention.")
@click.option("--budget", type=click.IntRange(2), default=256, show_default=True, help="Of the policy.")
@click.option("--cache-mib", type=click.IntRange(1), default=256, show_default=True, help="Of each engine's cache.")
@click.option("--longest", type=click.IntRange(16), default=4096, show_default=True, help="Tokens of a text, and of a step.")
@click.option("--requests", type=click.IntRange(1), default=40, show_default=True, help="Of each of the two runs.")
@click.option("--rate", type=float, default=0.2, show_default=True, help="Requests a second.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--serve", "contestant", hidden=True, help="Be the engine of a contestant.")
def main(model: str | None, policy: str, budget: int, cache_mib: int, longest: int, requests: int, rate: float, as_json: bool,
         contestant: str | None) -> None:  # fmt: skip
    """Serve requests by Poisson's process, with lengths like those of a public trace, and time every step."""
    setup = {
        "model": model or "reference", "policy": policy, "budget": budget, "cache_bytes": cache_mib << 20, "longest": longest,
        "at_once": 256, "requests": requests, "rate": rate, "traffic": asdict(CONVERSATION),
    }  # fmt: skip
    if contestant is not None:
        print("measured", json.dumps(_measured(contestant, setup)))
        return
    from kvdsl.environment import environment

    found = {"environment": environment(dtype="fp32", seed=0) | {"threads": 1}, **setup}
    found["contestants"] = {name: _run(name) for name in ("full", policy)}
    if as_json:
        click.echo(json.dumps(found, indent=1, default=str).replace("\n     ", " ").replace("\n    ]", "]"))
        return
    for name, one in found["contestants"].items():
        click.echo(f"{name}: {one['served']}\n  {one['machine']}, steps off by {one['off']:.0%} (median)")


def _run(name: str) -> dict[str, Any]:
    told = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "scripts.serving.vllm_steps", *sys.argv[1:], "--serve", name]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | told, check=False)
    said = [line.removeprefix("measured ") for line in done.stdout.splitlines() if line.startswith("measured ")]
    if done.returncode or not said:
        raise click.ClickException(f"the engine of {name} has ended with {done.returncode}; what it said is above")
    found: dict[str, Any] = json.loads(said[0])
    return found


def _measured(name: str, setup: dict[str, Any]) -> dict[str, Any]:
    """One contestant's constants, the steps that they come from, and how it served other requests."""
    engine = Real(name, setup)
    draw = CONVERSATION.requests
    serve(engine, draw(4, float("inf"), setup["longest"], seed=2))  # warms up
    engine.begin()
    serve(engine, draw(setup["requests"], setup["rate"], setup["longest"], seed=0))
    steps = engine.steps
    machine = fitted([work for work, _ in steps], [seconds for _, seconds in steps])
    off = float(np.median([abs(machine.seconds(work) / seconds - 1) for work, seconds in steps]))
    engine.begin()
    served = serve(engine, draw(setup["requests"], setup["rate"], setup["longest"], seed=1))
    return {
        "machine": asdict(machine), "off": off, "blocks": engine.blocks, "served": asdict(served),
        "steps": [[*astuple(work), round(seconds, 5)] for work, seconds in steps],
    }  # fmt: skip


class Real:
    """vLLM itself, in this process; see `driving.Engine`. Its seconds are those of the processor.

    Attributes:
        steps: what each did, and how long it took.
        blocks: of its cache.
    """

    def __init__(self, name: str, setup: dict[str, Any]) -> None:
        import torch
        from vllm import LLM

        from kvdsl.integrations.vllm.settings import Settings
        from kvdsl_lab.serving.simulation import Cache, configured, folder_of, work_of

        torch.set_num_threads(1)
        policy = None if name == "full" else Settings(name, (("budget", setup["budget"]),))
        cache = Cache(policy, setup["cache_bytes"], setup["longest"], setup["at_once"], "float32")
        model = folder_of(setup["model"])
        _, kv, self._reading = configured(model, cache)
        self.blocks = kv.num_blocks
        asked = {} if policy is None else {"additional_config": {"kvdsl": {"policy": name, "budget": setup["budget"]}}}
        llm = LLM(
            model, dtype="float32", max_model_len=cache.longest, max_num_batched_tokens=cache.longest, max_num_seqs=cache.at_once,
            enforce_eager=True, enable_prefix_caching=False, async_scheduling=False, kv_cache_memory_bytes=cache.bytes, **asked,
        )  # fmt: skip
        self._engine = llm.llm_engine
        found = self._engine.engine_core.engine_core.vllm_config.cache_config.num_gpu_blocks
        if found != self.blocks:
            raise click.ClickException(f"vLLM makes {found} blocks of its cache, and the simulation {self.blocks}")
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._work_of, self._chance = work_of, random.Random(0)
        self._schedule = self._scheduler.schedule
        self._scheduler.schedule = self._watched
        self.begin()

    def begin(self) -> None:
        """Forget what has been measured."""
        self.seconds, self.preemptions = 0.0, 0
        self.steps: list[tuple[Work, float]] = []

    def _watched(self, *given: Any, **named: Any) -> Any:
        output = self._schedule(*given, **named)
        self._work = self._work_of(output, self._scheduler.requests, self._reading)
        self.preemptions += len(output.preempted_req_ids or ())
        return output

    def add(self, number: int, asked: Asked) -> None:
        from vllm import SamplingParams

        prompt = [self._chance.randrange(10, 4000) for _ in range(asked.prompt)]
        wanted = SamplingParams(max_tokens=asked.new, ignore_eos=True, temperature=0, detokenize=False)
        self._engine.add_request(str(number), {"prompt_token_ids": prompt}, wanted)

    def step(self) -> Iterable[tuple[int, bool]]:
        began = time.process_time()
        outputs = self._engine.step()
        seconds = time.process_time() - began
        self.seconds += seconds
        self.steps.append((self._work, seconds))
        return [(int(one.request_id), one.finished) for one in outputs]

    def running(self) -> int:
        return len(self._scheduler.running)


if __name__ == "__main__":
    main()
