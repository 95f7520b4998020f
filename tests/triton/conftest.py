"""Kernels run in Triton's interpreter here, which has to be asked for before Triton is imported: `make test` gives these tests a
process of their own, with TRITON_INTERPRET=1. What compiles kernels ahead of time runs with the other tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILING = ("test_build",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parent, _, module = item.module.__name__.rpartition(".")  # type: ignore[attr-defined]
        if parent == __name__.rpartition(".")[0] and (module in COMPILING) == INTERPRETED:
            asked = "not 1" if INTERPRETED else "1"
            item.add_marker(pytest.mark.skip(reason=f"`make test` runs this in a process where TRITON_INTERPRET is {asked}"))


@pytest.fixture(autouse=INTERPRETED, scope="session")
def interpreter_as_wanted() -> Iterator[None]:
    from .interpreter import make_places_equal, patch_language_once

    with pytest.MonkeyPatch.context() as patch:
        patch_language_once(patch)
        make_places_equal(patch)
        yield


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from .interpreter import make_blocks_small

    make_blocks_small(monkeypatch)
