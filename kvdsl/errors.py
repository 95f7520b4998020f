"""What the runtime says when it cannot do what it was asked."""

from __future__ import annotations


class KvdslError(ValueError):
    """A request that the runtime refuses; the message says what, where and what to do instead."""
