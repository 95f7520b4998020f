"""Read and write tensors in safetensors files. Plain bytes: no torch, no NumPy, and no code that a file could run.

A file is the size of a header (8 bytes, little-endian), the header, a JSON object of `{name: {dtype, shape, data_offsets}}`, and the data.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kvdsl.errors import KvdslError

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""The supported dtypes, and their bytes."""

AXES = ("layers", "heads", "group", "dims", "rank")
"""The axes of a policy's tensor: the model's layers, the KV heads of a layer, the query heads of a GQA group, the dims of a key, and
with these the dims of a projection, as many as the file has."""

_LONGEST_HEADER = 2**26


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: little-endian, row-major."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def read(path: Path, names: Iterable[str]) -> dict[str, Stored]:
    """Read some tensors of a file, by name.

    Raises:
        KvdslError: if the file is missing or not a safetensors file, or lacks a tensor, or its dtype is not a float.
    """
    try:
        with path.open("rb") as stream:
            header = _header(stream, path)
            start = stream.tell()
            size = stream.seek(0, 2) - start
            return {name: _stored(stream, path, name, header, start, size) for name in names}
    except FileNotFoundError:
        raise KvdslError(f"there is no file `{path}`") from None
    except OSError as error:
        raise KvdslError(f"cannot read `{path}`: {error.strerror or error}") from error


def _header(stream: BinaryIO, path: Path) -> dict[str, Any]:
    length = int.from_bytes(stream.read(8), "little")
    text = stream.read(length) if length <= _LONGEST_HEADER else b""
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict):
        raise KvdslError(f"`{path}` is not a safetensors file")
    return header


def _stored(stream: BinaryIO, path: Path, name: str, header: Mapping[str, Any], start: int, size: int) -> Stored:
    entry = header.get(name)
    if name == "__metadata__" or entry is None:
        there = ", ".join(f"`{other}`" for other in sorted(header) if other != "__metadata__")[:200]
        raise KvdslError(f"`{path}` has no tensor `{name}`; it has {there or 'none'}")
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        whole = all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end))
    except (TypeError, KeyError, ValueError):
        whole = False
    if not whole:
        raise KvdslError(f"`{path}` is damaged: its description of `{name}` is invalid")
    if dtype not in FLOATS:
        raise KvdslError(f"`{name}` in `{path}` is {dtype}; policies read {', '.join(FLOATS)}")
    if end > size or end - begin != FLOATS[dtype] * math.prod(shape):
        raise KvdslError(f"`{path}` is damaged: `{name}` does not have the bytes of {list(shape)} in {dtype}")
    stream.seek(start + begin)
    return Stored(dtype, shape, stream.read(end - begin))


def written(tensors: Mapping[str, Stored], notes: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a file with these tensors; equal tensors give equal bytes.

    Args:
        notes: metadata for readers to show.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(notes.items()))} if notes else {}
    at = 0
    for name, stored in sorted(tensors.items()):
        header[name] = {"dtype": stored.dtype, "shape": list(stored.shape), "data_offsets": [at, at + len(stored.data)]}
        at += len(stored.data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(tensors[name].data for name in sorted(tensors))


def check_axes(name: str, axes: Sequence[str], shape: Sequence[int], where: str) -> None:
    """Raise KvdslError unless a tensor has as many axes as in the policy; `where` names its file."""
    if len(shape) != len(axes):
        found = f"{len(shape)} {'axis' if len(shape) == 1 else 'axes'}, {list(shape)}"
        raise KvdslError(f"`{name}` in `{where}` has {found}, but the policy declares [{', '.join(axes)}]")


def check_sizes(name: str, axes: Sequence[str], shape: Sequence[int], sizes: Mapping[str, int], where: str) -> None:
    """Raise KvdslError unless a tensor has the model's sizes.

    Args:
        sizes: of the model, by axis, where they are known.
        where: names the tensor's file.
    """
    check_axes(name, axes, shape, where)
    if any(sizes.get(axis, size) != size for axis, size in zip(axes, shape, strict=True)):
        wanted = [sizes.get(axis, size) for axis, size in zip(axes, shape, strict=True)]
        raise KvdslError(
            f"`{name}` in `{where}` is {list(shape)} over [{', '.join(axes)}], but this model needs {wanted}: make a file for the "
            f"model that you run (`kvdsl calibrate` makes some)"
        )
