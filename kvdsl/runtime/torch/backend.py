"""The torch backend: runs on any device that torch supports.

The generated `kernels_torch.py` has these functions if the policy needs them:
    observe(row: View, columns: Columns): update the state columns by a block of queries.
    fold(row: View), prune(slots: View) -> dict[str, Tensor]: new values of columns with these rules.
    place(new: NewTokens): compute the columns of new tokens, see `kvdsl.runtime.torch.tokens`.
    score(slots: View) -> Tensor, protect(slots: View, keep: Protection, numbers): rank and protect slots.
    counts_protected(numbers): the most tokens that each `keep` line protects, if they may exceed the budget and the host knows them.
    weigh(slots: View) -> Tensor: the worth of a layer when layers share a budget.
    select(row: View) -> Tensor: a rank of slots for a decoded token, highest first.
    weight(row: View) -> Tensor: how many times each selected slot counts.
    sketch(row: View) -> Tensor: a rank of dims, [batch, kv_heads, 1, 1, dim], highest first.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.lifetimes import plain_tensors
from kvdsl.runtime.state import copies
from kvdsl.runtime.state.order import FREE, free
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch import columns, eviction, selection
from kvdsl.runtime.torch.attention import bias_of, distances, scores, softmax, turned_keys, turned_queries
from kvdsl.runtime.torch.columns import INITIAL
from kvdsl.runtime.torch.prefill import prefill
from kvdsl.runtime.torch.tokens import check_count, check_live, check_text, new_positions, place
from kvdsl.runtime.torch.view import View, row_view


class TorchBackend:
    """Attention, statistics and eviction by torch operations."""

    name = "torch"
    served = ""

    def prefill(self, state: SlotState, call: AttentionCall) -> Tensor:
        out = prefill(state, call)
        copies.keep_halves(state, call.rope)
        return out

    def decode(self, state: SlotState, call: AttentionCall) -> Tensor:
        """Serve new tokens one by one: place, attend, observe, settle. Returns [batch, tokens, query_heads, value_dim].

        Raises:
            KvdslError: for several tokens if the layers must agree after every token.
        """
        with plain_tensors():
            return self.steps(state, call)

    def steps(self, state: SlotState, call: AttentionCall) -> Tensor:
        """Decode in a form that `torch.compile` can trace."""
        tokens = call.query.shape[2]
        check_agreement(state, tokens)
        state.make_room(tokens)
        state.forget_copies(halves=False)
        copies.keep_halves(state, call.rope)
        steps = [_decode_one(state, one) for one in one_by_one(call)]
        return torch.cat(steps, dim=1)

    def replace(self, state: SlotState, slots: Tensor, call: AttentionCall) -> None:
        """Replace the tokens in these slots by new ones, one for one, as when E tokens are evicted and E inserted (EQUIP, appendix D.5).

        Nothing else changes, and no query attends. Columns start as for new tokens. Means and moving averages count queries by age: for
        them, the new tokens' own queries count as 0. Padding tokens replace nothing.

        Args:
            slots: int32 or int64 [batch, kv_heads, tokens], distinct live slots.
            call: the new keys and values; the query is ignored.

        Raises:
            KvdslError: if the numbers of slots and new tokens differ, or a slot is free or occurs twice. Nothing is changed then.
        """
        check_text(state)
        check_count(slots, call)
        check_live(state, slots)
        state.forget_copies(halves=False)
        copies.keep_halves(state, call.rope)
        real = new_positions(state, call) >= 0
        leaving = torch.zeros_like(state.position, dtype=torch.bool)
        leaving.scatter_(2, slots.long(), real[:, None].expand_as(slots))
        free(state.position, state.rank if state.spec.compact else None, leaving)
        for t, one in enumerate(one_by_one(call)):
            new_position, slot = new_positions(state, one), slots[..., t : t + 1].long()
            one = _overwrite(state, one, slot, new_position, new_position >= 0)
            _start_averages(state, slot, new_position >= 0)
            _place_in(state, one, slot, new_position >= 0)
            state.seen += new_position[:, 0] >= 0


# -- one token ---------------------------------------------------------------------------------------------------------


def check_agreement(state: SlotState, tokens: int) -> None:
    """Raise KvdslError if several tokens come at once and layers must agree on the victims after each."""
    if tokens > 1 and state.spec.victims == "layers":
        raise KvdslError(
            f"{state.spec.name} evicts what all layers agree on, token by token, but {tokens} tokens came in one forward "
            f"after the first was generated: pass them one by one"
        )


def one_by_one(call: AttentionCall) -> Iterator[AttentionCall]:
    """Return a call for each token."""
    return (call.part(slice(t, t + 1)) for t in range(call.query.shape[2]))


def _decode_one(state: SlotState, call: AttentionCall) -> Tensor:
    state.scaling, state.rope = call.scaling, call.rope
    new_position = new_positions(state, call)
    real = new_position >= 0
    if state.spec.hard_cap:
        eviction.make_room(eviction.held_in_slots(state, real[:, 0]))
    slot = (state.position == FREE).int().argmax(-1, keepdim=True)  # the first free one, int64 [batch, kv_heads, 1]
    call = _overwrite(state, call, slot, new_position, real)
    _place_in(state, call, slot, real)
    state.seen += real[:, 0]
    held = eviction.held_in_slots(state, real[:, 0])
    row = row_view(state, held.kept, call.query, new_position, state.numbers)
    if state.spec.sketches:
        selection.refresh(state, row, real[:, 0])
    attended = selection.attended(state, row)
    weight = selection.weight(state, row) if state.spec.weighs and state.selects else None
    out = _attend(state, call, row, held.kept, attended, weight)
    if state.spec.reads_attention and not state.spec.forgets:
        columns.observe(row, state.spec)
    eviction.settle(held, then=partial(state.layout.settled, state.position))
    return out.masked_fill(~real[:, :, None, None], 0)


def _overwrite(state: SlotState, call: AttentionCall, slot: Tensor, new_position: Tensor, real: Tensor) -> AttentionCall:
    """Write the new token into its slot; padding writes nothing. Returns the call with key and value as stored."""
    rows = state.format.rows(call.key, call.value)
    state.layout.write(slot, *rows, real)
    if state.spec.rope_cached and call.rope is not None:
        at, new = slot[..., None].expand(-1, -1, -1, state.half_keys.shape[-1]), call.rope.rotate_half(call.key)
        state.half_keys.scatter_(2, at, torch.where(real[:, None, :, None], new, state.half_keys.gather(2, at)))
    if state.spec.compact:
        last = (state.position >= 0).sum(-1, keepdim=True, dtype=torch.int32)
        state.rank.scatter_(2, slot, torch.where(real[:, None], last, state.rank.gather(2, slot)))
    position = new_position[:, None].expand_as(slot)
    state.position.scatter_(2, slot, torch.where(real[:, None], position, state.position.gather(2, slot)))
    for column, rule in zip(state.columns, state.spec.column_rules, strict=False):  # rings need no initial value
        column.scatter_(2, slot, torch.where(real[:, None], INITIAL[rule], column.gather(2, slot)))
    return call._replace(key=state.format.keys(rows[0]), value=state.format.values(rows[1]))


def _start_averages(state: SlotState, slot: Tensor, real: Tensor) -> None:
    """Start moving averages at 0, as if the token's own query had given 0."""
    for column, rule in zip(state.columns, state.spec.column_rules, strict=False):
        if rule == "ema":
            column.scatter_(2, slot, torch.where(real[:, None], 0.0, column.gather(2, slot)))


def _place_in(state: SlotState, call: AttentionCall, slot: Tensor, real: Tensor) -> None:
    """Compute the columns of one new token per KV head in its slot, int64 [batch, kv_heads, 1]. Padding changes nothing."""
    single = state.columns[: len(state.spec.columns)]
    index = slot[None].expand(len(single), -1, -1, -1)
    old = single.gather(3, index)
    new = old.clone()
    place(state, call, new)
    single.scatter_(3, index, torch.where(real[:, None], new, old))


# -- attention ---------------------------------------------------------------------------------------------------------


def _attend(
    state: SlotState, call: AttentionCall, row: View, kept: dict[str, Tensor], attended: Tensor, weight: Tensor | None = None
) -> Tensor:
    """Attend over the slots for a block of queries, and set the row's `attn` and `logit` if the policy reads attention.

    Args:
        kept: the contents of the slots.
        attended: bool [batch, kv_heads, group or 1, queries, slots], which slots take part.
        weight: how many times each counts, of the same shape; None for once.

    Returns:
        [batch, queries, query_heads, value_dim]; arbitrary for padding.
    """
    assert row.query is not None
    bias = None
    if call.slopes is not None:
        bias = bias_of(call, slice(None), distances(state, kept, row.live, row.query_position))
    query = turned_queries(state, call, row.query, row.live, row.query_position)
    logit = scores(call, query, turned_keys(state, call, kept), bias)
    weighed = logit
    if weight is not None:
        attended = attended & (weight > 0) & weight.isfinite()
        weighed = logit + weight.log()
    prob = softmax(weighed.masked_fill(~attended, -torch.inf), call.sinks)
    prob = prob.masked_fill(~attended, 0.0)  # also where softmax is NaN because nothing is attended
    # Unattended slots may hold infinities, and 0 * inf is NaN.
    value = row.value.float().unsqueeze(2).masked_fill(~attended.any(3)[..., None], 0.0)
    if state.spec.reads_attention:
        row.attn, row.logit = row.over_group(prob), row.over_group(logit)
    if value.shape[2] == 1:
        out = torch.einsum("bhgqs,bhsd->bqhgd", prob, value.squeeze(2))
    else:
        out = torch.einsum("bhgqs,bhgsd->bqhgd", prob, value)
    return out.flatten(2, 3).to(call.query.dtype)
