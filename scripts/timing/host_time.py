#!/usr/bin/env python
"""How long the host takes for a layer's launches on a GPU, without a GPU: its driver is a stub, which launches nothing.

Prepared: every token but the first, where nothing but tensors' addresses changes. Not: as Triton launches by itself. The least of many
runs, both kinds in turn; what a driver's own launch takes, a few microseconds each, is in neither.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

POLICIES = ("roco", "h2o", "streaming_llm", "sparcas")
ROUNDS, STEPS = 100, 10


def main() -> None:
    from kvdsl_lab.bench.decode import Shape
    from tests.triton.stub import served, stub_driver

    with pytest.MonkeyPatch.context() as patch:
        stub_driver(patch, lambda *_: None)
        for policy in POLICIES:
            server, state, calls = served(policy, Shape(batch=1, kv_heads=8, group=4, head_dim=128, live=1024, dtype="fp16"))
            plain, prepared = least((False, True), partial(server.decode, state, calls[0]), patch)
            print(f"{policy}: {prepared:.0f} µs a layer and token, {plain:.0f} unless prepared")


def least(kinds: Sequence[bool], step: Callable[[], object], patch: pytest.MonkeyPatch) -> list[float]:
    """Microseconds of a step, prepared or not, in turn."""
    from kvdsl.runtime.gpu import backend

    best = [float("inf")] * len(kinds)
    for _ in range(ROUNDS):
        for n, kind in enumerate(kinds):
            patch.setattr(backend, "interpreted", lambda kind=kind: not kind)
            backend._prepared.clear()
            step()
            begun = time.perf_counter()
            for _ in range(STEPS):
                step()
            best[n] = min(best[n], (time.perf_counter() - begun) / STEPS * 1e6)
    return best


if __name__ == "__main__":
    main()
