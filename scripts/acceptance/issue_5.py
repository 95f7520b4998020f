"""The Triton backend, as far as it cannot be judged without a GPU."""

from __future__ import annotations

from acceptance.registry import Measured, NotMeasured, criterion


@criterion(5, "on an H200: bytes over time, SDPA's flash decoding, a decode step in one CUDA graph")
def _gpu() -> Measured:
    raise NotMeasured("needs a GPU: `make gpu` there")
