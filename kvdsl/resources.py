"""Finds the files that belong to kvdsl but are no Python: the grammar, the templates, the shipped policies.

In a wheel they lie in `kvdsl/_data/`; an editable install and a plain checkout read them from the repository's root.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_ROOTS = (_PACKAGE / "_data", _PACKAGE.parent)


def resource(*parts: str) -> Path:
    """The path of a file or folder such as `resource("grammar", "kv.lark")`."""
    for root in _ROOTS:
        path = root.joinpath(*parts)
        if path.exists():
            return path
    raise FileNotFoundError(f"kvdsl is not installed properly: {'/'.join(parts)} is missing")


def read_resource(*parts: str) -> str:
    """The text of a file."""
    return resource(*parts).read_text(encoding="utf-8")
