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


def policy_name(text: str) -> str | None:
    """The name that the first `policy NAME` line of a source gives."""
    head = _HEAD.search(text)
    return None if head is None else head[1]


@lru_cache(maxsize=1)
def stems_by_name() -> dict[str, str]:
    """`RoCo` -> `roco`, read from the files' `policy NAME` lines."""
    return {name: path.stem for path in shipped_policies() if (name := policy_name(path.read_text(encoding="utf-8")))}
