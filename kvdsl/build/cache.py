"""The folder for what is built once and used often."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from kvdsl.errors import KvdslError


def cache_folder() -> Path:
    """`$KVDSL_CACHE_DIR`, else kvdsl's folder in the user's cache directory. It need not exist.

    Raises:
        KvdslError: as `user_folder`.
    """
    return user_folder("KVDSL_CACHE_DIR", "user_cache_dir")


def user_folder(variable: str, directory: str) -> Path:
    """The folder that an environment variable names, else kvdsl's in one of `platformdirs`' directories. It need not exist.

    Raises:
        KvdslError: if it lies in a home folder that is not known.
    """
    named = os.environ.get(variable)
    try:
        if named:
            return Path(named).expanduser()
        import platformdirs  # not needed by what runs generated packages

        return Path(getattr(platformdirs, directory)("kvdsl", appauthor=False))
    except RuntimeError as error:
        where = f"{named} lies in a home folder that is not known" if named else "the user's home folder is not known"
        raise KvdslError(f"{where}: set {variable} to another folder") from error


@contextmanager
def cache_folder_at(folder: Path) -> Iterator[None]:
    """Use another cache folder inside this block, for builds that are thrown away and not announced."""
    before, told = os.environ.get("KVDSL_CACHE_DIR"), _told.set(False)
    os.environ["KVDSL_CACHE_DIR"] = str(folder)
    try:
        yield
    finally:
        _told.reset(told)
        if before is None:
            del os.environ["KVDSL_CACHE_DIR"]
        else:
            os.environ["KVDSL_CACHE_DIR"] = before


_told: ContextVar[bool] = ContextVar("told", default=True)


def told() -> bool:
    """Return whether builds are announced to the user."""
    return _told.get()


ELSEWHERE = "set KVDSL_CACHE_DIR to a folder that can be written to"
"""What to do about a cache folder that cannot be used."""


def writable(folder: Path, elsewhere: str = ELSEWHERE) -> Path:
    """Make the folder.

    Args:
        elsewhere: what to do where that fails.

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
    """What to say when something in such a folder cannot be written."""
    hint = f"free some space there, or {elsewhere}" if error.errno in _FULL else elsewhere
    return KvdslError(f"cannot write {path} ({error.strerror}); {hint}")


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
