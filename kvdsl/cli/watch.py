"""Repeat an action after files have changed: `--watch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

SECONDS = 0.2
"""Seconds between checks of the files. Polling works on every system and network share."""

Stamps = dict[Path, tuple[int, int] | None]
T = TypeVar("T")


def watch(read: Callable[[], T], show: Callable[[T], object], files: Callable[[], Iterable[Path]]) -> None:
    """Read and show, and again after each change, until Ctrl-C.

    Args:
        files: the files that were read, if known.
    """
    try:
        while True:
            before, result = _read(read, files)
            show(result)
            while _stamps(files()) == before:
                time.sleep(SECONDS)
    except KeyboardInterrupt:
        return


def _read(read: Callable[[], T], files: Callable[[], Iterable[Path]]) -> tuple[Stamps, T]:
    """Return the result of a read with its files' stamps from before; a file first found while reading triggers another read."""
    while True:
        before = _stamps(files())
        result = read()
        if before.keys() >= set(files()):
            return before, result


def _stamps(files: Iterable[Path]) -> Stamps:
    return {path: _stamp(path) for path in files}


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return a file's modification time and size; None if it is inaccessible."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
