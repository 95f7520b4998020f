"""Settings of every test run."""

from __future__ import annotations

import os
from pathlib import Path

# Kernels that are built once stay between runs. Threads that wait must not spin: other test processes need the cores.
os.environ.setdefault("KVDSL_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "kvdsl"))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_configure() -> None:
    try:
        import torch
    except ImportError:  # tests of the compiler need none
        return
    torch.set_num_threads(2)
