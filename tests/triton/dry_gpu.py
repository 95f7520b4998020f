"""A machine with a GPU, as far as `scripts/gpu` can tell: `torch.cuda` is a stub, and what it would run runs in Triton's interpreter.

A graph holds the launches of a step, with the memory that they were given, and does them again when it is replayed: so a step that did
anything else, or elsewhere, would differ from an eager one. `IDLE_GRAPHS=1` has replays do nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch


class Stream:
    """Everything happens at once, in order."""

    def wait_stream(self, other: Stream) -> None:
        """Nothing to wait for."""


class Event:
    """A moment."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        """Now."""
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds until the other."""
        return (end.at - self.at) * 1e3


class CUDAGraph:
    """The launches of a step, in order."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def replay(self) -> None:
        """Launch them again."""
        from kvdsl.runtime.gpu.launch import launch

        for one in self.launches if os.environ.get("IDLE_GRAPHS") != "1" else ():
            launch(*one)


@contextmanager
def graph(into: CUDAGraph) -> Iterator[None]:
    """Capture what is launched meanwhile; a stub of a capture runs it as well."""
    from kvdsl.runtime.gpu import backend

    real = backend.launch

    def capture(*launched: Any) -> Any:
        into.launches.append(launched)
        return real(*launched)

    backend.launch = capture
    try:
        yield
    finally:
        backend.launch = real


def install() -> None:
    """Have `scripts.gpu` take this for a machine with a GPU."""
    from scripts.gpu import setting

    stubs = {
        "Stream": Stream, "Event": Event, "CUDAGraph": CUDAGraph, "graph": graph, "current_stream": Stream,
        "stream": lambda _: nullcontext(), "get_device_name": lambda: "a stub", "mem_get_info": lambda: (1 << 20, 1 << 20),
    }  # fmt: skip
    for name, stub in stubs.items():
        setattr(torch.cuda, name, stub)
    for name in ("synchronize", "empty_cache"):
        setattr(torch.cuda, name, lambda: None)
    setting.Setting.real = property(lambda _: True)
