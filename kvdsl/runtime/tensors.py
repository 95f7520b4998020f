"""The tensors of a policy's `tensor` lines: a file beside the generated package, and the rows of one layer in it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.tensorfile import AXES, Stored, check_sizes, read

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Constants:
    """The policy's tensors for some KV heads of a layer.

    Attributes:
        values: by name, float32 [kv_heads, (group,) (rank,) dim].
    """

    values: Mapping[str, Tensor]

    def of_heads(self, heads: slice) -> Constants:
        """Return the tensors for some of these KV heads."""
        return Constants({name: rows[heads] for name, rows in self.values.items()})

    def scalar(self, name: str) -> Tensor:
        """Return a tensor without dims, [1, kv_heads, 1, 1]."""
        return self.values[name][None, :, :1, None]

    def of_head(self, name: str) -> Tensor:
        """Return a tensor without dims as a count of tokens, float64 [1, kv_heads, 1]."""
        return self.values[name][None, :, :1].double()

    def vector(self, name: str) -> Tensor:
        """Return a tensor with dims, broadcast over queries and slots: [1, kv_heads, 1, 1, dim]."""
        return self.values[name][None, :, None, None]

    def vectors(self, name: str) -> Tensor:
        """Return a tensor with dims per query head, broadcast over queries and slots: [1, kv_heads, group, 1, 1, dim]."""
        return self.values[name][None, :, :, None, None]

    def project_group(self, name: str, x: Tensor) -> Tensor:
        """Multiply a vector, [batch, kv_heads, group or 1, queries, slots, dim], by each query head's matrix: last axis `rank`."""
        return x.float() @ self.values[name][None, :, :, None].transpose(-1, -2)

    def project(self, name: str, x: Tensor) -> Tensor:
        """Multiply a vector, [batch, kv_heads, ..., dim], by a matrix: [batch, kv_heads, ..., rank]."""
        return torch.einsum("bh...d,hrd->bh...r", x.float(), self.values[name])


NO_CONSTANTS = Constants({})


@dataclass(frozen=True)
class Tensors:
    """A policy's tensors.

    Attributes:
        path: the file beside the package.
        sha256: its digest when the package was generated, in hexadecimal.
        tensors: each tensor's name, axes and original file, in the order of `rows`.
    """

    path: Path
    sha256: str
    tensors: tuple[tuple[str, tuple[str, ...], str], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names, in the order of `rows`."""
        return tuple(name for name, _, _ in self.tensors)

    def check(self, sizes: Mapping[str, int]) -> None:
        """Raise KvdslError if the tensors do not fit a model of these sizes (by axis), or if the file has changed."""
        stored = _read(self)
        for name, axes, file in self.tensors:
            check_sizes(name, axes, stored[name].shape, sizes, file)

    def rows(self, layer: int, sizes: Mapping[str, int], heads: slice) -> Tensor:
        """Return the rows that some KV heads of a layer read, float32 [rows, heads, dims].

        A tensor has one row, a matrix one per `rank`; with a `group` axis, as many per query head. A tensor without dims repeats
        its number.

        Args:
            sizes: the model's, by axis.

        Raises:
            KvdslError: if the tensors do not fit the model, or if the file has changed.
        """
        self.check(sizes)
        made = torch.empty(sum(self.ranks), heads.stop - heads.start, sizes["dims"], dtype=torch.float32)
        for rows, (name, axes, _) in zip(made.split(self.ranks), self.tensors, strict=True):
            values = _values(self, name)[layer if "layers" in axes else 0]
            own = values[heads] if "heads" in axes else values
            rows.copy_(own.permute(1, 3, 0, 2).flatten(0, 1))
        return made

    @cached_property
    def ranks(self) -> list[int]:
        """The number of `rows` of each tensor. Cached, so that a compiled step reads no file."""
        return [_values(self, name).shape[2] * _values(self, name).shape[4] for name in self.names]

    @cached_property
    def groups(self) -> list[int]:
        """The number of query heads with rows of their own, per tensor; 1 if they share them."""
        return [_values(self, name).shape[2] for name in self.names]

    def numbers(self, layer: int, heads: slice) -> dict[str, Tensor]:
        """Return the tensors without dims for some KV heads of a layer, by name: float64 [heads], or [1] if all share the number."""
        found = {}
        for name, axes, _ in self.tensors:
            if "dims" not in axes:
                values = _values(self, name)[layer if "layers" in axes else 0, :, 0, 0, 0].double()
                found[name] = values[heads] if "heads" in axes else values
        return found


def constants_of(tensors: Tensors | None, rows: Tensor) -> Constants:
    """Split `rows` into a policy's tensors."""
    if tensors is None:
        return NO_CONSTANTS
    found = {}
    for (name, axes, _), part, group in zip(tensors.tensors, rows.split(tensors.ranks), tensors.groups, strict=True):
        own = part.unflatten(0, (group, -1)).movedim(2, 0)
        own = own if "rank" in axes else own[:, :, 0]
        found[name] = own if "group" in axes else own[:, 0]
    return Constants(found)


@lru_cache(maxsize=8)
def _read(tensors: Tensors) -> dict[str, Stored]:
    """Read the file, if it still has the digest of the package."""
    try:
        found = hashlib.sha256(tensors.path.read_bytes()).hexdigest()
    except OSError as error:
        raise KvdslError(f"`{tensors.path}`, which a policy reads, cannot be read: compile the policy again") from error
    if found != tensors.sha256:
        raise KvdslError(f"`{tensors.path}` is not the file that the policy was compiled with: compile the policy again")
    return read(tensors.path, [name for name, _, _ in tensors.tensors])


@lru_cache(maxsize=64)
def _values(tensors: Tensors, name: str) -> Tensor:
    """Return a tensor as float32 [layers, heads, group, dims, rank], with size 1 along axes that it lacks.

    Raises:
        KvdslError: if it has a number that is not finite.
    """
    stored = _read(tensors)[name]
    (axes, file) = next((axes, file) for other, axes, file in tensors.tensors if other == name)
    flat = torch.frombuffer(bytearray(stored.data), dtype=_DTYPES[stored.dtype]) if stored.data else torch.empty(0)
    values = flat.view(stored.shape).float()
    if not values.isfinite().all():
        raise KvdslError(f"`{name}` in `{file}` has infinite numbers or NaN")
    values = values.permute([axes.index(axis) for axis in AXES if axis in axes])
    for place, axis in enumerate(AXES):
        if axis not in axes:
            values = values.unsqueeze(place)
    return values
