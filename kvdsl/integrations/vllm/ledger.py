"""Numbers of one engine that each of its workers writes and the servers read, in a file that all of them map.

The servers, which answer `/metrics`, are other processes than the one that evicts, and vLLM's messages between them have no place for a
plug-in's numbers.
"""

from __future__ import annotations

import atexit
import fcntl
import mmap
import os
import secrets
import tempfile
from pathlib import Path
from typing import NamedTuple

RUN = "KVDSL_VLLM_RUN"
"""The variable that names a server and the processes that it starts."""

_EVICTED, _REPORTED, _REQUEST_BYTES, _BLOCKS, _LAYERS, _COUNTED = range(6)
_SIZE = 8 * 6


def begin_run() -> None:
    """Give this process and its children a common name, unless its parent has given one."""
    if RUN not in os.environ:
        os.environ[RUN] = secrets.token_hex(8)
        atexit.register(_sweep, os.getpid())


def _sweep(process: int) -> None:
    """Remove the run's files, in the process that began it; forked ones leave that to it."""
    if os.getpid() == process:
        for path in Path(tempfile.gettempdir()).glob(f"kvdsl-{os.environ[RUN]}-*"):
            path.unlink(missing_ok=True)


class Sizes(NamedTuple):
    """What a worker's pages are.

    Attributes:
        request_bytes: of the worker's cache that a request takes, all layers together.
        blocks: of vLLM's cache; a request has one, which is a page in each layer.
        layers: how many have pages.
        counted: whether their evicted tokens are counted.
    """

    request_bytes: int
    blocks: int
    layers: int
    counted: bool


class Ledger:
    """A worker's numbers: int64 each, so that a reader sees the old value or the new one."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._numbers = memoryview(mmap.mmap(descriptor, _SIZE)).cast("q")

    @classmethod
    def make(cls, engine: int, rank: int) -> Ledger:
        """Make that of an engine's worker, with zeros."""
        path = _path(engine, rank)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, _SIZE)
        return cls(descriptor)

    @classmethod
    def find(cls, engine: int, rank: int = 0) -> Ledger | None:
        """Open that of an engine's worker, if there is one on this machine."""
        try:
            descriptor = os.open(_path(engine, rank), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        if os.fstat(descriptor).st_size == _SIZE:
            return cls(descriptor)
        os.close(descriptor)  # it is being made
        return None

    @property
    def sizes(self) -> Sizes:
        """Zeros before the first step."""
        request_bytes, blocks, layers, counted = self._numbers[_REQUEST_BYTES:]
        return Sizes(request_bytes, blocks, layers, bool(counted))

    @sizes.setter
    def sizes(self, sizes: Sizes) -> None:
        for place, number in enumerate(sizes, start=_REQUEST_BYTES):
            self._numbers[place] = number

    @property
    def evicted(self) -> int:
        """Tokens evicted so far, counted in each layer and KV head."""
        return self._numbers[_EVICTED]

    def add(self, evicted: int) -> None:
        """Add evicted tokens, or take some back; only one process writes."""
        self._numbers[_EVICTED] += evicted

    def take(self) -> int:
        """Return how many were evicted since the last call; of several servers, one gets them.

        A wrong guess that is taken back restores tokens, so the number may fall: later evictions make up for it.
        """
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            new = max(0, self._numbers[_EVICTED] - self._numbers[_REPORTED])
            self._numbers[_REPORTED] += new
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return new


def _path(engine: int, rank: int) -> Path:
    return Path(tempfile.gettempdir()) / f"kvdsl-{os.environ[RUN]}-{engine}-{rank}"
