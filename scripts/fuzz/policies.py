#!/usr/bin/env python
"""Runs random policies on random traces, step by step beside the reference interpreter.

Policy N of a seed is the same on every backend. Most are of the whole language, a quarter of what has fused kernels mostly, a quarter
have a score as one would type it, an eighth change another one by clauses. Each must be accepted by the checker, be printed as it is
read, and mean the same in the newest edition; where `explain` claims the backend for it, it must build and do what the interpreter
does. On the C++ backend many policies share a translation unit; Triton's kernels run in its interpreter, where a policy takes seconds.
Differences that float32's precision explains are counted as near (tests/differential/traces.py says how); the exit code is 1 if there
are others.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout needs no installation for this

from kvdsl.memory import KV_DTYPES  # noqa: E402

CHUNK = {"torch": 100, "cpu": 40, "triton": 10}
CHECK_EVERY = 21  # in turn of every kind of policy
SHOWN = 5


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--backend", type=click.Choice(list(CHUNK)), default="torch", show_default=True)
@click.option("--policies", type=click.IntRange(1), default=1_000, show_default=True, help="How many.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which ones.")
@click.option("--workers", type=click.IntRange(1), default=os.cpu_count(), show_default="one a core", help="Processes.")
@click.option("--kv-dtype", type=click.Choice([*KV_DTYPES, "any"]), default="model", show_default=True,
              help="The cache's; `any` draws one in fewer bits for each policy.")  # fmt: skip
@click.option("--shrink", is_flag=True, help="Reduce the policies that fail on torch.")
@click.option(
    "--json", "out", type=click.Path(path_type=Path, dir_okay=False),
    help="Write the result there, too, after every chunk; what it has already is not run again if it is called so again.",
)  # fmt: skip
def main(
    backend: str, policies: int, seed: int, workers: int, kv_dtype: str, shrink: bool, out: Path | None
) -> None:  # fmt: skip
    from kvdsl.cli.progress import progress

    result = _begun(out, backend, seed, kv_dtype)
    result["wanted"] = policies
    size = CHUNK[backend]
    todo = [first for first in range(0, policies, size) if str(first) not in result["chunks"]]
    before, begun = result["seconds"], time.perf_counter()
    jobs = [(backend, seed, kv_dtype, first, min(size, policies - first), shrink) for first in todo]
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


def _begun(out: Path | None, backend: str, seed: int, kv_dtype: str) -> dict[str, Any]:
    """The result so far."""
    from kvdsl.environment import environment

    if out is not None and out.exists():
        known: dict[str, Any] = json.loads(out.read_text())
        if (known["backend"], known["environment"]["seed"], known["kv_dtype"]) != (backend, seed, kv_dtype):
            raise click.ClickException(f"{out} is of another backend, seed or kv_dtype")
        if "chunks" not in known:
            raise click.ClickException(f"{out} is complete")
        return known
    return {
        "format_version": "1.0", "environment": environment(seed=seed), "backend": backend, "kv_dtype": kv_dtype,
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
    result["claimed"] = {name: sum(chunk["claimed"][name] for chunk in chunks) for name in CHUNK}
    failures = [failure for chunk in chunks for failure in chunk["failures"]]
    result["failures"], result["first_failures"] = len(failures), failures[:SHOWN]


def _write(result: dict[str, Any], out: Path) -> None:
    part = out.with_name(f"{out.name}.part")
    part.write_text(json.dumps(result, indent=1), encoding="utf-8")
    os.replace(part, out)


# -- workers ---------------------------------------------------------------------------------------------------------------

Job = tuple[str, int, str, int, int, bool]
"""The backend, the seed, the caches' dtype, the first policy's number, how many, and whether to shrink those that fail."""

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
    *way, first, _, shrink = job
    _, chunk = in_a_process((*way, first, number - first, shrink)) if number > first else (first, _nothing())
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
    backend, seed, kv_dtype, first, count, shrink = job
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    import torch

    torch.set_num_threads(1)
    from tests.differential.traces import RANDOM_INPUTS, Tally

    every, natural, failures = Tally(), Tally(), []
    claimed = dict.fromkeys(CHUNK, 0)

    def failed(number: int, policy: Any, trace: Any, problem: str) -> None:
        failures.append({"number": number, "policy": _text(policy), "trace": str(trace), "problem": problem})

    served = []
    for number in range(first, first + count):
        _at.value, policy = number, drawn(seed, number)
        compiled, error = _attempt(Compiled.of, policy, f"{seed}-{number}", kv_dtype)
        if compiled is None:
            failed(number, policy, "", error or "")
            continue
        for name in compiled.claimed:
            claimed[name] += 1
        if backend in compiled.claimed:
            served.append((number, compiled))
    for number, one, run in _runs(backend, served):
        _at.value = number
        tally, error = _attempt(run, one.policy, one.trace, check=number % CHECK_EVERY == 0)
        if tally is not None:
            every.add(tally)
            if one.trace.inputs in RANDOM_INPUTS:
                natural.add(tally)
            error = tally.failures[0] if tally.failures else None
        if error is not None:
            failed(
                number,
                _shrunk(one.policy, one.trace, run, error) if shrink and backend == "torch" else one.policy,
                one.trace,
                error,
            )
    return first, _chunk(count, every, natural, claimed, failures)


def _nothing() -> dict[str, Any]:
    from tests.differential.traces import Tally

    return _chunk(0, Tally(), Tally(), dict.fromkeys(CHUNK, 0), [])


def _chunk(
    policies: int, every: Any, natural: Any, claimed: dict[str, int], failures: list[dict[str, Any]]
) -> dict[str, Any]:
    tallies = {
        name: {count: getattr(tally, count) for count in tally.COUNTS}
        for name, tally in (("all_inputs", every), ("natural_inputs", natural))
    }
    return {"policies": policies, "claimed": claimed, **tallies, "failures": failures}


def drawn(seed: int, number: int) -> Any:
    """Policy `number` of a seed."""
    from tests.differential.random_clauses import changed
    from tests.differential.random_policies import policy_of
    from tests.differential.random_texts import policy_with_score

    name, stem = f"{seed}-{number}", f"p{number}"
    if number % 8 == 6:
        made = changed(name, stem)
        assert not made.differing(), f"{made.text} changes {made.differing()}"
        return made.policy
    return policy_with_score(name, stem) if number % 4 == 3 else policy_of(name, stem, fused=number % 4 == 1)


@dataclass(frozen=True)
class Compiled:
    """A policy that the checker accepts, its package, the backends that `explain` claims for it, and a trace to run it on."""

    policy: Any
    files: dict[str, str]
    claimed: tuple[str, ...]
    trace: Any

    @staticmethod
    def of(policy: Any, name: str, kv_dtype: str) -> Compiled:
        """What comes of it, on the way that a file takes."""
        from kvdsl.compiler import analyse, package
        from kvdsl.diagnostics import Sink
        from kvdsl.explain.facts import facts
        from kvdsl.passes.fold import fold
        from kvdsl.sema.upgrade import upgraded
        from kvdsl.source import SourceFile
        from tests.differential.tensors import BESIDE
        from tests.differential.traces import in_fewer_bits, random_trace

        trace = random_trace(policy, name)
        if kv_dtype != "model":
            policy, trace = in_fewer_bits(policy, trace, kv_dtype)
        text = _text(policy)
        source = SourceFile(f"{policy.stem}.kv", text, BESIDE.with_stem(policy.stem))
        again = analyse(source).policy
        assert _one_spelling(again) == _one_spelling(policy), "it is read back as another policy"
        newest = upgraded(source, Sink())  # which compares what both editions mean
        assert newest is None or analyse(replace(source, text=newest)).ok, "it has another meaning in the newest edition"
        claimed = tuple(one["name"] for one in facts(again).backends if one["ok"])
        return Compiled(fold(again), package(again, text), claimed, trace)


def _one_spelling(policy: Any) -> Any:
    """The policy in normal form, with the values of tokens in the order of their names: `sqrt(var(x))` is read as `std(x)`."""
    from kvdsl.passes.fold import fold
    from kvdsl.passes.normal import normal

    found = normal(fold(policy))
    return found.model_copy(update={"given": tuple(sorted(found.given, key=lambda given: given.name))})


Run = Callable[..., Any]


def _runs(backend: str, served: list[tuple[int, Compiled]]) -> Iterator[tuple[int, Compiled, Run]]:
    """What runs each of these policies, which the backend has code for."""
    return {"torch": _on_torch, "cpu": _fused, "triton": _interpreted}[backend](served)


def _on_torch(served: list[tuple[int, Compiled]]) -> Iterator[tuple[int, Compiled, Run]]:
    from kvdsl.runtime.torch.backend import TorchBackend
    from tests.differential.traces import run_policy

    def run(policy: Any, trace: Any, **more: bool) -> Any:
        return run_policy(policy, TorchBackend(), trace, **more)

    yield from ((number, one, run) for number, one in served)


def _interpreted(served: list[tuple[int, Compiled]]) -> Iterator[tuple[int, Compiled, Run]]:
    import pytest
    import torch

    from kvdsl.runtime.gpu.backend import TritonBackend
    from tests.differential.traces import run_policy
    from tests.triton.interpreter import defined, make_blocks_small, make_places_equal, shuffle_programs, with_kernels

    def run(policy: Any, trace: Any, **more: bool) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            spec = with_kernels(policy, Path(folder))
            assert spec is not None, "there are no kernels"
            spec = spec.laid_out(kv_dtype=trace.kv_dtype)
            return run_policy(policy, TritonBackend(spec, torch.device("cpu"), trace.dtype), trace, spec=spec, **more)

    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")  # NumPy's, of NaN and infinities
    with pytest.MonkeyPatch.context() as patch:
        make_places_equal(patch)
        shuffle_programs(patch)
        make_blocks_small(patch)
        yield from ((number, replace(one, trace=defined(one.trace)), run) for number, one in served)


def _fused(served: list[tuple[int, Compiled]]) -> Iterator[tuple[int, Compiled, Run]]:
    from tests.differential.traces import run_policy, spec_of

    unit = {
        one.policy.stem: (
            one.files["kernels_cpu.cpp"],
            spec_of(one.policy, one.files).laid_out(kv_dtype=one.trace.kv_dtype),
            one.trace.dtype,
        )
        for _, one in served
    }
    backends = _built(unit)
    for number, one in served:

        def run(policy: Any, trace: Any, stem: str = one.policy.stem, **more: bool) -> Any:
            if isinstance(backends[stem], Exception):
                raise backends[stem]
            return run_policy(policy, backends[stem], trace, spec=unit[stem][1], **more)

        yield number, one, run


def _built(unit: dict[str, Any]) -> dict[str, Any]:
    """A backend for each policy, or why there is none."""
    from tests.differential.units import build

    try:
        return dict(build(unit))
    except RuntimeError as error:
        if len(unit) == 1:
            return dict.fromkeys(unit, error)
    return {stem: backend for name, one in unit.items() for stem, backend in _built({name: one}).items()}


def _attempt(made: Callable[..., Any], *args: Any, **more: Any) -> tuple[Any, str | None]:
    """What a call gives, or what went wrong."""
    try:
        return made(*args, **more), None
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return None, f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


def _text(policy: Any) -> str:
    from kvdsl.ir.printer import print_policy

    return print_policy(policy)


def _shrunk(policy: Any, trace: Any, run: Callable[..., Any], error: str) -> Any:
    """A smaller policy that still fails, in the same way if it is an exception."""
    from kvdsl.compiler import analyse
    from kvdsl.source import SourceFile
    from tests.differential.random_policies import simpler
    from tests.differential.tensors import BESIDE

    def fails(candidate: Any) -> bool:
        checked = analyse(SourceFile(f"{policy.stem}.kv", _text(candidate), BESIDE.with_stem(policy.stem)))
        if not checked.ok:
            return False
        tally, found = _attempt(run, candidate, trace)
        if tally is not None:
            found = next(iter(tally.failures), None)
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
