"""What the tests of the interpreter share."""

from __future__ import annotations

import pytest

from kvdsl.passes.columns import add_columns


@pytest.fixture(params=["history", "columns"])
def form(request: pytest.FixtureRequest) -> object:
    """A policy as it is written, or with its state columns: both mean the same."""
    return add_columns if request.param == "columns" else lambda policy: policy
