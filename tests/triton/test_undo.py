"""Steps of the Triton kernels can be taken back as those of any backend: they too place a token in the first free slot."""

from __future__ import annotations

import pytest

import kvdsl
from tests.runtime.test_undo import SHIPPED, check_taking_back

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("name", ["vatp_scissorhands", "lazy_streaming"])  # columns and rings; ranks and lengths
def test_what_was_taken_back_never_happened(name: str) -> None:
    check_taking_back(kvdsl.load(name).spec, SHIPPED[name], "triton", steps=3, backs=(1, 2), after=1)
