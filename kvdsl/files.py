"""Writing files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, of a text in UTF-8: at no time is there half of it, whatever happens to this process or the disk.

    Raises:
        OSError: with the path, which that of a full disk otherwise lacks.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        if path.exists() and not path.is_file():  # a device or a pipe
            path.write_bytes(data)
            return
        path = path.resolve()  # through links
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
