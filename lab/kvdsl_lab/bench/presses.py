"""Presses of kvpress, as `kvdsl bench generate` and `make peers` run them beside policies."""

from __future__ import annotations

from typing import Any

from kvdsl.errors import KvdslError

_LIKE_OURS = {"SnapKVPress": {"window_size": 32, "kernel_size": 7}}
"""Settings that the shipped policies and the papers have, where kvpress's defaults differ."""


def check_press(name: str) -> None:
    """Raise KvdslError if kvpress is not installed, or has no such press that presses to a ratio."""
    try:
        import kvpress
    except ImportError as error:
        raise KvdslError(
            f"kvpress:{name} needs kvpress, which is not installed: `make peers` has an environment for it, or `pip install kvpress`"
        ) from error
    found = getattr(kvpress, name, None)
    if not (isinstance(found, type) and hasattr(found, "compression_ratio")):
        there = (
            own for own in dir(kvpress) if own.endswith("Press") and hasattr(getattr(kvpress, own), "compression_ratio")
        )
        raise KvdslError(f"kvpress has no press `{name}` with a compression_ratio; it has {', '.join(sorted(there))}")


def press(name: str, budget: int, prompt: int, every: int | None = None) -> Any:
    """A press that keeps `budget` tokens of a prompt of `prompt`.

    Args:
        every: press again after so many generated tokens, to the same budget; None lets them all stay.
    """
    import kvpress

    def made(**settings: float) -> Any:
        return getattr(kvpress, name)(**settings, **_LIKE_OURS.get(name, {}))

    # kvpress keeps int(length * (1 - ratio)) tokens: half a token more makes that the budget, whatever the rounding.
    once = made(compression_ratio=max(0.0, 1 - (budget + 0.5) / prompt))
    if every is None:
        return once
    always = kvpress.DecodingPress(made(), compression_interval=every, target_size=budget)
    return kvpress.PrefillDecodingPress(once, always)
