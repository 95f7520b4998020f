"""Writing what was found, as the policy's `tensor` lines ask for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.files import write_whole
from kvdsl.ir.nodes import Policy
from kvdsl.shipped import all_policies
from kvdsl.tensorfile import Stored, written
from kvdsl_lab.calibrate.request import Wanted

Files = dict[Path, tuple[Wanted, ...]]


def files_of(wanted: Iterable[Wanted], folder: Path | None) -> Files:
    """Which tensors lie in which file: where the policy looks for it, or by the same path below another folder."""
    found: Files = {}
    for one in wanted:
        path = Path(one.tensor.path) if folder is None else folder / one.tensor.file
        found[path] = (*found.get(path, ()), one)
    return found


def check_own(policy: Policy, files: Files) -> None:
    """Raise KvdslError if one of them belongs to a shipped policy: its tests read it."""
    shipped = {path.parent.resolve() for path in all_policies()}
    for path, (one, *_) in files.items():
        if path.parent.resolve() in shipped:
            line = f'tensor {one.tensor.name} [{", ".join(one.tensor.axes)}] from "mine.safetensors"'
            raise KvdslError(
                f"{path} comes with kvdsl, for the policy's own tests: write `policy Mine = {policy.name} with {line}` in a file of "
                f"yours, and calibrate that; or name another folder by `-o`"
            )


def check_absent(files: Files) -> None:
    """Raise KvdslError if one of them is there already."""
    there = next((path for path in files if path.exists()), None)
    if there is not None:
        raise KvdslError(f"{there} is there already: give --force to write it anew, or another folder by `-o`")


def write(files: Files, found: Mapping[str, Tensor], notes: Mapping[str, str]) -> None:
    """Write them, float32.

    Args:
        found: by the names of statistics.
        notes: where the numbers are from, for whoever opens the files.
    """
    for path, tensors in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = {one.tensor.name: _stored(one, found[one.statistic.name]) for one in tensors}
        of_each = {one.tensor.name: one.statistic.name for one in tensors}
        write_whole(path, written(stored, {**notes, **of_each}))


def _stored(one: Wanted, values: Tensor) -> Stored:
    """In the order of the tensor's axes."""
    ordered = values.permute([one.statistic.axes.index(axis) for axis in one.tensor.axes]).contiguous()
    return Stored("F32", tuple(ordered.shape), ordered.numpy().astype("<f4").tobytes())
