"""The releases of Triton that kvdsl works with, and what differs between them; `scripts/tritons.py` tries them."""

from __future__ import annotations

from pathlib import Path

import triton

from kvdsl.errors import KvdslError

OLDEST = (3, 3)
"""The first release whose kernels take tuples."""


def check_release(version: str = triton.__version__) -> None:
    """Raise KvdslError under a release that cannot compile the kernels."""
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        raise KvdslError(f"the triton backend needs Triton 3.3 or later (torch 2.7 brings it), and this is {version}")


def tool(name: str) -> str:
    """Where a program lies that comes with Triton: `cuobjdump` or `nvdisasm`."""
    if hasattr(triton, "knobs"):  # from 3.4 on
        return str(getattr(triton.knobs.nvidia, name).path)
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)
