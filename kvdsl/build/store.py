"""Build results in the cache folder: checked whenever they are opened, and made again if damaged.

An entry is a folder with a seal, which has the size and digest of each of its files. It is made in a private folder and published by
one rename, so others see all of it or nothing. Nothing is flushed to disk: a file left incomplete by a power cut has another digest
than its seal.

Reading a model's weights takes a second. So a file's stamp is noted after a full read, and the file is not read again while the stamp
is the same. Programs cannot change a file without its `ctime`. Silent disk corruption goes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvdsl.build import ELSEWHERE, refusal, writable
from kvdsl.errors import KvdslError

SEAL = "seal.json"


def entry(
    folder: Path, what: str, make: Callable[[Path], None], patience: float | None = None, elsewhere: str = ELSEWHERE
) -> Path:
    """Return the entry in `folder`: the existing one if it is sound, else a new one, made by one process for all.

    Args:
        what: its name in messages.
        make: writes the entry's files into a given empty folder; it may also use that folder's parent.
        patience: seconds to wait for another process that makes it; by default minutes.
        elsewhere: what to do if the disk is full or read-only.

    Raises:
        KvdslError: if it cannot be written, or is damaged at once; and whatever `make` raises.
    """
    if flaw(folder) is None:
        return folder
    from kvdsl.build.lock import making  # usually the entry exists

    writable(folder.parent, elsewhere)
    try:
        with making(folder, what, patience) as own:
            _make(folder, own, make)
    except OSError as error:
        raise refusal(folder, error, elsewhere) from error
    if (found := flaw(folder)) is not None:
        raise KvdslError(f"{folder} is damaged right after writing ({found}): is the disk failing? else {elsewhere}")
    return folder


def flaw(folder: Path, known: bool = False) -> str | None:
    """Return why an entry is unusable; None if it matches its seal.

    Args:
        known: whether to trust files whose stamps have not changed since they were compared with the seal. That saves a second for a
            model's weights, but misses silent disk corruption.
    """
    found: dict[str, Stamp] = {}
    try:
        files = json.loads((folder / SEAL).read_bytes())["files"]
        before = noted(folder) if known else {}
        for name, sealed in files.items():
            if (size := (folder / name).stat().st_size) != sealed["bytes"]:
                return f"{name} has {size:,} of {sealed['bytes']:,} bytes"
            found[name] = stamp(folder / name)
            if before.get(name) != found[name] and digest_of(folder / name) != sealed["sha256"]:
                return f"{name} is not what was written"
    except OSError as error:
        return f"{Path(error.filename or SEAL).name}: {error.strerror}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{SEAL} cannot be read"
    if known and before != found:
        note(folder, found)
    return None


def _make(folder: Path, own: Path, make: Callable[[Path], None]) -> None:
    """Make the entry in a private folder, and publish it."""
    found = flaw(folder)
    if found is None:  # another process made it while this one waited
        return
    made = own / "made"
    made.mkdir()
    make(made)
    files = {file.name: {"bytes": file.stat().st_size, "sha256": digest_of(file)} for file in sorted(made.iterdir())}
    (made / SEAL).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
    if flaw(folder) is None:  # without locks another process was first
        return
    if folder.exists():
        print(f"kvdsl: {folder} was damaged ({found}) and has been made again", file=sys.stderr)
        try:
            os.rename(folder, own / "damaged")
        except OSError:  # such as of an image below a container, whose folders cannot be renamed
            shutil.rmtree(folder)
    try:
        os.rename(made, folder)
    except OSError:  # another process published it just now
        if flaw(folder) is not None:
            raise


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


Stamp = list[int]
"""A file's inode, size, `mtime` and `ctime`, in nanoseconds."""

NOTE = "compared.json"
"""The file with the stamps."""

STILL = 2.0
"""Seconds without changes before a stamp is trusted: file systems' clocks are coarse."""


def stamp(file: Path) -> Stamp:
    """Return the inode, size and times of a file, in a few microseconds."""
    found = file.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def noted(folder: Path) -> dict[str, Any]:
    """Return the stamps noted in a folder, by file; none without a readable note."""
    try:
        found = json.loads((folder / NOTE).read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def note(folder: Path, found: dict[str, Stamp]) -> None:
    """Note that files with these stamps were compared and are sound, unless they are too new or the note cannot be written."""
    if any(time.time() - ctime / 1e9 < STILL for *_, ctime in found.values()):
        return
    beside = folder / f".{NOTE}.{os.getpid()}"
    try:
        for name in found:
            with open(folder / name, "rb") as file:
                os.fsync(file.fileno())  # or a power cut could lose the files and keep the note
        beside.write_text(json.dumps(found), encoding="utf-8")
        os.replace(beside, folder / NOTE)
    except OSError:  # such as in another user's folder; files are then read fully each time
        with suppress(OSError):
            beside.unlink()
