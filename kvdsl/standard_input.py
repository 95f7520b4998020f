"""`-` on a command line: standard input, read once and cached. Library calls never read it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

DASH = "-"
_commands = 0
_read: bytes | None = None


@contextmanager
def of_a_command() -> Iterator[None]:
    """Make `-` mean standard input within this context."""
    global _commands, _read
    _commands, before, _read = _commands + 1, _read, None
    try:
        yield
    finally:
        _commands, _read = _commands - 1, before


def is_named(name: str) -> bool:
    """Return whether a name means standard input, as `-` does in a command."""
    return name == DASH and _commands > 0


def read() -> bytes:
    """Return all of standard input."""
    global _read
    if _read is None:
        _read = sys.stdin.buffer.read()
    return _read
