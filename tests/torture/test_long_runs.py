"""The attacks on long texts and many caches, at sizes of a test."""

from __future__ import annotations

import pytest
from torch import Tensor

from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.cpu.backend import CpuBackend
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.backend import TorchBackend
from scripts.torture import long_runs
from scripts.torture.registry import Attack
from tests.quick import few


@pytest.mark.parametrize(
    ("one", "count"),
    few([(long_runs.long_kernels, 2_000), (long_runs.dropped_caches, 16)], (long_runs.long_kernels, 2_000)),
    ids=["kernels", "caches"],
)
def test_nothing_grows_drifts_or_stays(one: Attack, count: int) -> None:
    counts = one.run(1, count, lambda: None)
    assert counts.tried and counts.survived == counts.tried, counts.notes


def test_a_column_that_drifts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_runs.Shadow, "drift", lambda shadow: 2 * long_runs.DRIFT)
    counts = long_runs.long_kernels.run(1, 1_000, lambda: None)
    assert (counts.tried, counts.survived) == (1, 0)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_runs, "STRETCH", 20)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("one", [long_runs.long_roco, long_runs.long_streaming], ids=lambda one: one.name)
def test_a_model_goes_on_and_on(one: Attack) -> None:
    counts = one.run(1, 40, lambda: None)
    assert (counts.tried, counts.survived) == (2, 2), counts.notes


class Wrong(TorchBackend):
    def decode(self, state: SlotState, call: AttentionCall) -> Tensor:
        return 2 * super().decode(state, call)


@pytest.mark.usefixtures("short")
def test_backends_that_say_different_things_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_runs, "TorchBackend", Wrong)
    counts = long_runs.long_streaming.run(1, 20, lambda: None)
    assert (counts.tried, counts.survived) == (1, 0)
    assert "logits of two backends differ" in counts.notes[0]


@pytest.mark.usefixtures("short")
def test_a_model_whose_columns_drift_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that the kernel leaves as they are: the shadow sees every token by itself."""
    decode = CpuBackend.decode

    def forgets(backend: CpuBackend, state: SlotState, call: AttentionCall) -> Tensor:
        before = state.columns.clone()
        out = decode(backend, state, call)
        state.columns.copy_(before)
        return out

    monkeypatch.setattr(CpuBackend, "decode", forgets)
    counts = long_runs.long_roco.run(1, 20, lambda: None)
    assert (counts.tried, counts.survived) == (1, 0), counts.notes
