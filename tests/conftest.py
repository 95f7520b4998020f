"""Settings of every test run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import hypothesis
import pytest

# Kernels that are built once stay between runs. Threads that wait must not spin: other test processes need the cores.
os.environ.setdefault("KVDSL_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "kvdsl"))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "2")  # else commands look how busy the machine is
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


TESTS = Path(__file__).parent
NIGHTLY = ("bench", "build", "eval", "models", "packaging", "playground", "reproduce", "search", "serving", "torture")
"""Folders of which no test is for the gate."""

hypothesis.settings.register_profile("kvdsl", deadline=None, print_blob=True)
hypothesis.settings.load_profile("kvdsl")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--until",
        type=float,
        metavar="SECONDS",
        help="Skip what has not begun at this time, in seconds since 1970, and say so.",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The gate spares itself what their modules import."""
    return True if config.option.markexpr == "not nightly" and _folder(collection_path) in NIGHTLY else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _folder(item.path) in NIGHTLY:
            item.add_marker(pytest.mark.nightly)


def _folder(path: Path) -> str:
    return path.relative_to(TESTS).parts[0] if path != TESTS and path.is_relative_to(TESTS) else ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    until: float | None = item.config.getoption("--until")
    if until is not None and time.time() > until:
        pytest.skip("not run: there was no time left")


def pytest_configure() -> None:
    try:
        import torch
    except ImportError:  # tests of the compiler need none
        return
    torch.set_num_threads(2)
