"""The torch backend: runs anywhere that torch does, and serves the prompt for every backend.

A generated `kernels_torch.py` holds a policy's expressions:
    observe(row: View, columns: Columns): fold a block of queries into the state columns.
    place(new: View, columns: Columns): the columns that a token has by itself.
    score(slots: View) -> Tensor, protect(slots: View, keep: Protection, numbers): who leaves and who may not.
Everything else, the same for all policies, is here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kvdsl.runtime.settle import Protection, eviction_order, overflow
from kvdsl.runtime.slots import FREE, SLOT_DIM, AttentionCall, SlotState
from kvdsl.runtime.view import INITIAL, Columns, View

_BLOCK_BYTES = 64 << 20
"""What one block of prompt queries may spend on probabilities."""


class TorchBackend:
    """Attention, statistics and eviction by torch operations."""

    name = "torch"

    def prefill(self, state: SlotState, call: AttentionCall) -> Tensor:
        """Attend over what is cached and the new tokens, causally; observe every query; settle once.

        Returns:
            [batch, tokens, query_heads, value_dim].
        """
        return prefill(state, call)

    def decode(self, state: SlotState, call: AttentionCall) -> Tensor:
        """The new tokens one by one: place, attend, observe, settle."""
        state.make_room(call.query.shape[2])
        steps = [_decode_one(state, one) for one in _one_by_one(call)]
        return torch.cat(steps, dim=1)


# -- the prompt --------------------------------------------------------------------------------------------------------


def prefill(state: SlotState, call: AttentionCall) -> Tensor:
    """See `TorchBackend.prefill`."""
    new_position, real = _new_positions(state, call)
    kept = _everything(state, call, new_position)
    seen = _seen_before(state, call) + real.sum(1, dtype=torch.int32)
    numbers = state.resolve(seen)
    out = torch.cat(list(_attend_blocks(state, call, kept, new_position, numbers)), dim=1)
    if state.bounded:
        _drop(state, kept, numbers, call.window, real.any(1))
    state.store(kept, seen, numbers)
    return out.masked_fill(~real[:, :, None, None], 0)


def _seen_before(state: SlotState, call: AttentionCall) -> Tensor:
    if state.allocated:
        return state.seen
    return torch.zeros(call.key.shape[0], dtype=torch.int32, device=call.key.device)


def _new_positions(state: SlotState, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Positions of the new tokens in their rows' texts, int32 [batch, tokens], FREE for padding; and which are real."""
    batch, _, tokens, _ = call.key.shape
    real = call.real
    if real is None:
        real = torch.ones(batch, tokens, dtype=torch.bool, device=call.key.device)
    position = _seen_before(state, call)[:, None] + real.cumsum(1, dtype=torch.int32) - 1
    return position.masked_fill(~real, FREE).int(), real


def _everything(state: SlotState, call: AttentionCall, new_position: Tensor) -> dict[str, Tensor]:
    """The cached slots and, behind them, a slot for every new token."""
    batch, heads, tokens, _ = call.key.shape
    position = new_position[:, None].expand(batch, heads, tokens)
    columns = call.key.new_empty(len(state.spec.columns), batch, heads, tokens, dtype=torch.float32)
    for index, rule in enumerate(state.spec.column_rules):
        columns[index] = INITIAL[rule]
    new = {"keys": call.key, "values": call.value, "position": position, "columns": columns}
    if not state.allocated:
        kept = {name: tensor.contiguous() for name, tensor in new.items()}
    else:
        kept = {name: torch.cat([getattr(state, name), tensor], SLOT_DIM[name]) for name, tensor in new.items()}
    _place(state, call, kept["columns"][..., -tokens:])
    return kept


def _attend_blocks(
    state: SlotState, call: AttentionCall, kept: dict[str, Tensor], new_position: Tensor, numbers: Tensor
) -> Iterator[Tensor]:
    """Outputs of blocks of queries, [batch, block, query_heads, value_dim] each; the columns are folded in passing."""
    batch, query_heads, tokens, _ = call.query.shape
    slots = kept["position"].shape[2]
    block = max(1, min(tokens, _BLOCK_BYTES // (4 * batch * query_heads * slots)))
    if not kept["values"].isfinite().all():
        block = 1  # a query must not meet what it does not see: 0 * inf is no 0
    for start in range(0, tokens, block):
        part = slice(start, start + block)
        out, row = _attend(state, call, kept, call.query[:, :, part], new_position[:, part], numbers)
        if state.spec.columns:
            state.spec.torch_kernels.observe(row, Columns(row.columns, row.visible))
        yield out


def _drop(state: SlotState, kept: dict[str, Tensor], numbers: Tensor, window: int | None, rows: Tensor) -> None:
    """Evict from `kept` in place, in the rows (bool [batch]) that have a new token: the victims' positions become FREE.

    Everything is computed at every settle, due or not: asking would wait for the device.
    """
    named = state.named(numbers)
    per_row = {name: value.view(-1, 1, 1) for name, value in named.items()}
    leaving = overflow((kept["position"] >= 0).sum(-1, keepdim=True), per_row) * rows.view(-1, 1, 1)
    newest = kept["position"].amax((1, 2))[:, None]
    slots = _view(state, window, kept, newest, (kept["position"] >= 0).unsqueeze(2), named)
    protection = Protection(kept["position"])
    state.spec.torch_kernels.protect(slots, protection, per_row)
    order = eviction_order(state.spec.torch_kernels.score(slots), protection)
    kept["position"].masked_fill_(order < leaving, FREE)


# -- one token ---------------------------------------------------------------------------------------------------------


def _one_by_one(call: AttentionCall) -> Iterator[AttentionCall]:
    for t in range(call.query.shape[2]):
        at = slice(t, t + 1)
        real = None if call.real is None else call.real[:, at]
        yield AttentionCall(
            call.query[:, :, at], call.key[:, :, at], call.value[:, :, at], real,
            call.scaling, call.softcap, call.window, call.sinks,
        )  # fmt: skip


def _decode_one(state: SlotState, call: AttentionCall) -> Tensor:
    new_position, real = _new_positions(state, call)
    kept = {name: getattr(state, name) for name in SLOT_DIM}
    slot = _free_slot(state)
    _overwrite(state, call, slot, new_position, real)
    _place_in(state, call, slot, real)
    state.seen += real[:, 0]
    out, row = _attend(state, call, kept, call.query, new_position, state.numbers)
    if state.spec.columns:
        row.visible &= real[:, None, :, None]
        state.spec.torch_kernels.observe(row, Columns(row.columns, row.visible))
    if state.bounded:
        _drop(state, kept, state.numbers, call.window, real[:, 0])
    return out.masked_fill(~real[:, :, None, None], 0)


def _free_slot(state: SlotState) -> Tensor:
    """The first free slot of every KV head, int64 [batch, kv_heads, 1]."""
    return (state.position == FREE).int().argmax(-1, keepdim=True)


def _overwrite(state: SlotState, call: AttentionCall, slot: Tensor, new_position: Tensor, real: Tensor) -> None:
    """Write the new token into its slot; a padding token leaves everything as it was."""
    keep_old = ~real[:, None, :, None]
    for tensor, new in ((state.keys, call.key), (state.values, call.value)):
        at = slot[..., None].expand(-1, -1, -1, tensor.shape[-1])
        tensor.scatter_(2, at, torch.where(keep_old, tensor.gather(2, at), new))
    position = new_position[:, None].expand_as(slot)
    state.position.scatter_(2, slot, torch.where(real[:, None], position, state.position.gather(2, slot)))
    for column, rule in zip(state.columns, state.spec.column_rules, strict=True):
        column.scatter_(2, slot, torch.where(real[:, None], INITIAL[rule], column.gather(2, slot)))


def _place_in(state: SlotState, call: AttentionCall, slot: Tensor, real: Tensor) -> None:
    """`_place` for one new token per KV head, in its slot, int64 [batch, kv_heads, 1]; padding leaves everything as it was."""
    index = slot[None].expand(len(state.columns), -1, -1, -1)
    old = state.columns.gather(3, index)
    new = old.clone()
    _place(state, call, new)
    state.columns.scatter_(3, index, torch.where(real[:, None], new, old))


def _place(state: SlotState, call: AttentionCall, columns: Tensor) -> None:
    """Compute the columns that the new tokens have by themselves, [len(spec.columns), batch, kv_heads, tokens]."""
    if "token" not in state.spec.column_rules:
        return
    named = dict(zip(state.spec.columns, columns, strict=True))
    nothing = columns.new_zeros(1, 1, 1, 1)  # such a column reads keys and values only
    view = View(
        visible=nothing.bool(), position=nothing, newest=nothing, live=nothing, window=None, numbers={}, columns=named,
        key=call.key, value=call.value, group=state.spec.group, random_key=(0, 0, 0),
    )  # fmt: skip
    state.spec.torch_kernels.place(view, Columns(named, view.visible))


# -- attention ---------------------------------------------------------------------------------------------------------


def _attend(
    state: SlotState, call: AttentionCall, kept: dict[str, Tensor], query: Tensor, query_position: Tensor, numbers: Tensor
) -> tuple[Tensor, View]:
    """Attention of a block of queries over the slots.

    Args:
        query: [batch, query_heads, queries, key_dim].
        query_position: int32 [batch, queries], FREE for padding (whose output is meaningless).

    Returns:
        The output, [batch, queries, query_heads, value_dim], and what the policy may observe.
    """
    heads = kept["position"].shape[1]
    grouped = query.unflatten(1, (heads, query.shape[1] // heads))
    visible = visible_slots(kept["position"], query_position, call.window)
    logit = torch.einsum("bhgqd,bhsd->bhgqs", grouped.float(), kept["keys"].float()) * call.scaling
    if call.softcap is not None:
        logit = call.softcap * torch.tanh(logit / call.softcap)
    prob = _softmax(logit.masked_fill(~visible.unsqueeze(2), -torch.inf), call.sinks)
    prob = prob.masked_fill(~visible.any(-1)[:, :, None, :, None], 0.0)  # padding sees nothing
    # A slot that no query sees may hold anything, infinities included; it must not meet a probability of zero.
    value = kept["values"].float().masked_fill(~visible.any(2)[..., None], 0.0)
    out = torch.einsum("bhgqs,bhsd->bqhgd", prob, value).flatten(2, 3).to(query.dtype)
    view = _view(state, call.window, kept, query_position, visible, state.named(numbers))
    if state.spec.reads_attention:
        view.query, view.attn, view.logit = grouped, view.over_group(prob), view.over_group(logit)
    return out, view


def visible_slots(position: Tensor, query_position: Tensor, window: int | None) -> Tensor:
    """Bool [batch, kv_heads, queries, slots]: a query sees the tokens up to its own, at most `window` back."""
    age = query_position[:, None, :, None] - position[:, :, None, :]
    visible = (position[:, :, None, :] >= 0) & (age >= 0)
    return visible if window is None else visible & (age < window)


def _softmax(logit: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the slots, [batch, kv_heads, group, queries, slots]."""
    if sinks is not None:
        batch, heads, group, queries, _ = logit.shape
        sink = sinks.float().view(1, heads, group, 1, 1).expand(batch, heads, group, queries, 1)
        return torch.cat([logit, sink], -1).softmax(-1)[..., :-1]
    return logit.softmax(-1)


def _view(
    state: SlotState, window: int | None, kept: dict[str, Tensor], query_position: Tensor, visible: Tensor,
    named: dict[str, Tensor],
) -> View:  # fmt: skip
    age = query_position[:, None, :, None] - kept["position"][:, :, None, :]
    placed = (kept["position"][:, :, None, :] >= 0) & (age >= 0)
    return View(
        visible=visible & (query_position >= 0)[:, None, :, None],
        position=kept["position"].unsqueeze(2).float(),
        newest=query_position[:, None, :, None].float(),
        live=placed.sum(-1, keepdim=True).float(),
        window=window,
        numbers={name: value.float().view(-1, 1, 1, 1) for name, value in named.items()},
        columns=dict(zip(state.spec.columns, kept["columns"], strict=True)),
        key=kept["keys"], value=kept["values"],
        group=state.spec.group, random_key=(state.seed, state.layer, state.head_offset),
    )  # fmt: skip
