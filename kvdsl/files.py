"""Writing text files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a text file, UTF-8: at no time is there half of it, whatever happens to this process or the disk.

    Raises:
        OSError: with the path, which that of a full disk otherwise lacks.
    """
    try:
        if path.exists() and not path.is_file():  # a device or a pipe
            path.write_text(text, encoding="utf-8")
            return
        path = path.resolve()  # through links
        beside = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with open(beside, "w", encoding="utf-8", newline="\n") as stream:
                stream.write(text)
            if path.exists():
                shutil.copymode(path, beside)
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error
