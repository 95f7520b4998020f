"""The shipped policies as cache classes: `from kvdsl.policies import H2OCache`.

A class is compiled when it is first asked for, into kvdsl's cache folder; `kvdsl list` shows what there is.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from kvdsl.resources import resource

_HEAD = re.compile(r"^[ \t]*policy[ \t]+([A-Za-z_][A-Za-z0-9_]*)", re.MULTILINE)


@lru_cache(maxsize=1)
def _stems() -> dict[str, str]:
    """Class name -> file stem, read from the files' `policy NAME` lines."""
    stems = {}
    for path in sorted(resource("policies").glob("*.kv")):
        head = _HEAD.search(path.read_text(encoding="utf-8"))
        if head and not path.stem.endswith("_test"):
            stems[f"{head.group(1)}Cache"] = path.stem
    return stems


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
