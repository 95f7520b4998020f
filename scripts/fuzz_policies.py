#!/usr/bin/env python
"""Runs random policies on random traces, step by step beside the reference interpreter.

Policy N of a seed is always the same one. On the C++ backend many policies share a translation unit. Differences that float32's
precision explains are counted as near (tests/differential/traces.py says how); the exit code is 1 if there are others.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a checkout needs no installation for this

CHUNK = {"torch": 100, "cpu": 40}
CHECK_EVERY = 20
SHOWN = 5


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--backend", type=click.Choice(list(CHUNK)), default="torch", show_default=True)
@click.option("--policies", type=click.IntRange(1), default=1_000, show_default=True, help="How many.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which ones.")
@click.option("--workers", type=click.IntRange(1), default=os.cpu_count(), show_default="one a core", help="Processes.")
@click.option("--shrink", is_flag=True, help="Reduce the policies that fail.")
@click.option(
    "--json", "out", type=click.Path(path_type=Path, dir_okay=False),
    help="Write the result there, too, after every chunk; what it has already is not run again.",
)  # fmt: skip
def main(backend: str, policies: int, seed: int, workers: int, shrink: bool, out: Path | None) -> None:
    from kvdsl.cli.progress import progress

    result = _begun(out, backend, seed)
    result["wanted"] = policies
    size = CHUNK[backend]
    todo = [first for first in range(0, policies, size) if str(first) not in result["chunks"]]
    before, begun = result["seconds"], time.perf_counter()
    jobs = [(backend, seed, first, min(size, policies - first), shrink) for first in todo]
    pool = multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=20)
    with pool, progress(f"random policies on {backend}", len(jobs)) as tick:
        for first, chunk in pool.imap_unordered(run_chunk, jobs):
            result["chunks"][str(first)] = chunk
            result["seconds"] = round(before + time.perf_counter() - begun, 1)
            _sum_up(result)
            if out is not None:
                _write(result, out)
            tick()
    click.echo(json.dumps({name: value for name, value in result.items() if name != "chunks"}, indent=2))
    sys.exit(bool(result["failures"]))


def _begun(out: Path | None, backend: str, seed: int) -> dict[str, Any]:
    """The result so far."""
    from kvdsl.environment import environment

    if out is not None and out.exists():
        known: dict[str, Any] = json.loads(out.read_text())
        if (known["backend"], known["environment"]["seed"]) != (backend, seed):
            raise click.ClickException(f"{out} is of another backend or seed")
        return known
    return {
        "format_version": "1.0", "environment": environment(seed=seed), "backend": backend,
        "wanted": 0, "seconds": 0.0, "chunks": {},
    }  # fmt: skip


def _sum_up(result: dict[str, Any]) -> None:
    """Totals over the chunks that are done: all traces, and those whose inputs put nothing on boundaries by themselves."""
    chunks = result["chunks"].values()
    for kind in ("all_inputs", "natural_inputs"):
        total = {name: sum(chunk[kind][name] for chunk in chunks) for name in next(iter(chunks))[kind]}
        total["near_share"] = round(total["near"] / max(1, total["steps"]), 5)
        total["undecided_share"] = round(total["undecided"] / max(1, total["checked"]), 5)
        result[kind] = total
    result["policies"] = sum(chunk["policies"] for chunk in chunks)
    failures = [failure for chunk in chunks for failure in chunk["failures"]]
    result["failures"], result["first_failures"] = len(failures), failures[:SHOWN]


def _write(result: dict[str, Any], out: Path) -> None:
    part = out.with_name(f"{out.name}.part")
    part.write_text(json.dumps(result, indent=1), encoding="utf-8")
    os.replace(part, out)


# -- in a worker -----------------------------------------------------------------------------------------------------------


def run_chunk(job: tuple[str, int, int, int, bool]) -> tuple[int, dict[str, Any]]:
    """The policies `first` and following: that number, and what came of them."""
    backend, seed, first, count, shrink = job
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    import torch

    torch.set_num_threads(1)
    from tests.differential.traces import RANDOM_INPUTS, Tally

    every, natural, failures = Tally(), Tally(), []
    for number, policy, trace, run in _cases(backend, seed, first, count):
        check = number % CHECK_EVERY == 0
        one, error = _attempt(run, policy, trace, check)
        every.add(one)
        if trace.inputs in RANDOM_INPUTS:
            natural.add(one)
        if error is not None:
            shown = _shrunk(policy, trace, run, error) if shrink else policy
            failures.append({"number": number, "policy": _text(shown), "trace": str(trace), "problem": error})
    tallies = {
        name: {count: getattr(tally, count) for count in Tally.COUNTS}
        for name, tally in (("all_inputs", every), ("natural_inputs", natural))
    }
    return first, {"policies": count, **tallies, "failures": failures}


def _cases(backend: str, seed: int, first: int, count: int) -> Iterator[tuple[int, Any, Any, Callable[..., Any]]]:
    """Numbers, policies, traces, and what runs one of them."""
    from kvdsl.emit.package import package
    from kvdsl.runtime.torch_backend import TorchBackend
    from tests.differential.random_policies import policy_of
    from tests.differential.traces import random_trace, run_policy, spec_of
    from tests.differential.units import build

    if backend == "torch":
        for number in range(first, first + count):
            policy = policy_of(f"{seed}-{number}")
            yield (
                number,
                policy,
                random_trace(policy, f"{seed}-{number}"),
                lambda p, t, **more: run_policy(p, TorchBackend(), t, **more),
            )
        return
    unit: list[tuple[Any, Any, dict[str, str]]] = []
    draw = 0
    while len(unit) < count:
        name = f"fused-{seed}-{first}-{draw}"
        policy = policy_of(name, f"p{len(unit)}", fused=draw % 2 == 0)
        files = package(policy, _text(policy))
        if "kernels_cpu.cpp" in files:  # the torch backend serves the others
            unit.append((policy, random_trace(policy, name), files))
        draw += 1
    backends = build({policy.stem: (files["kernels_cpu.cpp"], trace.dtype) for policy, trace, files in unit})
    for offset, (policy, trace, files) in enumerate(unit):
        spec, kernels = spec_of(policy, files), backends[policy.stem]
        yield first + offset, policy, trace, lambda p, t, s=spec, k=kernels, **more: run_policy(p, k, t, spec=s, **more)


def _attempt(run: Callable[..., Any], policy: Any, trace: Any, check: bool) -> tuple[Any, str | None]:
    """A trace's tally, and the first thing that went wrong."""
    from tests.differential.traces import Tally

    try:
        tally = run(policy, trace, check=check)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return Tally(traces=1), f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
    return tally, tally.failures[0] if tally.failures else None


def _text(policy: Any) -> str:
    from kvdsl.ir.printer import print_policy

    return print_policy(policy)


def _shrunk(policy: Any, trace: Any, run: Callable[..., Any], error: str) -> Any:
    """A smaller policy that still fails, in the same way if it is an exception."""
    from kvdsl.compiler import analyse
    from kvdsl.source import SourceFile
    from tests.differential.random_policies import simpler

    def fails(candidate: Any) -> bool:
        checked = analyse(SourceFile(f"{policy.stem}.kv", _text(candidate)))
        if not checked.ok:
            return False
        found = _attempt(run, candidate, trace, check=False)[1]
        return found is not None and found.split(":")[0] == error.split(":")[0]

    tries = 300
    shrinking = True
    while shrinking and tries > 0:
        shrinking = False
        for candidate in simpler(policy):
            tries -= 1
            if tries <= 0:
                break
            if fails(candidate):
                policy, shrinking = candidate, True
                break
    return policy


if __name__ == "__main__":
    main()
