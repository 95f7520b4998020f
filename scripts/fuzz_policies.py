#!/usr/bin/env python
"""Runs random policies on random traces, step by step beside the reference interpreter.

Policy N of a seed is always the same one. On the C++ backend many policies share a translation unit; Triton's kernels run in its
interpreter, where a policy takes seconds. Differences that float32's
precision explains are counted as near (tests/differential/traces.py says how); the exit code is 1 if there are others.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a checkout needs no installation for this

CHUNK = {"torch": 100, "cpu": 40, "triton": 10}
CHECK_EVERY = 20
SHOWN = 5


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--backend", type=click.Choice(list(CHUNK)), default="torch", show_default=True)
@click.option("--policies", type=click.IntRange(1), default=1_000, show_default=True, help="How many.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which ones.")
@click.option("--workers", type=click.IntRange(1), default=os.cpu_count(), show_default="one a core", help="Processes.")
@click.option("--shrink", is_flag=True, help="Reduce the policies that fail on torch.")
@click.option(
    "--json", "out", type=click.Path(path_type=Path, dir_okay=False),
    help="Write the result there, too, after every chunk; what it has already is not run again if it is called so again.",
)  # fmt: skip
def main(backend: str, policies: int, seed: int, workers: int, shrink: bool, out: Path | None) -> None:
    from kvdsl.cli.progress import progress

    result = _begun(out, backend, seed)
    result["wanted"] = policies
    size = CHUNK[backend]
    todo = [first for first in range(0, policies, size) if str(first) not in result["chunks"]]
    before, begun = result["seconds"], time.perf_counter()
    jobs = [(backend, seed, first, min(size, policies - first), shrink) for first in todo]
    with ThreadPoolExecutor(workers) as threads, progress(f"random policies on {backend}", len(jobs)) as tick:
        for done in as_completed([threads.submit(in_a_process, job) for job in jobs]):
            first, chunk = done.result()
            result["chunks"][str(first)] = chunk
            result["seconds"] = round(before + time.perf_counter() - begun, 1)
            _sum_up(result)
            if out is not None:
                _write(result, out)
            tick()
    del result["chunks"]
    if out is not None:
        _write(result, out)
    click.echo(json.dumps(result, indent=2))
    sys.exit(bool(result["failures"]))


def _begun(out: Path | None, backend: str, seed: int) -> dict[str, Any]:
    """The result so far."""
    from kvdsl.environment import environment

    if out is not None and out.exists():
        known: dict[str, Any] = json.loads(out.read_text())
        if (known["backend"], known["environment"]["seed"]) != (backend, seed):
            raise click.ClickException(f"{out} is of another backend or seed")
        if "chunks" not in known:
            raise click.ClickException(f"{out} is complete")
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


# -- workers ---------------------------------------------------------------------------------------------------------------

Job = tuple[str, int, int, int, bool]
"""The backend, the seed, the first policy's number, how many, and whether to shrink those that fail."""

_own = threading.local()


def in_a_process(job: Job) -> tuple[int, dict[str, Any]]:
    """Runs a chunk in this thread's process. If that dies, the policy that killed it has failed, and the chunk is cut there."""
    if not hasattr(_own, "process"):
        context = multiprocessing.get_context("spawn")
        _own.at = context.Value("q", 0)
        _own.process = ProcessPoolExecutor(1, mp_context=context, initializer=_remember, initargs=(_own.at,))
    try:
        return _own.process.submit(run_chunk, job).result()
    except BrokenProcessPool:
        number = _own.at.value
        del _own.process
    backend, seed, first, _, shrink = job
    _, chunk = in_a_process((backend, seed, first, number - first, shrink)) if number > first else (first, _nothing())
    chunk["policies"] += 1
    chunk["failures"].append({"number": number, "policy": "", "trace": "", "problem": "the process died"})
    return first, chunk


def _remember(at: Any) -> None:
    global _at
    _at = at


_at: Any = None
"""The number of the policy that is being run, shared with the process that waits for it."""


# -- in a worker -----------------------------------------------------------------------------------------------------------


def run_chunk(job: Job) -> tuple[int, dict[str, Any]]:
    """The policies `first` and following: that number, and what came of them."""
    backend, seed, first, count, shrink = job
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    import torch

    torch.set_num_threads(1)
    from tests.differential.traces import RANDOM_INPUTS, Tally

    _at.value = first
    every, natural, failures = Tally(), Tally(), []
    for number, policy, trace, run in _cases(backend, seed, first, count):
        _at.value, check = number, number % CHECK_EVERY == 0
        one, error = _attempt(run, policy, trace, check)
        every.add(one)
        if trace.inputs in RANDOM_INPUTS:
            natural.add(one)
        if error is not None:
            shown = _shrunk(policy, trace, run, error) if shrink and backend == "torch" else policy
            failures.append({"number": number, "policy": _text(shown), "trace": str(trace), "problem": error})
    return first, _chunk(count, every, natural, failures)


def _nothing() -> dict[str, Any]:
    from tests.differential.traces import Tally

    return _chunk(0, Tally(), Tally(), [])


def _chunk(policies: int, every: Any, natural: Any, failures: list[dict[str, Any]]) -> dict[str, Any]:
    tallies = {
        name: {count: getattr(tally, count) for count in tally.COUNTS}
        for name, tally in (("all_inputs", every), ("natural_inputs", natural))
    }
    return {"policies": policies, **tallies, "failures": failures}


def _cases(backend: str, seed: int, first: int, count: int) -> Iterator[tuple[int, Any, Any, Callable[..., Any]]]:
    """Numbers, policies, traces, and what runs one of them."""
    from kvdsl.runtime.torch.backend import TorchBackend
    from tests.differential.random_policies import policy_of
    from tests.differential.traces import random_trace, run_policy

    if backend == "torch":
        for number in range(first, first + count):
            policy = policy_of(f"{seed}-{number}")
            trace = random_trace(policy, f"{seed}-{number}")
            yield number, policy, trace, lambda p, t, **more: run_policy(p, TorchBackend(), t, **more)
        return
    if backend == "triton":
        yield from _interpreted(seed, first, count)
        return
    unit = dict(_fused(seed, first, count))
    backends = _built(unit)
    for offset, (stem, (policy, trace, _, spec)) in enumerate(unit.items()):

        def run(p: Any, t: Any, kernels: Any = backends[stem], spec: Any = spec, **more: bool) -> Any:
            if isinstance(kernels, Exception):
                raise kernels
            return run_policy(p, kernels, t, spec=spec, **more)

        yield first + offset, policy, trace, run


def _interpreted(seed: int, first: int, count: int) -> Iterator[tuple[int, Any, Any, Callable[..., Any]]]:
    """Policies that have Triton kernels, as `_cases` gives them."""
    import pytest
    import torch

    from kvdsl.runtime.gpu.backend import TritonBackend
    from tests.differential.random_policies import policy_of
    from tests.differential.traces import random_trace, run_policy
    from tests.triton.interpreter import defined, make_blocks_small, make_places_equal, with_kernels

    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")  # NumPy's, of NaN and infinities
    found = draw = 0
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        make_places_equal(patch)
        make_blocks_small(patch)
        while found < count:
            name, draw = f"triton-{seed}-{first}-{draw}", draw + 1
            policy = policy_of(name, f"p{draw}")
            spec = with_kernels(policy, Path(folder))
            if spec is None:
                continue

            def run(p: Any, t: Any, spec: Any = spec, **more: bool) -> Any:
                return run_policy(p, TritonBackend(spec, torch.device("cpu"), t.dtype), t, spec=spec, **more)

            yield first + found, policy, defined(random_trace(policy, name)), run
            found += 1


def _fused(seed: int, first: int, count: int) -> Iterator[tuple[str, tuple[Any, Any, Any, Any]]]:
    """Policies that have fused kernels, with their traces, packages and specs, by their stems; torch serves the others.

    In the place of a package there may be what went wrong.
    """
    from kvdsl.compiler import package
    from tests.differential.random_policies import policy_of
    from tests.differential.traces import random_trace, spec_of

    found = draw = 0
    while found < count:
        name, stem = f"fused-{seed}-{first}-{draw}", f"p{found}"
        policy = policy_of(name, stem, fused=draw % 2 == 0)
        try:
            files: Any = package(policy, _text(policy))
        except Exception as error:
            files = error
        if isinstance(files, Exception) or "kernels_cpu.cpp" in files:
            spec = None if isinstance(files, Exception) else spec_of(policy, files)
            yield stem, (policy, random_trace(policy, name), files, spec)
            found += 1
        draw += 1


def _built(unit: dict[str, tuple[Any, Any, Any, Any]]) -> dict[str, Any]:
    """A backend for each policy, or why there is none."""
    from tests.differential.units import build

    wrong = {stem: files for stem, (_, _, files, _) in unit.items() if isinstance(files, Exception)}
    sources = {
        stem: (files["kernels_cpu.cpp"], spec, trace.dtype)
        for stem, (_, trace, files, spec) in unit.items()
        if stem not in wrong
    }
    try:
        return wrong | build(sources)
    except RuntimeError as error:
        if len(sources) == 1:
            return wrong | dict.fromkeys(sources, error)
    alone = (_built({stem: unit[stem]}) for stem in sources)
    return wrong | {stem: backend for one in alone for stem, backend in one.items()}


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
