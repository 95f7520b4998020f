"""Positions and storage."""

from __future__ import annotations

from acceptance.registry import Measured, all_pass, criterion, tests


@criterion(
    6,
    "a decode step traces with torch.compile(fullgraph=True), no recompilation over 1,000 steps (text and compact positions)",
)
def _compiled() -> Measured:
    return all_pass(tests("tests/hf/test_compile.py", "thousand"), 4)
