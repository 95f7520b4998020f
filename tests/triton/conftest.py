"""Kernels run in Triton's interpreter here, which has to be asked for before Triton is imported: `make test` gives these tests a
process of their own, with TRITON_INTERPRET=1. What compiles kernels ahead of time runs with the other tests.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILING = ("test_build",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parent, _, module = item.module.__name__.rpartition(".")  # type: ignore[attr-defined]
        if parent == __name__.rpartition(".")[0] and (module in COMPILING) == INTERPRETED:
            asked = "not 1" if INTERPRETED else "1"
            item.add_marker(pytest.mark.skip(reason=f"`make test` runs this in a process where TRITON_INTERPRET is {asked}"))


@pytest.fixture(autouse=INTERPRETED)
def equal_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product is the same wherever it lies in a tile, as it is on a GPU.

    The interpreter's `tl.dot` is NumPy's product in the dtype of the result, whose last bit depends on the row and the column. Two
    kernels that give a slot different places then see different scores, and the only slot of a one-token prompt lies above its own
    mean. Taken in float64 and rounded once, it is the same everywhere.
    """
    import numpy as np
    from triton.runtime import interpreter

    def create_dot(_builder: Any, left: Any, right: Any, total: Any, *_how: Any) -> Any:
        product = np.matmul(left.data, right.data, dtype=np.float64).astype(total.data.dtype)
        return interpreter.TensorHandle(product + total.data, total.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 16 slots, so that a few slots are several blocks, the last of them not full."""
    from kvdsl.runtime.gpu.sizes import Sizes

    monkeypatch.setattr(Sizes, "attend_block", 16)
    monkeypatch.setattr(Sizes, "settle_block", 16)
    monkeypatch.setattr(Sizes, "choose_block", lambda sizes, pages: 8 if pages else 64)
    monkeypatch.setattr(Sizes, "look_block", lambda sizes, dims: 32)
    monkeypatch.setattr("kvdsl.runtime.slots._GROWTH", 32)
