"""The policies that come with kvdsl: their files, and the names that they have in the language."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from kvdsl.resources import resource

_HEAD = re.compile(r"^[ \t]*policy[ \t]+([A-Za-z_][A-Za-z0-9_]*)", re.MULTILINE)


def shipped_policies() -> list[Path]:
    """Their files, by file name."""
    return sorted(path for path in resource("policies").glob("*.kv") if not path.stem.endswith("_test"))


def shipped_policy(stem: str) -> Path | None:
    """The file of the one with this stem, or None."""
    return next((path for path in shipped_policies() if path.stem == stem), None)


@lru_cache(maxsize=1)
def stems_by_name() -> dict[str, str]:
    """`RoCo` -> `roco`, read from the files' `policy NAME` lines."""
    stems = {}
    for path in shipped_policies():
        head = _HEAD.search(path.read_text(encoding="utf-8"))
        if head:
            stems[head.group(1)] = path.stem
    return stems
