"""Kernels run in Triton's interpreter here, which has to be asked for before Triton is imported: `make test` gives these tests a
process of their own, with TRITON_INTERPRET=1. What compiles kernels ahead of time runs with the other tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILING = ("test_build", "test_prepared", "test_report")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parent, _, module = item.module.__name__.rpartition(".")  # type: ignore[attr-defined]
        if parent == __name__.rpartition(".")[0] and (module in COMPILING) == INTERPRETED:
            asked = "not 1" if INTERPRETED else "1"
            item.add_marker(pytest.mark.skip(reason=f"`make test` runs this in a process where TRITON_INTERPRET is {asked}"))


@pytest.fixture(autouse=INTERPRETED, scope="session")
def interpreter_as_wanted() -> Iterator[None]:
    from .interpreter import know_truth_values, make_places_equal, patch_language_once, shuffle_programs, watch_overflow

    with pytest.MonkeyPatch.context() as patch:
        know_truth_values(patch)
        patch_language_once(patch)
        make_places_equal(patch)
        shuffle_programs(patch)
        watch_overflow(patch, False)
        yield


@pytest.fixture
def watched_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums and products of integers that do not fit into their bits fail: the interpreter takes each once more in 64 bits."""
    from .interpreter import watch_overflow

    watch_overflow(monkeypatch)


@pytest.fixture(autouse=INTERPRETED)
def nightly_tests_watch_overflow(request: pytest.FixtureRequest) -> None:
    """The others do so where they ask for it: it is a quarter of the interpreter's time."""
    if request.node.get_closest_marker("nightly"):
        request.getfixturevalue("watched_overflow")


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from .interpreter import make_blocks_small

    make_blocks_small(monkeypatch)
