"""What is made once and used often, in the cache folder: checked whenever it is opened, made again where it is damaged.

An entry is a folder with a seal, which has the size and the digest of each of its files. It is made in a folder of its maker's own
and published by one rename: others see all of it or nothing. Nothing is flushed to disk: opening an entry compares it with its seal,
and a file half written by a power cut has another digest.

Reading the weights of a model whole takes a second. So the state of a file is noted beside it when it has been read, and it is not read
again while that is the same. No program changes a file and not its `ctime`, which the system alone sets. What a disk forgets by
itself goes unnoticed.
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

from kvdsl.build.cache import ELSEWHERE, refusal, writable
from kvdsl.errors import KvdslError

SEAL = "seal.json"


def entry(
    folder: Path, what: str, make: Callable[[Path], None], patience: float | None = None, elsewhere: str = ELSEWHERE
) -> Path:
    """The entry in `folder`: the one that is there if it is sound, else one that is made now, by one process for all.

    Args:
        what: its name in messages.
        make: writes the entry's files into the empty folder that it is given; what lies beside that folder is its own as well.
        patience: seconds to wait for another process that makes it; minutes, if not said.
        elsewhere: what to do where the disk is full or cannot be written to.

    Raises:
        KvdslError: if it cannot be written, or is damaged as soon as it is; and whatever `make` raises.
    """
    if flaw(folder) is None:
        return folder
    from kvdsl.build.lock import making  # most find their entry

    writable(folder.parent, elsewhere)
    try:
        with making(folder, what, patience) as own:
            _make(folder, own, make)
    except OSError as error:
        raise refusal(folder, error, elsewhere) from error
    if (found := flaw(folder)) is not None:
        raise KvdslError(f"{folder} is damaged as soon as it is written ({found}): is its disk sound? else {elsewhere}")
    return folder


def flaw(folder: Path, known: bool = False) -> str | None:
    """What keeps an entry from being used; None if it is what was made.

    Args:
        known: whether files that nobody has touched since they were last compared with the seal count as sound. It spares the second
            that the weights of a model take. What a disk forgets by itself is not noticed then.
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
    """Make the entry in a folder of one's own, and publish it."""
    found = flaw(folder)
    if found is None:  # by another process, while we waited
        return
    made = own / "made"
    made.mkdir()
    make(made)
    files = {file.name: {"bytes": file.stat().st_size, "sha256": digest_of(file)} for file in sorted(made.iterdir())}
    (made / SEAL).write_text(json.dumps({"files": files}, indent=1) + "\n", encoding="utf-8")
    if flaw(folder) is None:  # where files cannot be locked, another process was first
        return
    if folder.exists():
        print(f"kvdsl: {folder} was damaged ({found}) and has been made again", file=sys.stderr)
        try:
            os.rename(folder, own / "damaged")
        except OSError:  # of an image below a container, whose folders cannot be renamed
            shutil.rmtree(folder)
    try:
        os.rename(made, folder)
    except OSError:  # another process published it just now
        if flaw(folder) is not None:
            raise


def digest_of(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
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
"""Seconds for which a file must not have changed before its stamp tells: clocks of file systems tick slowly."""


def stamp(file: Path) -> Stamp:
    """Return the size, times and identity of a file, in a few microseconds."""
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
