"""Settings of every test run."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis

# Kernels that are built once stay between runs. Threads that wait must not spin: other test processes need the cores.
os.environ.setdefault("KVDSL_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "kvdsl"))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


hypothesis.settings.register_profile("kvdsl", deadline=None, print_blob=True)
hypothesis.settings.load_profile("kvdsl")


def pytest_configure() -> None:
    try:
        import torch
    except ImportError:  # tests of the compiler need none
        return
    torch.set_num_threads(2)
