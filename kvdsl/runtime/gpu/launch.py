"""Launching a kernel with those arguments that it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], given: Mapping[str, Any], options: Mapping[str, int]) -> None:
    """Run the kernel; of what is given it gets what it names. Products are rounded: counts are floored, where one bit decides."""
    kernel[grid](**{name: given[name] for name in kernel.arg_names}, **options, enable_fp_fusion=False)
