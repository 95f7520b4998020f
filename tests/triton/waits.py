"""What the host would have a GPU do, and where it would wait for it: what is made from a forward's tensors counts as lying there."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from kvdsl.runtime.gpu import backend, prompt
from kvdsl.runtime.gpu.launch import launch

aten = torch.ops.aten
READ = (aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default)
"""Operations whose result the host needs, for its numbers or for its shapes."""

COPIES = ("cpu", "tolist", "numpy")
"""Methods by which all of a tensor comes to the host."""

NO_KERNELS = ("empty", "new_empty", "empty_like", "empty_strided", "detach", "_unsafe_view", "lift_fresh")
"""Operations that launch nothing, beside views."""

THERE = torch.device("cpu", 0)
"""What tensors that lie there give as their device, so that what is made on it lies there too; the host's give one without a number."""

_device = Tensor.device.__get__  # type: ignore[attr-defined]


class Waits(TorchDispatchMode):
    """Notes what kvdsl does with these tensors, and what comes from them.

    Attributes:
        lines: lines of kvdsl that read them, one for every time.
        launches: names of torch's operations that launch kernels there, of copies to it, and of our kernels.
    """

    def __init__(self, patch: pytest.MonkeyPatch, tensors: Iterable[Tensor | None]) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.launches: list[str] = []
        self.making_there = 0
        self._devices = _Devices(self)
        self._there: dict[int, Tensor] = {}  # held, so that no other storage takes an address
        self._mark(tensors)
        for name in COPIES:
            patch.setattr(Tensor, name, self._copying(getattr(Tensor, name)))
        for module in (backend, prompt):
            patch.setattr(module, "launch", self._launched)

    def __enter__(self) -> Any:
        self._devices.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._devices.__exit__(*raised)

    def _launched(self, kernel: Any, *rest: Any) -> Any:
        """A launch, which does not wait; Triton's interpreter does much else."""
        self.launches.append(kernel.__name__)
        with _disable_current_modes():
            return launch(kernel, *rest)

    def moved_there(self, copy: Callable[[], Tensor]) -> Tensor:
        """A copy of the host's tensor."""
        self.launches.append("copy from the host")
        with _disable_current_modes():
            copied = copy().clone()
        self._mark([copied])
        return copied

    def _mark(self, found: Iterable[object]) -> None:
        self._there |= {x.untyped_storage()._cdata: x for x in found if isinstance(x, Tensor)}

    def lies_there(self, x: object) -> bool:
        return isinstance(x, Tensor) and x.untyped_storage()._cdata in self._there

    def _copying(self, method: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def copy(tensor: Tensor) -> Any:
            if not self.lies_there(tensor):
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
        if self.making_there or any(map(self.lies_there, tree_leaves((args, kwargs)))):
            if operation in READ or (operation in (aten.index.Tensor, aten.index_put_.default) and _masks(args[1])):
                self._note()
            elif _launches(operation, out):
                self.launches.append(operation.__name__)
            self._mark(tree_leaves(out))
        return out


class _Devices(TorchFunctionMode):
    """Tells tensors that lie there from the host's by their device."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function == _device:
            return THERE if self._waits.lies_there(args[0]) else function(*args)
        names_it = any(isinstance(x, torch.device) and x == THERE for x in (*args, *kwargs.values()))
        if names_it and function is Tensor.to and not self._waits.lies_there(args[0]):
            return self._waits.moved_there(lambda: function(*args, **kwargs))
        self._waits.making_there += names_it
        try:
            return function(*args, **kwargs)
        finally:
            self._waits.making_there -= names_it


def _launches(operation: Any, out: Any) -> bool:
    """Whether an operation launches a kernel: not if it returns views, memory as it is, or nothing."""
    views = any(one.alias_info is not None and not one.alias_info.is_write for one in operation._schema.returns)
    made = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
    return not views and operation._schema.name.removeprefix("aten::") not in NO_KERNELS and (not made or any(made))


def _masks(indices: Iterable[Tensor | None]) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)
