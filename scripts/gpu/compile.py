"""The stage `compile`: every kernel once, in as many processes as there are cores, into Triton's own cache.

How many programs share a head's slots is compiled in, as far as it is one, or a multiple of 16; so shapes are those that are timed.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context

from kvdsl_lab.bench import prefill
from scripts.gpu.kernels import SELECTED
from scripts.gpu.setting import Lines, Setting, Shape, cache_class, choose, half, on_device, prepared

MOST = 16
"""Processes: each has a context of half a gigabyte on the GPU."""
_LARGEST = 2 << 30
"""Bytes of keys and values of a cache that each of them may make; rows beyond that are left out."""


def run(setting: Setting, lines: Lines) -> int:
    """Compile; 1 if a kernel could not be."""
    lines.tell(**setting.environment(), missing=setting.missing())
    jobs = [(setting, name, shape) for name in setting.names for shape in _shapes(name, setting)]
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


def _shapes(name: str, setting: Setting) -> list[Shape | prefill.Shape]:
    """What a policy is checked and timed with, the largest first: those take longest."""
    sizes, spec = setting.sizes, cache_class(name).spec
    shapes = {*sizes.checked, *(_that_fits(shape) for shape in (sizes.selecting if spec.selects else sizes.timed))}
    found: list[Shape | prefill.Shape] = sorted(shapes, key=lambda shape: (-shape.batch * shape.live, str(shape)))
    return found + (list(sizes.timed_prompts[:1]) if spec.reads_attention else [])


def _that_fits(shape: Shape) -> Shape:
    row = 2 * shape.kv_heads * shape.live * shape.head_dim * shape.torch_dtype.itemsize
    return replace(shape, batch=max(1, min(shape.batch, _LARGEST // row)))


def _compiled(job: tuple[Setting, str, Shape | prefill.Shape]) -> float:
    setting, name, shape = job
    begun, spec = time.perf_counter(), cache_class(name).spec
    if isinstance(shape, Shape):
        timed = spec.selects and shape in setting.sizes.selecting
        prepared(setting, spec, shape, **(SELECTED if timed else half(spec, shape)))
    elif spec.triton_source.exists():
        tensors = on_device(setting, shape)
        backend = choose(spec, "triton", tensors[0].device, tensors[0].dtype)
        prefill.prefill(backend, spec, tensors, seed=0)()
    return time.perf_counter() - begun
