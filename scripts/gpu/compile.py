"""The stage `compile`: every kernel once, in as many processes as there are cores, into Triton's own cache."""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context

from scripts.gpu.setting import Lines, Setting, Shape, cache_class, half, prepared

MOST = 16
"""Processes: each has a context of half a gigabyte on the GPU."""


def run(setting: Setting, lines: Lines) -> int:
    """Compile; 1 if a kernel could not be."""
    lines.tell(**setting.environment(), missing=setting.missing())
    shapes = {
        *setting.sizes.checked,
        *(replace(shape, live=min(shape.live, 4096), batch=min(shape.batch, 2)) for shape in setting.sizes.timed),
    }
    jobs = [(setting, name, shape) for name in setting.names for shape in sorted(shapes, key=str)]
    jobs += [(setting, name, setting.sizes.timed[0]) for name in setting.raced if name not in setting.names]
    failed = 0
    with ProcessPoolExecutor(min(MOST, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(_compiled, job): job for job in jobs}
        for future in as_completed(futures):
            _, name, shape = futures[future]
            error = future.exception()
            failed += error is not None
            lines.tell(
                policy=name,
                shape=str(shape),
                seconds=None if error else round(future.result(), 2),
                error=error and str(error)[:500],
            )
            if error:
                print(f"{name} {shape}: {error}", flush=True)
    print(f"{len(jobs) - failed} of {len(jobs)} policies at shapes compiled", flush=True)
    return 1 if failed else 0


def _compiled(job: tuple[Setting, str, Shape]) -> float:
    setting, name, shape = job
    begun, spec = time.perf_counter(), cache_class(name).spec
    prepared(setting, spec, shape, **half(spec, shape))
    return time.perf_counter() - begun
