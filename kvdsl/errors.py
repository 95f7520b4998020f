"""Errors, and warnings at the user's own line."""

from __future__ import annotations

import sys
import warnings


class KvdslError(ValueError):
    """A request that kvdsl refuses; the message says what, where and what to do instead. The base of all kvdsl's errors.

    Errors in a policy's source are `kvdsl.DiagnosticError`, which lists the places.
    """


_INNER = {"kvdsl", "torch", "transformers"}


def warn(message: str) -> None:
    """Issue a UserWarning at the innermost line outside kvdsl, torch and transformers."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _inner(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    names = frame.f_globals
    warnings.warn_explicit(
        message, UserWarning, frame.f_code.co_filename, frame.f_lineno,
        module=names.get("__name__", "?"), registry=names.setdefault("__warningregistry__", {}),
    )  # fmt: skip


def _inner(module: str) -> bool:
    return module.partition(".")[0] in _INNER or module.startswith(("_kvdsl_", "kvdsl_"))
