"""Tensors of files, for policies that are compared on random sizes: every trace gets files of its own, of the sizes that it has."""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvdsl.interp.evaluate import Array
from kvdsl.interp.inputs import values
from kvdsl.ir.nodes import Tensor
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.tensors import Tensors
from kvdsl.tensorfile import Stored, written

FOLDER = Path(tempfile.mkdtemp(prefix="kvdsl-tensors-")).resolve()
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)

BESIDE = FOLDER / "p.kv"
"""Where a policy lies that reads `TENSORS`."""

_AXES = {
    "vector": ("layers", "heads", "dims"),
    "direction": ("dims", "layers"),
    "head": ("layers", "heads"),
    "layer_": ("layers",),
    "matrix": ("layers", "heads", "dims", "rank"),
    "turned": ("rank", "dims"),
    "asking": ("layers", "heads", "group", "dims"),
    "spread": ("layers", "group", "heads", "dims", "rank"),
}
_SHARES = {"kept": (0.2, 0.9), "share": (0.5, 1.5)}
"""What a budget reads as a share: numbers between two."""
_DTYPES = {"vector": "F32", "direction": "BF16", "head": "F64", "layer_": "F16"}
TENSORS = tuple(
    Tensor(name=name, axes=axes, file="tensors.safetensors", path=str(FOLDER / "tensors.safetensors"))
    for name, axes in _AXES.items()
    if not {"rank", "group"} & {*axes}
)
MATRICES = tuple(
    Tensor(name=name, axes=axes, file="tensors.safetensors", path=str(FOLDER / "tensors.safetensors"))
    for name, axes in _AXES.items()
    if "rank" in axes and "group" not in axes
)
GROUPED = tuple(
    Tensor(name=name, axes=axes, file="tensors.safetensors", path=str(FOLDER / "tensors.safetensors"))
    for name, axes in _AXES.items()
    if "group" in axes
)
"""What each query head has of its own."""
_RANK = 3


def _random(name: str, shape: tuple[int, ...], random: np.random.Generator) -> Stored:
    numbers = random.uniform(*_SHARES[name], shape) if name in _SHARES else random.standard_normal(shape)
    if _DTYPES.get(name, "F32") == "BF16":
        data = (numbers.astype("<f4").view("<u4") >> 16).astype("<u2")
    else:
        data = numbers.astype({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[_DTYPES.get(name, "F32")])
    return Stored(_DTYPES.get(name, "F32"), shape, data.tobytes())


(FOLDER / "tensors.safetensors").write_bytes(
    written({name: _random(name, (1,) * len(axes), np.random.default_rng(0)) for name, axes in _AXES.items()})
)


def drawn(spec: PolicySpec, sizes: Mapping[str, int], random: np.random.Generator) -> tuple[PolicySpec, dict[str, Array]]:
    """The policy with a file of random numbers for a model of these sizes, by axis; and what is in it."""
    if spec.tensors is None:
        return spec, {}
    stored = {
        name: _random(name, tuple({**sizes, "rank": _RANK}[axis] for axis in axes), random)
        for name, axes, _ in spec.tensors.tensors
    }
    content = written(stored)
    digest = hashlib.sha256(content).hexdigest()
    path = FOLDER / f"{digest}.safetensors"
    path.write_bytes(content)
    made = replace(spec, tensors=Tensors(path, digest, spec.tensors.tensors))
    return made, {name: values(one) for name, one in stored.items()}
