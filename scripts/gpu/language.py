"""Experiment 9 too: what policies can say, on the device: shipped policies, the gallery, and random policies on random traces, step by
step beside the reference interpreter, in as many processes as there are cores. It takes kvdsl's compiler, which a bare machine may lack.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from scripts.gpu.setting import Lines, Setting

COMPILER = ("click", "jinja2", "lark", "pydantic", "pytest")
MOST = 16
"""Processes: each has a context of half a gigabyte on the GPU."""
TRACES = 2
"""Of every shipped policy."""
RANDOM_AT_ONCE = 2
"""Policies of a job: few, so that little is lost where time ends."""
SEED = 19

Job = tuple[str, str, int, str, bool]
"""A kind, a policy's stem or nothing, a number, the device, and whether it is Triton's interpreter."""


def run(setting: Setting, lines: Lines) -> int:
    """All of them, random policies last and as many as there is time for; 1 if one does what the interpreter does not."""
    lines.tell(**setting.environment(), seed=SEED)
    missing = [name for name in COMPILER if find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}")
        return 0
    begun, wrong, counts = time.monotonic(), 0, {"traces": 0, "steps": 0, "near": 0}
    with ProcessPoolExecutor(min(MOST, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(compared, job): job for job in _jobs(setting)}
        for future in as_completed(futures):
            kind, stem, number, *_ = futures[future]
            try:
                found, problems = future.result()
            except CancelledError:
                continue
            except Exception as error:
                found, problems = {}, [f"{type(error).__name__}: {error}"]
            counts = {name: count + found.get(name, 0) for name, count in counts.items()}
            wrong += len(problems)
            lines.tell(kind=kind, policy=stem, number=number, **found, wrong=[problem[:2000] for problem in problems])
            if problems:
                print(f"{kind} {stem} {number}: WRONG", *(problem[:300] for problem in problems), sep="\n  ", flush=True)
            if time.monotonic() - begun > setting.sizes.language_s:
                for waiting in futures:
                    waiting.cancel()
    lines.tell(**counts, wrong=wrong)
    print(f"{counts['traces']} traces, {counts['steps']} steps of a head, {counts['near']} near a boundary, {wrong} wrong")
    return 1 if wrong else 0


def _jobs(setting: Setting) -> Iterator[Job]:
    from kvdsl.shipped import gallery_policies
    from tests.differential.test_random import POLICIES

    stems = (
        chain(
            (("gallery", path.stem, 0) for path in gallery_policies()),
            (("shipped", stem, 100 + number) for number in range(TRACES) for stem in POLICIES),
        )
        if setting.real
        else [("shipped", "roco", 100)]
    )
    for kind, stem, number in chain(stems, (("random", "", n) for n in range(setting.sizes.random_jobs))):
        yield kind, stem, number, setting.device, not setting.real


def compared(job: Job) -> tuple[dict[str, int], list[str]]:
    """Traces, steps and near ones of a job, and what is wrong."""
    import torch

    torch.set_num_threads(1)
    kind, stem, number, device, interpreted = job
    with _surroundings(interpreted), tempfile.TemporaryDirectory() as folder:
        tallies = list(_tallies(kind, stem, number, device, Path(folder)))
    counts = {name: sum(getattr(tally, name) for tally, _ in tallies) for name in ("traces", "steps", "near")}
    counts["traces"] = max(counts["traces"], len(tallies))
    return counts, [f"{what}: {failure}" for tally, what in tallies for failure in tally.failures[:3]]


@contextmanager
def _surroundings(interpreted: bool) -> Iterator[None]:
    """Small blocks, so that a few slots are several; and an interpreter whose products are those of a GPU."""
    import pytest

    from tests.triton import interpreter

    with pytest.MonkeyPatch.context() as patch:
        interpreter.make_blocks_small(patch)
        if interpreted:
            interpreter.make_places_equal(patch)
        yield


def _tallies(kind: str, stem: str, number: int, device: str, folder: Path) -> Iterator[tuple[Any, str]]:
    """What came of each trace, and what it was."""
    from tests.differential.cases import compare
    from tests.differential.test_random import load, random_case

    if kind == "shipped":
        case = replace(random_case(stem, number), device=device)
        yield compare(*load(stem), "triton", case), str(case)
        return
    for policy, trace in _gallery(stem) if kind == "gallery" else _random(number):
        tally = _on_triton(policy, replace(trace, device=device), folder)
        if tally is not None:
            yield tally, f"{trace}\n{_text(policy)}"


def _gallery(stem: str) -> Iterator[tuple[Any, Any]]:
    from tests.gallery.test_backends import TRACES as traces
    from tests.gallery.test_backends import small, through

    yield small(stem), through(stem, traces[1])  # padded, in bfloat16


def _random(number: int) -> Iterator[tuple[Any, Any]]:
    from scripts.fuzz.policies import drawn
    from tests.differential.traces import random_trace

    for one in range(number * RANDOM_AT_ONCE, (number + 1) * RANDOM_AT_ONCE):
        policy = drawn(SEED, one)
        yield policy, random_trace(policy, f"{SEED}-{one}")


def _on_triton(policy: Any, trace: Any, folder: Path) -> Any:
    """The tally of a trace; None if the policy has no Triton kernels."""
    import torch

    from kvdsl.runtime.gpu.backend import TritonBackend
    from tests.differential.traces import run_policy
    from tests.triton.interpreter import defined, with_kernels

    spec = with_kernels(policy, folder)
    if spec is None:
        return None
    backend = TritonBackend(spec, torch.device(trace.device), trace.dtype)
    return run_policy(policy, backend, defined(trace), spec=spec)


def _text(policy: Any) -> str:
    from kvdsl.ir.printer import print_policy

    return print_policy(policy)
