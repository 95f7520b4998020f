"""Doing something again whenever a file has changed: `--watch`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

SECONDS = 0.2
"""Between two looks at the files. They are looked at, rather than waited for: that works on every system and network share."""

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
    """What was read, and how all of its files were just before: one that is only found while reading has everything read again."""
    while True:
        before = _stamps(files())
        result = read()
        if before.keys() >= set(files()):
            return before, result


def _stamps(files: Iterable[Path]) -> Stamps:
    return {path: _stamp(path) for path in files}


def _stamp(path: Path) -> tuple[int, int] | None:
    """When it was written, and how long it is; None if it cannot be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
