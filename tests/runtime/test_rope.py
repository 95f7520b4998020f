"""Turning vectors to other positions, against complex numbers in float64."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from kvdsl.runtime.rope import Pairing, Rope

PAIRS = 4
FREQUENCIES = 100.0 ** -(torch.arange(PAIRS, dtype=torch.float64) / PAIRS)

PAIRINGS: list[Pairing] = ["half", "interleaved"]

PAIRED = {
    "half": [(i, i + PAIRS) for i in range(PAIRS)],
    "interleaved": [(2 * i, 2 * i + 1) for i in range(PAIRS)],
}


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def turned(x: Tensor, shift: Tensor, pairing: Pairing, offset: int) -> Tensor:
    """Every pair as a complex number times e^(i shift f), float64."""
    out = x.double().clone()
    for frequency, (a, b) in zip(FREQUENCIES, PAIRED[pairing], strict=True):
        found = torch.complex(x[..., offset + a].double(), x[..., offset + b].double())
        found = found * torch.polar(torch.ones_like(shift, dtype=torch.float64), shift * frequency)
        out[..., offset + a], out[..., offset + b] = found.real, found.imag
    return out


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("dim", "offset"), [(2 * PAIRS, 0), (2 * PAIRS + 6, 0), (2 * PAIRS + 6, 6), (2 * PAIRS + 6, 2)])
def test_every_pair_turns_by_its_frequency_and_nothing_else_changes(pairing: Pairing, dim: int, offset: int) -> None:
    x = vectors(3, 5, dim)
    shift = torch.randint(-700, 700, (3, 5), generator=torch.Generator().manual_seed(1))
    out = Rope(FREQUENCIES, pairing, offset).rotate(x, shift)
    assert out.shape == x.shape
    assert (out - turned(x, shift, pairing, offset)).abs().max() < 1e-6
    rest = [d for d in range(dim) if not offset <= d < offset + 2 * PAIRS]
    assert torch.equal(out[..., rest], x[..., rest])


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_no_shift_changes_no_bit(pairing: Pairing) -> None:
    x = vectors(7, 2 * PAIRS)
    assert torch.equal(Rope(FREQUENCIES, pairing).rotate(x, torch.zeros(7, dtype=torch.long)), x)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_far_shifts_are_as_exact_as_near_ones(pairing: Pairing) -> None:
    """An angle of 3e6 radians, of which float32 would only know the nearest quarter."""
    x, far = vectors(1, 2 * PAIRS), torch.tensor([3_000_001])
    assert (Rope(FREQUENCIES, pairing).rotate(x, far) - turned(x, far, pairing, 0)).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_result_is_float32_and_rounded_nowhere_else(dtype: torch.dtype) -> None:
    x, shift = vectors(7, 2 * PAIRS).to(dtype), torch.arange(7)
    out = Rope(FREQUENCIES, "half").rotate(x, shift)
    assert out.dtype == torch.float32
    assert (out - turned(x, shift, "half", 0)).abs().max() < 1e-6


def test_one_vector_at_several_positions() -> None:
    x, shift = vectors(2, 1, 2 * PAIRS + 2), torch.arange(-2, 3).to(torch.int32)
    rope = Rope(FREQUENCIES, "half", 2)
    assert torch.equal(rope.rotate(x, shift), rope.rotate(x.expand(2, 5, -1), shift.expand(2, 5)))


def test_a_copy_is_itself_and_nothing_can_be_changed() -> None:
    rope = Rope(FREQUENCIES, "half")
    assert copy.deepcopy({"rope": rope})["rope"] is rope
    with pytest.raises(dataclasses.FrozenInstanceError):
        rope.offset = 2  # type: ignore[misc]


def test_frequencies_move_to_the_device_of_the_vectors_once() -> None:
    rope = Rope(FREQUENCIES, "half")
    for _ in range(2):
        assert rope.rotate(torch.empty(3, 2 * PAIRS, device="meta"), torch.empty(3, device="meta")).device.type == "meta"
    assert rope.inv_freq.device.type == "cpu"
    first = rope.frequencies(torch.device("meta"))
    assert rope.frequencies(torch.device("meta")) is first


def test_it_traces_without_breaks() -> None:
    rope, x, shift = Rope(FREQUENCIES, "interleaved"), vectors(7, 2 * PAIRS), torch.arange(7)
    traced = torch.compile(rope.rotate, fullgraph=True, backend="eager")
    assert torch.equal(traced(x, shift), rope.rotate(x, shift))
