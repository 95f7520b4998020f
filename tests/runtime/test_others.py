"""Slots that are compared with each other in torch, block by block, against loops."""

from dataclasses import fields
from typing import Any

import pytest
import torch

from kvdsl.runtime.torch import view
from kvdsl.runtime.torch.view import View

BATCH, HEADS, SLOTS, DIM = 2, 3, 9, 4


@pytest.fixture
def slots() -> View:
    """Live slots, with two free ones that hold what is no number."""
    drawn = torch.Generator().manual_seed(3)
    key = torch.randn(BATCH, HEADS, SLOTS, DIM, generator=drawn)
    position = torch.stack([torch.randperm(SLOTS, generator=drawn) for _ in range(BATCH * HEADS)]).view(
        BATCH, HEADS, 1, SLOTS
    )
    visible = torch.ones(BATCH, HEADS, 1, SLOTS, dtype=torch.bool)
    visible[0, 1, 0, 4] = visible[1, :, 0, 0] = False
    key = torch.where(visible.transpose(2, 3), key, torch.nan)
    given: dict[str, Any] = dict.fromkeys(field.name for field in fields(View) if field.init)
    given |= {"visible": visible, "slot_position": position, "key": key, "value": key, "group": "mean"}
    return View(**given)


@pytest.mark.parametrize("entries", [1, 4 * BATCH * HEADS * SLOTS, 1 << 22])
def test_blocks(slots: View, monkeypatch: pytest.MonkeyPatch, entries: int) -> None:
    monkeypatch.setattr(view, "_ENTRIES", entries)
    k, at = slots.k, slots.position
    products = slots.over_others("sum", lambda own, other: slots.product(own[0], other[0]), [k], [k])
    nearest = slots.over_others(
        "min", lambda own, other: (own[0] - other[0]).square().sum(-1) + own[1] * 0, [k, at], [k], vectors=True
    )
    vectors = slots.over_others("mean", lambda own, other: own[0] - other[0], [k], [k], dims=True, vectors=True)
    assert products.shape == nearest.shape == (BATCH, HEADS, 1, SLOTS)
    assert vectors.shape == (BATCH, HEADS, 1, SLOTS, DIM)
    for row in range(BATCH):
        for head in range(HEADS):
            live, keys = slots.visible[row, head, 0], slots.key[row, head]
            for slot in live.nonzero().flatten().tolist():
                others = keys[[other for other in live.nonzero().flatten().tolist() if other != slot]]
                own = keys[slot]
                torch.testing.assert_close(products[row, head, 0, slot], (others @ own).sum())
                torch.testing.assert_close(nearest[row, head, 0, slot], (others - own).square().sum(-1).min())
                torch.testing.assert_close(vectors[row, head, 0, slot], (own - others).mean(0))


def test_the_only_slot(slots: View) -> None:
    slots.visible = slots.visible & (torch.arange(SLOTS) == 2)
    found = {
        op: slots.over_others(op, lambda own, other: other[0], [], [slots.position]) for op in ("sum", "max", "min", "mean")
    }
    expected = {"sum": 0.0, "max": -torch.inf, "min": torch.inf, "mean": torch.nan}
    for op, value in found.items():
        torch.testing.assert_close(value[..., 2], torch.full((BATCH, HEADS, 1), expected[op]), equal_nan=True)
