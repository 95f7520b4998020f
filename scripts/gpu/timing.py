"""Times on a GPU: graphs of steps, medians of their replays, and what a copy reaches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from scripts.gpu.setting import Setting

Step = Callable[[], object]


def captured(step: Callable[[], Tensor], before: int = 3) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A step as a graph, after so many of them outside of it; and its output."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(before):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


def in_a_graph(setting: Setting, step: Callable[[], Tensor]) -> Step:
    """The step's replay; the step itself in the interpreter."""
    return captured(step)[0].replay if setting.real else step


def median_ms(setting: Setting, run: Step, repeats: int | None = None) -> float:
    """Of single calls, on a GPU after three that are not timed."""
    repeats = repeats or setting.sizes.repeats
    if not setting.real:
        return statistics.median(_seconds(run) for _ in range(repeats)) * 1e3
    for _ in range(3):
        run()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in marks:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)


def _seconds(run: Step) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def copy_rate(setting: Setting) -> float:
    """Bytes read and written a second by a large copy on the device, in GB/s: no step can be faster."""
    size = setting.sizes.copied
    one, other = (torch.zeros(size, dtype=torch.int8, device=setting.device) for _ in range(2))
    return 2 * size / median_ms(setting, lambda: other.copy_(one)) / 1e6


def measured(setting: Setting, run: Step) -> tuple[float, int | None]:
    """Milliseconds, and what the run allocates beyond its inputs; None where the allocator is not the GPU's."""
    ms = median_ms(setting, run, 5)
    if not setting.real:
        return ms, None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return ms, torch.cuda.max_memory_allocated() - before


@contextmanager
def timed_parts(setting: Setting, functions: Mapping[str, tuple[Any, str]]) -> Iterator[dict[str, float]]:
    """Milliseconds of what is called meanwhile, by name, there when it ends.

    Args:
        functions: whose attributes they are, and of what name.
    """
    found, marks = dict.fromkeys(functions, 0.0), []
    real = {name: getattr(owner, attribute) for name, (owner, attribute) in functions.items()}

    def watched(name: str) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            begin = _mark(setting)
            out = real[name](*given, **named)
            end = _mark(setting)
            marks.append((name, begin, end))
            return out

        return call

    try:
        for name, (owner, attribute) in functions.items():
            setattr(owner, attribute, watched(name))
        yield found
    finally:
        for name, (owner, attribute) in functions.items():
            setattr(owner, attribute, real[name])
    if setting.real:
        torch.cuda.synchronize()
    for name, begin, end in marks:
        found[name] += begin.elapsed_time(end) if setting.real else (end - begin) * 1e3


def _mark(setting: Setting) -> Any:
    """Now: of the device's stream, or seconds."""
    if not setting.real:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
