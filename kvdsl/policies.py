"""The shipped policies as cache classes: `from kvdsl.policies import H2OCache`.

Importing a class compiles it into kvdsl's cache folder; `kvdsl list` lists them.
"""

from __future__ import annotations

from typing import Any

from kvdsl.shipped import stems_by_name


def _stems() -> dict[str, str]:
    """Map class names to file stems."""
    return {f"{name}Cache": stem for name, stem in stems_by_name().items()}


def __getattr__(name: str) -> Any:
    if name not in _stems():
        if name.startswith("__"):
            raise AttributeError(name)
        from kvdsl.diagnostics import did_you_mean

        hint = did_you_mean(name, _stems()) or f"there are {', '.join(_stems())}"
        raise AttributeError(f"no shipped policy has a class `{name}`; {hint}")
    from kvdsl.loading import load

    globals()[name] = load(_stems()[name])
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(_stems())
