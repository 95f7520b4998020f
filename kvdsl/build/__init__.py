"""Compile and cache the C++ kernels: the folder for results, and what a build reports.

Needs only the standard library and platformdirs: generated packages use it at run time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvdsl.errors import KvdslError

if TYPE_CHECKING:
    from kvdsl.runtime.gpu.report import Taken


def cache_folder() -> Path:
    """Return `$KVDSL_CACHE_DIR`, else kvdsl's folder in the user's cache directory. It need not exist.

    Raises:
        KvdslError: as in `user_folder`.
    """
    return user_folder("KVDSL_CACHE_DIR", "user_cache_dir")


def user_folder(variable: str, directory: str) -> Path:
    """Return the folder named by an environment variable, else kvdsl's in one of `platformdirs`' directories. It need not exist.

    Raises:
        KvdslError: if it is in an unknown home folder.
    """
    named = os.environ.get(variable)
    try:
        if named:
            return Path(named).expanduser()
        import platformdirs  # generated packages do not need it at run time

        return Path(getattr(platformdirs, directory)("kvdsl", appauthor=False))
    except RuntimeError as error:
        where = f"{named} is in an unknown home folder" if named else "the user's home folder is unknown"
        raise KvdslError(f"{where}: set {variable} to another folder") from error


@contextmanager
def cache_folder_at(folder: Path) -> Iterator[None]:
    """Use another cache folder inside this block, for temporary and unannounced builds."""
    before, token = os.environ.get("KVDSL_CACHE_DIR"), _announced.set(False)
    os.environ["KVDSL_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        _announced.reset(token)
        if before is None:
            del os.environ["KVDSL_CACHE_DIR"]
        else:
            os.environ["KVDSL_CACHE_DIR"] = before


_announced: ContextVar[bool] = ContextVar("announced", default=True)


def announces() -> bool:
    """Return whether builds are announced to the user."""
    return _announced.get()


ELSEWHERE = "set KVDSL_CACHE_DIR to a folder that can be written to"
"""What to do about an unusable cache folder."""


def writable(folder: Path, elsewhere: str = ELSEWHERE) -> Path:
    """Make the folder.

    Args:
        elsewhere: what to do if that fails.

    Raises:
        KvdslError: if it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KvdslError(f"cannot make the folder {folder} ({error.strerror}); {elsewhere}") from error
    if not os.access(folder, os.W_OK):
        raise KvdslError(f"cannot write to {folder}; {elsewhere}")
    return folder


def refusal(path: Path, error: OSError, elsewhere: str = ELSEWHERE) -> KvdslError:
    """Return the error for a file in such a folder that cannot be written."""
    hint = f"free some space there, or {elsewhere}" if error.errno in _FULL else elsewhere
    return KvdslError(f"cannot write {path} ({error.strerror}); {hint}")


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Row:
    """One kernel built for one target.

    Attributes:
        policy, kernel: `attend`, which policies share, or `settle`; `look` and `choose` for a selection, `make_room` under a hard cap,
            `agree` if heads agree, `take` and `give_back` for slots in blocks; for prompts `observe`, before it `over_slots` if values
            over slots are reduced, and after it `settle_prompt`.
        registers: of a thread. shared_bytes: of a program. spills: bytes (on AMD registers) that do not fit.
        ms: the time to compile; 0 if it was cached.
        taken: what the machine code uses, if requested.
    """

    policy: str
    kernel: str
    target: str
    registers: int | None
    shared_bytes: int | None
    spills: int | None
    ms: float
    taken: Taken | None = None
