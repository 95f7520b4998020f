"""The torch backend: runs anywhere that torch does, and serves the prompt for every backend.

A generated `kernels_torch.py` holds a policy's expressions, as far as it has them:
    observe(row: View, columns: Columns): fold a block of queries into the state columns.
    place(new: View, columns: Columns): the columns that a token has by itself.
    score(slots: View) -> Tensor, protect(slots: View, keep: Protection, numbers): who leaves and who may not.
    select(row: View) -> Tensor: what a decoded token attends to, the highest first.
    sketch(row: View) -> Tensor: which dims matter, [batch, kv_heads, 1, 1, dim], the highest first.
Everything else, the same for all policies, is here and in the modules beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvdsl.runtime import eviction, selection
from kvdsl.runtime.errors import KvdslError
from kvdsl.runtime.eviction import Held
from kvdsl.runtime.slots import FREE, SLOT_DIM, AttentionCall, SlotState, ranks, taken, text_order
from kvdsl.runtime.view import INITIAL, Columns, View, row_view

_BLOCK_BYTES = 64 << 20
"""What one block of prompt queries may spend on probabilities."""

Kept = dict[str, Tensor]
"""What is cached: `keys`, `values`, `position` and `columns` over any number of slots."""


class TorchBackend:
    """Attention, statistics and eviction by torch operations."""

    name = "torch"

    def prefill(self, state: SlotState, call: AttentionCall) -> Tensor:
        """Attend over what is cached and the new tokens, causally; observe every query; settle once, or at every block's end.

        Returns:
            [batch, tokens, query_heads, value_dim].
        """
        return prefill(state, call)

    def decode(self, state: SlotState, call: AttentionCall) -> Tensor:
        """The new tokens one by one: place, attend, observe, settle.

        Raises:
            KvdslError: for several tokens at once, if the layers must agree after every one.
        """
        tokens = call.query.shape[2]
        if tokens > 1 and state.spec.victims == "layers":
            raise KvdslError(
                f"{state.spec.name} evicts what all layers agree on, token by token, but {tokens} tokens came in one forward "
                f"after the first was generated: pass them one by one"
            )
        state.make_room(tokens)
        steps = [_decode_one(state, one) for one in _one_by_one(call)]
        return torch.cat(steps, dim=1)


# -- the prompt --------------------------------------------------------------------------------------------------------


def prefill(state: SlotState, call: AttentionCall) -> Tensor:
    """See `TorchBackend.prefill`."""
    state.window = call.window
    new_position = _new_positions(state, call)
    seen = _seen_before(state, call) + (new_position >= 0).sum(1, dtype=torch.int32)
    numbers = state.resolve(seen)
    state.size_rings(numbers)
    if "prefill_block" in state.spec.numbers and _evicts_in_prompt(state, numbers):
        return _prefill_in_blocks(state, call, new_position, seen, numbers)
    kept, out = _encode(state, call, _cached(state), new_position, numbers)
    held = Held(state, kept, numbers, seen - 1, (new_position >= 0).any(1), _evicts_in_prompt(state, numbers))
    eviction.settle(held, then=lambda: state.store(kept, seen, numbers))
    return out


def _prefill_in_blocks(state: SlotState, call: AttentionCall, new_position: Tensor, seen: Tensor, numbers: Tensor) -> Tensor:
    """Every row settles where its text has a whole number of blocks, however the prompt is cut into forwards."""
    size = state.named(numbers)["prefill_block"].long()
    kept, out = _cached(state), call.value.new_zeros(*_out_shape(call))
    for tokens, real in _blocks(new_position, _seen_before(state, call), size):
        position = new_position.gather(1, tokens).masked_fill(~real, FREE)
        kept, part = _encode(state, _only(call, tokens, real), kept, position, numbers)
        newest = position.amax(1)
        whole = real.any(1) & ((newest + 1) % size == 0)
        eviction.settle(Held(state, kept, numbers, newest, whole, evicts=True))
        kept = _survivors(kept)
        out.scatter_add_(1, tokens[:, :, None, None].expand_as(part), part)  # onto zeros, and no more than once
    assert kept is not None
    state.store(kept, seen, numbers)
    return out


def _evicts_in_prompt(state: SlotState, numbers: Tensor) -> bool:
    return state.bounded and state.spec.when != "decode" and bool(state.named(numbers)["capacity"].isfinite().any())


def _blocks(new_position: Tensor, before: Tensor, size: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The new tokens of every block, row by row: which they are, int64 [batch, any], and which of these are real.

    Args:
        new_position: [batch, tokens], FREE for padding.
        before: [batch], how many tokens came before.
        size: [batch], tokens a block.
    """
    number = new_position // size[:, None] - (before // size)[:, None]
    number = number.masked_fill(new_position < 0, -1)
    for block in range(max(1, int(number.max()) + 1)):
        chosen = number == block
        most = max(1, int(chosen.sum(1).max()))
        tokens = chosen.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        yield tokens, chosen.gather(1, tokens)


def _only(call: AttentionCall, tokens: Tensor, real: Tensor) -> AttentionCall:
    """The call with these tokens only, [batch, any]."""
    index = tokens[:, None, :, None]
    query, key, value = (
        x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (call.query, call.key, call.value)
    )
    return replace(call, query=query, key=key, value=value, real=real)


def _survivors(kept: Kept) -> Kept:
    """What is left, in the order of the text, in as few slots as hold it."""
    most = max(1, int((kept["position"] >= 0).sum(-1).max()))
    order = text_order(kept["position"])[..., :most]
    return {name: taken(name, tensor, order) for name, tensor in kept.items()}


def _cached(state: SlotState) -> Kept | None:
    return {name: getattr(state, name) for name in SLOT_DIM} if state.allocated else None


def _seen_before(state: SlotState, call: AttentionCall) -> Tensor:
    if state.allocated:
        return state.seen
    return torch.zeros(call.key.shape[0], dtype=torch.int32, device=call.key.device)


def _new_positions(state: SlotState, call: AttentionCall) -> Tensor:
    """Positions of the new tokens in their rows' texts, int32 [batch, tokens], FREE for padding."""
    real = call.real
    if real is None:
        real = call.key.new_ones(call.key.shape[0], call.key.shape[2], dtype=torch.bool)
    position = _seen_before(state, call)[:, None] + real.cumsum(1, dtype=torch.int32) - 1
    return position.masked_fill(~real, FREE).int()


def _encode(
    state: SlotState, call: AttentionCall, kept: Kept | None, new_position: Tensor, numbers: Tensor
) -> tuple[Kept, Tensor]:
    """Attend to what is cached and to the new tokens, and observe: all that is cached now, and the output."""
    kept = _with_new(state, call, kept, new_position)
    out = torch.cat(list(_attend_blocks(state, call, kept, new_position, numbers)), dim=1)
    if state.spec.sketches:
        _sketch_last_query(state, call, kept, new_position, numbers)
    return kept, out.masked_fill((new_position < 0)[:, :, None, None], 0)


def _with_new(state: SlotState, call: AttentionCall, kept: Kept | None, new_position: Tensor) -> Kept:
    """The cached slots and, behind them, a slot for every new token."""
    batch, heads, tokens, _ = call.key.shape
    columns = call.key.new_zeros(state.column_rows, batch, heads, tokens, dtype=torch.float32)
    for column, rule in zip(columns, state.spec.column_rules, strict=False):  # rings, behind, need no beginning
        column.fill_(INITIAL[rule])
    _place(state, call, columns)
    position = new_position[:, None].expand(batch, heads, tokens)
    new = {"keys": call.key, "values": call.value, "position": position, "columns": columns}
    if kept is None:
        return {name: tensor.contiguous() for name, tensor in new.items()}
    return {name: torch.cat([kept[name], tensor], SLOT_DIM[name]) for name, tensor in new.items()}


def _attend_blocks(
    state: SlotState, call: AttentionCall, kept: Kept, new_position: Tensor, numbers: Tensor
) -> Iterator[Tensor]:
    """Outputs of blocks of queries, [batch, block, query_heads, value_dim] each; the columns are folded in passing."""
    batch, query_heads, tokens, _ = call.query.shape
    slots = kept["position"].shape[2]
    block = max(1, min(tokens, _BLOCK_BYTES // (4 * batch * query_heads * slots)))
    if not kept["values"].isfinite().all():
        block = 1  # a query must not meet what it does not see: 0 * inf is no 0
    key = _turned_keys(state, call, kept)
    for start in range(0, tokens, block):
        part = slice(start, start + block)
        row = row_view(state, kept, call.query[:, :, part], new_position[:, part], numbers)
        yield _attend(state, call, row, key, row.visible)
        if state.spec.reads_attention:
            state.spec.torch_kernels.observe(row, Columns(row))


def _sketch_last_query(state: SlotState, call: AttentionCall, kept: Kept, new_position: Tensor, numbers: Tensor) -> None:
    """Find the sketch at the last query of every row that has one."""
    newest, last = new_position.max(1, keepdim=True)
    query = call.query.gather(2, last[:, None, :, None].expand(-1, call.query.shape[1], -1, call.query.shape[3]))
    row = row_view(state, kept, query, newest, numbers)
    width = selection.sketch_width(state, numbers, call.key.shape[-1])
    found = selection.sketched(state, row, numbers, width)
    if not state.has_sketch:
        state.sketch = found
        return
    old = torch.nn.functional.pad(state.sketch, (0, width), value=-1)[..., :width]
    state.sketch = torch.where((newest >= 0)[..., None], found, old)


# -- one token ---------------------------------------------------------------------------------------------------------


def _one_by_one(call: AttentionCall) -> Iterator[AttentionCall]:
    for t in range(call.query.shape[2]):
        at = slice(t, t + 1)
        query, key, value = (x[:, :, at] for x in (call.query, call.key, call.value))
        yield replace(call, query=query, key=key, value=value, real=None if call.real is None else call.real[:, at])


def _decode_one(state: SlotState, call: AttentionCall) -> Tensor:
    new_position = _new_positions(state, call)
    real = new_position >= 0
    if state.spec.hard_cap:
        eviction.make_room(eviction.held_in_slots(state, real[:, 0]))
    slot = _free_slot(state)
    _overwrite(state, call, slot, new_position, real)
    _place_in(state, call, slot, real)
    state.seen += real[:, 0]
    held = eviction.held_in_slots(state, real[:, 0])
    row = row_view(state, held.kept, call.query, new_position, state.numbers)
    if state.spec.sketches:
        selection.refresh(state, row, real[:, 0])
    attended = selection.selected(state, row).unsqueeze(2) if state.selects else row.visible
    out = _attend(state, call, row, _turned_keys(state, call, held.kept), attended)
    if state.spec.reads_attention:
        state.spec.torch_kernels.observe(row, Columns(row))
    eviction.settle(held)
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
    if state.spec.compact:
        last = (state.position >= 0).sum(-1, keepdim=True, dtype=torch.int32)
        state.rank.scatter_(2, slot, torch.where(real[:, None], last, state.rank.gather(2, slot)))
    position = new_position[:, None].expand_as(slot)
    state.position.scatter_(2, slot, torch.where(real[:, None], position, state.position.gather(2, slot)))
    for column, rule in zip(state.columns, state.spec.column_rules, strict=False):  # rings, behind, need no beginning
        column.scatter_(2, slot, torch.where(real[:, None], INITIAL[rule], column.gather(2, slot)))


def _place_in(state: SlotState, call: AttentionCall, slot: Tensor, real: Tensor) -> None:
    """`_place` for one new token per KV head, in its slot, int64 [batch, kv_heads, 1]; padding leaves everything as it was."""
    columns = state.columns[: len(state.spec.columns)]
    index = slot[None].expand(len(columns), -1, -1, -1)
    old = columns.gather(3, index)
    new = old.clone()
    _place(state, call, new)
    columns.scatter_(3, index, torch.where(real[:, None], new, old))


def _place(state: SlotState, call: AttentionCall, columns: Tensor) -> None:
    """Compute the columns that the new tokens have by themselves, [at least len(spec.columns), batch, kv_heads, tokens]."""
    if "token" not in state.spec.column_rules:
        return
    nothing = columns.new_zeros(1, 1, 1, 1)  # such a column reads keys and values only
    view = View(
        visible=nothing.bool(), position=nothing, newest=nothing, live=nothing, window=None, numbers={},
        columns=state.single_columns(columns), key=call.key, value=call.value, group=state.spec.group, random_key=(0, 0, 0),
    )  # fmt: skip
    state.spec.torch_kernels.place(view, Columns(view))


# -- attention ---------------------------------------------------------------------------------------------------------


def _attend(state: SlotState, call: AttentionCall, row: View, key: Tensor, attended: Tensor) -> Tensor:
    """Attention of a block of queries over the slots; the row gets to know what there is to observe.

    Args:
        key: [batch, kv_heads, slots, key_dim], turned as `row.query` will be.
        attended: bool [batch, kv_heads, queries, slots], what takes part, of what each query sees.

    Returns:
        [batch, queries, query_heads, value_dim]; without meaning for padding.
    """
    query = _turned_queries(state, call, row)
    logit = torch.einsum("bhgqd,bhsd->bhgqs", query.float(), key.float()) * call.scaling
    if call.softcap is not None:
        logit = call.softcap * torch.tanh(logit / call.softcap)
    prob = _softmax(logit.masked_fill(~attended.unsqueeze(2), -torch.inf), call.sinks)
    prob = prob.masked_fill(~attended.unsqueeze(2), 0.0)  # even where a softmax is NaN, or padding sees nothing
    # A slot to which no query attends may hold anything, infinities included; it must not meet a probability of zero.
    value = row.value.float().masked_fill(~attended.any(2)[..., None], 0.0)
    if state.spec.reads_attention:
        row.attn, row.logit = row.over_group(prob), row.over_group(logit)
    return torch.einsum("bhgqs,bhsd->bqhgd", prob, value).flatten(2, 3).to(call.query.dtype)


def _turned_keys(state: SlotState, call: AttentionCall, kept: Kept) -> Tensor:
    """The keys at the positions where attention sees them: under compact positions each at its rank among the live ones."""
    if not state.spec.compact or call.rope is None:
        return kept["keys"]
    rank = kept["rank"] if "rank" in kept else ranks(kept["position"])
    return call.rope.rotate(kept["keys"], rank - kept["position"])


def _turned_queries(state: SlotState, call: AttentionCall, row: View) -> Tensor:
    """The queries, [batch, kv_heads, group, queries, dim], each at the position of its own token's key."""
    assert row.query is not None
    if not state.spec.compact or call.rope is None:
        return row.query
    rank = row.live - 1  # the token's own slot is the last of those that its query found
    return call.rope.rotate(row.query, (rank - row.newest).squeeze(-1).long().unsqueeze(2))


def _softmax(logit: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the slots, [batch, kv_heads, group, queries, slots]."""
    if sinks is not None:
        batch, heads, group, queries, _ = logit.shape
        sink = sinks.float().view(1, heads, group, 1, 1).expand(batch, heads, group, queries, 1)
        return torch.cat([logit, sink], -1).softmax(-1)[..., :-1]
    return logit.softmax(-1)


def _out_shape(call: AttentionCall) -> tuple[int, ...]:
    batch, query_heads, tokens, _ = call.query.shape
    return batch, tokens, query_heads, call.value.shape[-1]
