"""The selection of slots for a decoded token, and the sketch of dims by which some policies select."""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.state.shared import choices_of
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch import pages
from kvdsl.runtime.torch.settle import Places, grade
from kvdsl.runtime.torch.view import View, slots_view

_LOWEST, _HIGHEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


def attended(state: SlotState, row: View) -> Tensor:
    """Return the slots to which the token attends: bool [batch, kv_heads, group or 1, 1, slots].

    A layer may also select for other layers, or reuse another layer's selection.

    Args:
        row: the token's query, not yet observed in the state columns.
    """
    seen = row.visible.mask.unsqueeze(2)
    if state.choices is None:
        return selected(state, row).unsqueeze(3) if state.selects else seen
    if state.choices.chooser != state.layer:
        assert row.query is not None
        return (
            state.choices.take(state.layer, state.position, choices_of(state.spec.group, row.query.shape[2])).unsqueeze(3)
            & seen
        )
    state.choices.make(selected(state, row))
    return seen


def selected(state: SlotState, row: View) -> Tensor:
    """Select slots: bool [batch, kv_heads, choices, slots].

    There is one choice per KV head, or one per query head under `group each`. The first and last tokens that the policy keeps are always
    selected and count; the others rank by the policy's `select`.

    Args:
        row: the token's query, not yet observed in the state columns.
    """
    kept = state.in_slots()
    numbers, position = state.settings.per_head(state.numbers), state.position
    places, seen = Places(position), row.visible.mask
    slots = slots_view(state, kept, row.query_position[:, 0, 0, 0], state.numbers)
    state.spec.torch_kernels.protect(slots, places, numbers)
    assert row.query is not None
    each = (*position.shape[:2], choices_of(state.spec.group, row.query.shape[2]), position.shape[2])
    by, count = _by_choice(state.spec.torch_kernels.select(row)).expand(each), numbers["select"].unsqueeze(2)
    if state.spec.counts:
        found = _by_choice(state.spec.torch_kernels.count(row))
        count = torch.where(found >= 1, found.floor(), 1.0)
    protected = places.mask.unsqueeze(2)
    if "page" not in numbers:
        return _top(_keys(by, position.unsqueeze(2), seen, protected), count) & seen
    page = pages.page_of(position, numbers)
    index = pages.numbered(page).unsqueeze(2).expand(each)  # numbers from 0: pages before the first are negative
    best = torch.full_like(index, _LOWEST).scatter_reduce(
        -1, index, _keys(by, index, seen, protected), "amax", include_self=False
    )
    chosen = _top(best, (count / numbers["page"].unsqueeze(2)).floor())
    return chosen.gather(-1, index) & seen


def weight(state: SlotState, row: View) -> Tensor:
    """Return how many times each slot counts, float32 [batch, kv_heads, choices, 1, slots]."""
    found = torch.as_tensor(state.spec.torch_kernels.weight(row), dtype=torch.float32, device=row.k.device)
    return found if found.dim() == 5 or found.dim() == 0 else found.unsqueeze(2)


def _by_choice(found: Tensor) -> Tensor:
    """Drop the query axis: [batch, kv_heads, choices, slots or 1]."""
    return found.squeeze(3) if found.dim() == 5 else found


def _keys(by: Tensor, tie: Tensor, seen: Tensor, protected: Tensor) -> Tensor:
    """Return sort keys of slots: protected ones highest, unseen ones lowest."""
    keys = torch.where(protected, _HIGHEST, grade(by, tie))
    return torch.where(seen, keys, _LOWEST)


def _top(keys: Tensor, count: Tensor) -> Tensor:
    """Return the `count` highest slots, at least one, and all protected ones."""
    places = keys.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return (places < count.clamp(min=1)) | (keys == _HIGHEST)


# -- sketches ----------------------------------------------------------------------------------------------------------


def sketch_width(state: SlotState, numbers: Tensor, key_dim: int) -> int:
    """Return the largest sketch size in the batch.

    Raises:
        KvdslError: if keys have fewer dims.
    """
    width = float(state.settings.table(numbers).named["sketch_dims"].max())
    if width > key_dim:
        raise KvdslError(f"{state.spec.name} sketches {width:g} dims, but keys have {key_dim}; sketch fewer")
    return int(width)


def sketched(state: SlotState, row: View, numbers: Tensor, width: int) -> Tensor:
    """Return the dims that the policy's sketch ranks highest, ascending: int32 [batch, kv_heads, width], padded with -1.

    Args:
        row: one query per row.
    """
    batch, heads, _, _, dim = row.k.shape
    by = state.spec.torch_kernels.sketch(row).expand(batch, heads, 1, 1, dim)[:, :, 0, 0]
    dims = torch.arange(dim, device=by.device)
    places = grade(by, dim - 1 - dims).argsort(dim=-1, descending=True).argsort(-1)  # the lower dim wins ties
    count = state.settings.per_head(numbers)["sketch_dims"]
    found = torch.where(places < count, dims, dim).sort(-1).values[..., :width]
    return torch.where(found < dim, found, -1).int()


def refresh(state: SlotState, row: View, real: Tensor) -> None:
    """Choose the sketch again in rows (bool [batch]) whose token is the first, or at a multiple of `every` after the prompt."""
    every = state.settings.of_rows(state.numbers, "sketch_every").long()
    due = real & ((state.seen == 1) | ((state.seen - state.prompt) % every == 0))
    found = sketched(state, row, state.numbers, state.sketch.shape[-1])
    state.sketch.copy_(torch.where(due.view(-1, 1, 1), found, state.sketch))
