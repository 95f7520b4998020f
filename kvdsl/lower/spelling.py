"""How params are spelled inside generated code: as the user wrote them, unless something there has that name already."""

from __future__ import annotations

import re

_TAKEN = frozenset({"torch", "given", "capacity", "trigger", "slack", "max_drop", "Number", "Column", "math_errhandling"})
_LIKE_A_MACRO = re.compile(r"[A-Z][A-Z0-9_]+|[a-z]*_?errhandling|linux|unix|stdin|stdout|stderr")


def spelled(name: str) -> str:
    """The param's name in generated code; different names stay different."""
    plain = name.rstrip("_")
    return name + "_" if plain in _TAKEN or _LIKE_A_MACRO.fullmatch(plain) else name
