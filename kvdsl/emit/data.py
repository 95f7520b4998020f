"""What a package holds beside code: the tensors that its policy reads, in one file, as they were when it was made."""

from __future__ import annotations

from pathlib import Path

from kvdsl.errors import KvdslError
from kvdsl.ir.nodes import Policy, Tensor
from kvdsl.tensorfile import Stored, check_axes, read, written

TENSORS = "tensors.safetensors"
"""The file's name in a package."""


def data_of(policy: Policy) -> dict[str, bytes]:
    """The files of a policy's package that are no text, by name: none, or the one with its tensors.

    Raises:
        KvdslError: if a tensor's file is not there, or does not hold what the policy says.
    """
    if not policy.tensors:
        return {}
    return {TENSORS: written({tensor.name: stored_of(tensor) for tensor in policy.tensors})}


def stored_of(tensor: Tensor) -> Stored:
    """A tensor as its file has it.

    Raises:
        KvdslError: as `data_of` does.
    """
    path = Path(tensor.path)
    if path.resolve() != path:
        raise KvdslError(f"`{path}` has become a link since the policy was checked")
    stored = read(path, [tensor.name])[tensor.name]
    check_axes(tensor.name, tensor.axes, stored.shape, str(path))
    return stored
