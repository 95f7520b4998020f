"""`-` in a command line: what comes on standard input, read once, however often the command asks for it. No library call reads it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

DASH = "-"
_commands = 0
_read: bytes | None = None


@contextmanager
def of_a_command() -> Iterator[None]:
    """Within this, `-` is standard input."""
    global _commands, _read
    _commands, before, _read = _commands + 1, _read, None
    try:
        yield
    finally:
        _commands, _read = _commands - 1, before


def is_named(name: str) -> bool:
    """Whether a name means standard input: in a command `-` does."""
    return name == DASH and _commands > 0


def read() -> bytes:
    """All of it."""
    global _read
    if _read is None:
        _read = sys.stdin.buffer.read()
    return _read
