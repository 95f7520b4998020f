"""How params are spelled inside generated code: as the user wrote them, unless something there has that name already."""

from __future__ import annotations

import re

_TAKEN = frozenset({"torch", "given", "Number", "Column", "Ring", "Tensor", "Given", "math_errhandling"})
_NUMBERS = frozenset({"capacity", "trigger", "slack", "max_drop", "floor", "select", "page", "page_after"})
_NUMBERS |= {"sketch_dims", "sketch_every", "prefill_block", "block", "chooser"}
_SIZE = "size_"
_LIKE_A_MACRO = re.compile(r"[A-Z][A-Z0-9_]+|[a-z]*_?errhandling|linux|unix|stdin|stdout|stderr")


def spelled(name: str) -> str:
    """The param's name in generated code; different names stay different."""
    plain = name.rstrip("_")
    taken = plain in _TAKEN | _NUMBERS or plain.startswith(_SIZE) or _LIKE_A_MACRO.fullmatch(plain)
    return name + "_" if taken else name


def size_of(ring: str) -> str:
    """The name of the number that is a ring's size."""
    return _SIZE + ring
