"""Where the host would wait for a GPU: what is made from a forward's tensors counts as lying there, and reading it as waiting."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from kvdsl.runtime.gpu import backend, prompt
from kvdsl.runtime.gpu.launch import launch

aten = torch.ops.aten
READ = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default)
"""Operations whose result the host needs, for its numbers or for its shapes."""

COPIES = ("cpu", "tolist", "numpy")
"""Methods by which all of a tensor comes to the host."""


class Waits(TorchDispatchMode):
    """Notes the lines of kvdsl that read what comes from these tensors.

    Attributes:
        lines: those, one for every time.
    """

    def __init__(self, patch: pytest.MonkeyPatch, tensors: Iterable[Tensor | None]) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._there: dict[int, Tensor] = {}  # held, so that no other storage takes an address
        self._mark(tensors)
        for name in COPIES:
            patch.setattr(Tensor, name, self._copying(getattr(Tensor, name)))
        for module in (backend, prompt):
            patch.setattr(module, "launch", _unseen)

    def _mark(self, found: Iterable[object]) -> None:
        self._there |= {x.untyped_storage()._cdata: x for x in found if isinstance(x, Tensor)}

    def _lies_there(self, x: object) -> bool:
        return isinstance(x, Tensor) and x.untyped_storage()._cdata in self._there

    def _copying(self, method: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def copy(tensor: Tensor) -> Any:
            if not self._lies_there(tensor):
                return method(tensor)
            self._note()
            self._there, there = {}, self._there
            here = tensor.clone()  # the host's
            self._there = there
            return method(here)

        return copy

    def _note(self) -> None:
        ours = [frame for frame in traceback.extract_stack() if "/kvdsl/runtime/" in frame.filename]
        self.lines.append(f"{Path(ours[-1].filename).name}:{ours[-1].lineno} {ours[-1].line}" if ours else "?")

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = operation(*args, **kwargs)
        if any(map(self._lies_there, tree_leaves((args, kwargs)))):
            if operation in READ or (operation in (aten.index.Tensor, aten.index_put_.default) and _masks(args[1])):
                self._note()
            self._mark(tree_leaves(out))
        return out


def _unseen(*launched: Any) -> Any:
    """A launch, which does not wait; Triton's interpreter does much else."""
    with _disable_current_modes():
        return launch(*launched)


def _masks(indices: Iterable[Tensor | None]) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)
