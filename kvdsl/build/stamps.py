"""Which files nobody has touched since they were last read whole and found to be what was written.

Reading the weights of a model whole takes a second. So the state of a file is noted beside it when it has been read, and it is not read
again while that is the same. No program changes a file and not its `ctime`, which the system alone sets. What a disk forgets by
itself goes unnoticed.
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

Stamp = list[int]
"""A file's inode, size, `mtime` and `ctime`, in nanoseconds."""

NOTE = "compared.json"
"""The file with the stamps."""

STILL = 2.0
"""Seconds for which a file must not have changed before its stamp tells: clocks of file systems tick slowly."""


def stamp(file: Path) -> Stamp:
    """The state of a file, in a few microseconds."""
    found = file.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def noted(folder: Path) -> dict[str, Any]:
    """The stamps that were noted in a folder, by file; none if there is no note, or it cannot be read."""
    try:
        found = json.loads((folder / NOTE).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def note(folder: Path, found: dict[str, Stamp]) -> None:
    """Note that files with these stamps were compared and are sound, if that can be known by now, and written."""
    if any(time.time() - ctime / 1e9 < STILL for *_, ctime in found.values()):
        return
    beside = folder / f".{NOTE}.{os.getpid()}"
    try:
        for name in found:
            with open(folder / name, "rb") as file:
                os.fsync(file.fileno())  # or a power cut could take what was compared, and leave the note
        beside.write_text(json.dumps(found), encoding="utf-8")
        os.replace(beside, folder / NOTE)
    except OSError:  # of a folder that others own, say: they are read whole each time
        with suppress(OSError):
            beside.unlink()
