"""Launching a kernel with those arguments that it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], options: Mapping[str, int]) -> None:
    """Run the kernel; it gets those of the arguments that it names. Products are rounded: counts are floored, where one bit decides."""
    kernel[grid](**{name: arguments[name] for name in kernel.arg_names}, **options, enable_fp_fusion=False)
