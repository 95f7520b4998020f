"""The figures of a prompt, and how memory is measured."""

from __future__ import annotations

import math

import pytest
import torch

import kvdsl
from kvdsl_lab.bench import baselines, measure, prefill
from kvdsl_lab.bench.prefill import Shape
from tests.cli.harness import run

SHAPE = Shape(batch=1, kv_heads=2, group=2, head_dim=16, length=96, dtype="fp32")


def test_the_baselines_attend_alike() -> None:
    tensors = prefill.prompt(SHAPE, 0)
    out, sums = baselines.eager_prompt(*tensors)
    assert torch.allclose(out, baselines.sdpa_prompt(*tensors), atol=1e-5)
    assert torch.allclose(sums.sum(-1), torch.full((1, 4), 96.0))


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_figures(backend: str) -> None:
    found = prefill.bench_prefill(kvdsl.load("h2o", budget=16).spec, SHAPE, backend=backend, repeats=3, warmup=0)
    for key in ("ms", "sdpa_ms", "ratio", "eager_ms"):
        assert 0 < found[f"{key}_q1"] <= found[key] <= found[f"{key}_q3"]
    assert (found["backend"], found["length"], found["policy"]) == (backend, 96, "h2o")


def test_what_does_not_fit_is_null(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "free_memory", lambda: 2 * SHAPE.eager_bytes)
    found = prefill.bench_prefill(kvdsl.load("window", budget=16).spec, SHAPE, backend="torch", repeats=1, warmup=0)
    assert found["eager_ms"] is None and found["eager_peak_bytes"] is None
    assert found["ms"] > 0


def test_figures_follow_from_the_rounds() -> None:
    times = {"ours": [6.0, 4.0, 9.0], "sdpa": [3.0, 2.0, 3.0], "eager": [50.0, math.nan, math.nan]}
    found = prefill.figures(times, {"ours": 7, "sdpa": 5, "eager": 9})
    assert (found["ms"], found["sdpa_ms"], found["ratio"], found["eager_ms"]) == (6, 3, 2, 50)
    assert (found["peak_bytes"], found["sdpa_peak_bytes"], found["eager_peak_bytes"]) == (7, 5, 9)


@pytest.mark.skipif(measure.peak_bytes(lambda: None) is None, reason="the system does not tell how much memory was used")
def test_peaks_are_what_a_call_grows_by() -> None:
    megabytes = 64 << 20

    def run() -> torch.Tensor:
        torch.ones(2 * megabytes, dtype=torch.uint8)
        return torch.ones(megabytes, dtype=torch.uint8)

    assert 0.9 < (measure.peak_bytes(run) or 0) / (2 * megabytes) < 1.1


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "bench prefill --policy roco --length 64 --kv-heads 1 --group 2 --head-dim 16 --repeats 1 --warmup 0 --backend torch"
    )
    found = run(capsys, *words.split(), "--json", code=0).json()
    assert {"ms", "sdpa_ms", "ratio", "peak_bytes", "sdpa_peak_bytes", "eager_ms"} <= set(found)
    assert "the time of SDPA" in run(capsys, *words.split(), code=0).out
