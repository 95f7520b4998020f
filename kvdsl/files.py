"""Files: atomic writes, kvdsl's own data files, and `-` for standard input on a command line.

The grammar, the templates and the shipped policies are in `kvdsl/_data/` in a wheel; an editable install and a plain checkout read them
from the repository's root. Standard input is read once and cached; library calls never read it.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def encoded(content: str | bytes) -> bytes:
    """Return a file's bytes; text is UTF-8."""
    return content.encode() if isinstance(content, str) else content


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically, text as UTF-8: readers and crashes never see half of it.

    Raises:
        OSError: with the path, which the system's error for a full disk lacks.
    """
    data = encoded(content)
    try:
        if path.exists() and not path.is_file():  # a device or a pipe
            path.write_bytes(data)
            return
        path = path.resolve()  # follow links
        beside = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with open(beside, "wb") as stream:
                stream.write(data)
            if path.exists():
                shutil.copymode(path, beside)
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error


DASH = "-"
_commands = 0
_read: bytes | None = None


@contextmanager
def of_a_command() -> Iterator[None]:
    """Make `-` mean standard input within this context."""
    global _commands, _read
    _commands, before, _read = _commands + 1, _read, None
    try:
        yield
    finally:
        _commands, _read = _commands - 1, before


def is_standard_input(name: str) -> bool:
    """Return whether a name means standard input, as `-` does in a command."""
    return name == DASH and _commands > 0


def read_standard_input() -> bytes:
    """Return all of standard input."""
    global _read
    if _read is None:
        _read = sys.stdin.buffer.read()
    return _read


_PACKAGE = Path(__file__).resolve().parent
_ROOTS = (_PACKAGE / "_data", _PACKAGE.parent)


def resource(*parts: str) -> Path:
    """Return the path of a data file or folder, such as `resource("grammar", "kv.lark")`."""
    for root in _ROOTS:
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise FileNotFoundError(f"kvdsl's installation is incomplete: {'/'.join(parts)} is missing")


def read_resource(*parts: str) -> str:
    """Return the text of a data file."""
    return resource(*parts).read_text(encoding="utf-8")
