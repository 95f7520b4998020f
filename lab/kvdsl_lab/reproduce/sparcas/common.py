"""What SparCas' experiments share."""

from __future__ import annotations

from kvdsl_lab.reproduce.experiment import Setup

DIMS = 16
INTERVAL = 64


def attended(setup: Setup) -> int:
    """Tokens that a query attends to."""
    return setup.size(64, 16)
