"""Times on a GPU: graphs of steps, medians of their replays, and what a profiler says of single kernels."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Kernel:
    """A kernel of a run: its launches, and the microseconds of each on average."""

    name: str
    launches: int
    us: float


def kernels(setting: Setting, run: Step, times: int = 10) -> list[Kernel]:
    """What the device did in a run, by torch's profiler; nothing in the interpreter."""
    run()
    if not setting.real:
        return []
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as seen:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    events = [event for event in seen.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [Kernel(one.key, one.count // times, one.self_device_time_total / one.count) for one in events if one.count]


def kernel_us(setting: Setting, run: Step) -> dict[str, float]:
    """Microseconds of a launch of each of our kernels."""
    ours = ("make_room", "look", "vote", "choose", "attend", "take", "settle", "at_once", "agree", "give_back")
    return {one.name: round(one.us, 2) for one in kernels(setting, run) if one.name in ours}
