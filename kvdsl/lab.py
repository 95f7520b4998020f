"""The only module that imports the laboratory, kvdsl-lab: evaluations, benchmarks, papers, the reference model and the books.

It is a separate package (`lab/` in the repository), imported on first use.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from kvdsl.errors import KvdslError

PACKAGE = "kvdsl_lab"
COMMANDS = ("calibrate", "trace", "bench", "eval", "leaderboard", "recommend", "search", "reproduce")
"""The laboratory's commands, to tell them from misspelt ones if it is not installed."""
INSTALL = "pip install 'kvdsl[lab]' (in a clone: pip install ./lab)"


def lab(module: str, what: str) -> ModuleType:
    """Import a module of the laboratory.

    Args:
        what: what is needed from it, for the message.

    Raises:
        KvdslError: if the laboratory is not installed; in one line, with what to do.
    """
    try:
        return importlib.import_module(f"{PACKAGE}.{module}")
    except ModuleNotFoundError as error:
        if error.name != PACKAGE:
            raise
        raise KvdslError(f"{what} is part of kvdsl-lab, which is not installed: {INSTALL}") from error
