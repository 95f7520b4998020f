"""Let one process build an entry while the others wait.

The builder holds an operating system lock on a file beside the entry; the system releases it when the process ends. The lock only saves
work: `kvdsl.build.store` publishes each entry by one rename and checks it, so a file system without locks works too.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvdsl.errors import KvdslError

MAKING = ".making-"
"""Part of the names of folders in which an entry is being made."""

LOCK = ".lock"

LIMIT = 900.0
"""The most seconds to wait; builds take less than a minute."""

SILENT = 1.0
"""Seconds of waiting before it is announced."""


@contextmanager
def making(thing: Path, what: str, patience: float | None = None) -> Iterator[Path]:
    """Yield an empty folder next to a cache path, to make the entry in; wait, with a message, while another process makes it.

    The folder is removed with the block, or after a killed process by the next one.

    Args:
        thing: the path of the entry.
        what: its name in messages.
        patience: seconds to wait, by default `LIMIT`.

    Raises:
        KvdslError: if that was not enough.
        OSError: if nothing can be written there.
    """
    with contextlib.ExitStack() as held:
        if _wait(held, thing, what, LIMIT if patience is None else patience):
            for left in thing.parent.glob(f"{thing.name}{MAKING}*"):
                shutil.rmtree(left, ignore_errors=True)
            sweep(thing.parent)
        folder = Path(tempfile.mkdtemp(prefix=thing.name + MAKING, dir=thing.parent))
        held.callback(shutil.rmtree, folder, ignore_errors=True)
        yield folder


def sweep(folder: Path) -> None:
    """Remove what killed processes left."""
    for left in folder.glob(f"*{MAKING}*"):
        with contextlib.suppress(OSError), _locked(left.with_name(left.name.partition(MAKING)[0]), 0) as locked:
            if locked:
                shutil.rmtree(left)


def _wait(held: contextlib.ExitStack, thing: Path, what: str, limit: float) -> bool:
    """Take the lock until the stack closes; return False if files cannot be locked."""
    first = min(SILENT, limit)
    try:
        return held.enter_context(_locked(thing, first))
    except TimeoutError:
        print(f"kvdsl: waiting for another process, which builds `{what}`", file=sys.stderr)
    try:
        return held.enter_context(_locked(thing, limit - first))
    except TimeoutError as error:
        raise KvdslError(
            f"waited {limit:g} s for another process, which builds `{what}` and holds {_lock_of(thing)}; if it hangs, end it"
        ) from error


def _lock_of(thing: Path) -> Path:
    return thing.with_name(thing.name + LOCK)


@contextmanager
def _locked(thing: Path, seconds: float) -> Iterator[bool]:
    """Hold the lock; yield False if the file system has none.

    Raises:
        TimeoutError: if another process or thread held it throughout.
    """
    if sys.platform == "emscripten":  # there is no other process
        yield False
        return
    from filelock import FileLock

    lock = FileLock(_lock_of(thing))
    try:
        lock.acquire(timeout=seconds)
    except NotImplementedError:
        yield False
        return
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
            raise
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
