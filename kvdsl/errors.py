"""What kvdsl says when it cannot do what it was asked."""

from __future__ import annotations


class KvdslError(ValueError):
    """A request that kvdsl refuses; the message says what, where and what to do instead. Every error of kvdsl's own is one.

    What is wrong with a policy's source is a `kvdsl.DiagnosticError`, which lists the places.
    """
