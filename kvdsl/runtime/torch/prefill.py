"""The prompt, for every backend: attend, observe, settle.

Attention is torch's, unless the backend has a kernel that also observes. After torch's attention, probabilities are recomputed from each
query's log-sum-exp, only where the policy reads them. So memory is linear in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.forward import Forward, Later
from kvdsl.runtime.state.order import FREE, text_order
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.tensors import NOTHING, SLOT_DIM, taken
from kvdsl.runtime.torch import dense, eviction, selection, statistics
from kvdsl.runtime.torch.columns import INITIAL
from kvdsl.runtime.torch.eviction import Held
from kvdsl.runtime.torch.prompt import Kept, Prompt
from kvdsl.runtime.torch.tokens import NewText, place, text_of
from kvdsl.runtime.torch.view import row_view

Attend = Callable[[Prompt], Tensor]
"""Attends for the prompt's queries and updates the columns; see `attend_and_observe`."""


def attend_and_observe(prompt: Prompt, observe: Callable[[Prompt, Tensor], None] = statistics.observe) -> Tensor:
    """Attend by torch, and observe if the policy reads attention.

    Returns:
        [batch, tokens, query_heads, value_dim].
    """
    out, lse = dense.attend(prompt)
    if prompt.state.spec.reads_attention:
        observe(prompt, lse)
    return out


def prefill(
    state: SlotState, call: AttentionCall, attend: Attend = attend_and_observe, kernel: eviction.Kernel = eviction.no_kernel
) -> Tensor:
    """Attend causally over cached and new tokens, observe every query, and settle at the end of the prompt or of each block.

    The first prompt's checks that wait for the device come last, at the end of `call.forward` if it has a `later`, so that a GPU stays
    busy. If they find numbers that are not finite, the prompt is computed again without deferred checks.

    Args:
        kernel: settles where it can.

    Returns:
        [batch, tokens, query_heads, value_dim].
    """
    forward = call.forward or Forward()
    call, later = call._replace(forward=forward), forward.later
    if later is not None or state.allocated or state.together is not None or state.choices is not None:
        return _prefill(state, call, attend, kernel, later)
    later = Later()
    out = _prefill(state, call, attend, kernel, later)
    if later.is_right():
        return out
    drop_prompt(state)
    return _prefill(state, call, attend, kernel)


def drop_prompt(state: SlotState) -> None:
    """Drop the first prompt, to read it again. Its tensors are reused."""
    expected, turns, tensors = state.expected, state.settings.turns, state.tensors()
    state.reset()
    state.expected, state.settings.turns = expected, turns
    state.lay_into(tensors)


def _prefill(
    state: SlotState, call: AttentionCall, attend: Attend, kernel: eviction.Kernel, later: Later | None = None
) -> Tensor:
    """Compute a prompt. With `later`, checks are deferred to it."""
    state.window, state.scaling, state.rope = call.window, call.scaling, call.rope
    _read_constants(state, call)
    text = text_of(state, call)
    position, seen = text.position, text.seen
    numbers = state.resolve_after(seen, text.lengths, all_come=text.all_come)
    state.column_index.size_rings(state.settings, numbers, state.numbers if state.allocated else None)
    # Errors come before this point, so that a refused prompt leaves nothing for the next one.
    if state.spec.reads_text:
        state.text.append((call.query, position))
    if state.spec.remembers_prompts and state.prompt_from is None:
        state.prompt_from = text.before.view(-1, 1, 1)
    if "prefill_block" in state.spec.numbers and _evicts(state, numbers):
        return _in_blocks(state, call, text, numbers, attend, kernel)
    kept, out = _encode(state, call, _cached(state), position, numbers, attend, later)
    evicts = _evicts(state, numbers) and not call.goes_on
    held = Held(state, kept, numbers, text.newest, text.come, evicts, of_prompt=True, later=later)
    staying = eviction.known_to_stay(held, text.lengths) if text.is_first else None
    if call.goes_on:
        state.store(kept, seen, numbers, staying)
        return out
    eviction.settle(held, lambda: _settled(state, kept, seen, numbers, staying), kernel)
    return out


def _settled(state: SlotState, kept: Kept, seen: Tensor, numbers: Tensor, staying: tuple[int, int] | None = None) -> None:
    """Store what is kept in the slots; see `SlotState.store`."""
    state.text, state.prompt_from = [], None
    if state.spec.forgets:
        kept["columns"] = kept["columns"][: len(state.spec.columns)]
    state.store(kept, seen, numbers, staying)


def _in_blocks(
    state: SlotState, call: AttentionCall, text: NewText, numbers: Tensor, attend: Attend, kernel: eviction.Kernel
) -> Tensor:
    """Settle each row at multiples of the block size of its text, however the prompt is split into forwards."""
    size = state.settings.of_rows(numbers, "prefill_block").long()
    batch, query_heads, tokens, _ = call.query.shape
    kept, out = _cached(state), call.value.new_zeros(batch, tokens, query_heads, call.value.shape[-1])
    for chosen, real in _blocks(text.position, text.before, size):
        position = text.position.gather(1, chosen).masked_fill(~real, FREE)
        kept, part = _encode(state, _only(call, chosen, real), kept, position, numbers, attend)
        newest = position.amax(1)
        whole = real.any(1) & ((newest + 1) % size == 0)
        held = Held(state, kept, numbers, newest, whole, evicts=True)
        eviction.warn_of_protected([held])
        eviction.settle(held, kernel=kernel)
        kept = _survivors(kept)
        out.scatter_add_(1, chosen[:, :, None, None].expand_as(part), part)  # each token once, so order does not matter
    assert kept is not None
    if call.goes_on:
        state.store(kept, text.seen, numbers)
    else:
        _settled(state, kept, text.seen, numbers)
    return out


def _evicts(state: SlotState, numbers: Tensor) -> bool:
    """Whether a prompt of this layer may evict."""
    return state.spec.bounded and state.spec.when != "decode" and state.settings.table(numbers).evicts


def _cached(state: SlotState) -> Kept | None:
    """Return the cached slots; with empty rings if they were dropped with an earlier prompt."""
    if not state.allocated:
        return None
    kept = state.in_slots()
    gone = state.column_index.rows - len(kept["columns"])
    return kept if not gone else kept | {"columns": torch.nn.functional.pad(kept["columns"], (0, 0) * 3 + (0, gone))}


# -- block by block ----------------------------------------------------------------------------------------------------


def _blocks(new_position: Tensor, before: Tensor, size: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each block's tokens: their indices, int64 [batch, any], and which are real.

    Args:
        new_position: [batch, tokens], FREE for padding.
        before: [batch], tokens before the new ones.
        size: [batch], tokens per block.
    """
    number = new_position // size[:, None] - (before // size)[:, None]
    number = number.masked_fill(new_position < 0, -1)
    for block in range(max(1, int(number.max()) + 1)):
        chosen = number == block
        most = max(1, int(chosen.sum(1).max()))
        tokens = chosen.int().argsort(dim=1, descending=True, stable=True)[:, :most]
        yield tokens, chosen.gather(1, tokens)


def _only(call: AttentionCall, tokens: Tensor, real: Tensor) -> AttentionCall:
    """Return the call for these tokens, [batch, any]."""
    index = tokens[:, None, :, None]
    query, key, value = (
        x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in (call.query, call.key, call.value)
    )
    supplied = call.supplied
    if supplied is not None:
        supplied = supplied.gather(3, tokens[None, :, None].expand(*supplied.shape[:3], -1))
    real_or_none = None if bool(real.all()) else real
    return call._replace(query=query, key=key, value=value, real=real_or_none, supplied=supplied, forward=Forward())


def _survivors(kept: Kept) -> Kept:
    """Return the live slots in text order, in as few slots as possible."""
    most = max(1, int((kept["position"] >= 0).sum(-1).max()))
    order = text_order(kept["position"])[..., :most]
    return {name: taken(name, tensor, order) for name, tensor in kept.items()}


# -- one part of the prompt --------------------------------------------------------------------------------------------


def _encode(
    state: SlotState, call: AttentionCall, kept: Kept | None, position: Tensor, numbers: Tensor, attend: Attend,
    later: Later | None = None,
) -> tuple[Kept, Tensor]:  # fmt: skip
    """Attend over cached and new tokens, and observe. Returns the slots, the new ones included, and the output."""
    kept = _with_new(state, call, kept, position)
    prompt = Prompt(state, call, kept, position, numbers, later)
    out = attend(prompt)
    if state.spec.sketches:
        _sketch_last_query(state, call, kept, position, numbers)
    return kept, out


def _read_constants(state: SlotState, call: AttentionCall) -> None:
    """Read the layer's part of the policy's tensors, once.

    Raises:
        KvdslError: if the tensors do not fit the model, or if the file has changed.
    """
    spec, heads, dims = state.spec, call.key.shape[1], call.key.shape[3]
    if spec.tensors is None or state.constants.shape != NOTHING.shape:
        return
    if spec.tensors_of_values and dims != call.value.shape[3]:
        raise KvdslError(
            f"{spec.name} multiplies values by tensors that have a number for every dim of a key, but keys have {dims} dims and values "
            f"{call.value.shape[3]}"
        )
    served = slice(state.head_offset, state.head_offset + heads)
    sizes = {"layers": state.settings.layers, "heads": max(served.stop, heads * state.processes), "dims": dims}
    state.constants = spec.tensors.rows(state.layer, sizes, served).to(call.key.device)
    state.settings.heads = served


def _with_new(state: SlotState, call: AttentionCall, kept: Kept | None, new_position: Tensor) -> Kept:
    """Append a slot for every new token to the cached ones. Keys and values are as the model passed them, or as stored if packed."""
    batch, heads, tokens, _ = call.key.shape
    columns = call.key.new_zeros(state.column_index.rows, batch, heads, tokens, dtype=torch.float32)
    for column, rule in zip(columns, state.spec.column_rules, strict=False):  # rings need no initial value
        if INITIAL[rule]:
            column.fill_(INITIAL[rule])
    rows = state.format.rows_by_name(call.key, call.value)
    if rows:
        call = call._replace(key=state.format.keys(rows["key_rows"]), value=state.format.values(rows["value_rows"]))
    place(state, call, columns)
    position = new_position[:, None].repeat(1, heads, 1)  # a copy even for one head: other layers read the positions
    new = {"keys": call.key, "values": call.value, "position": position, "columns": columns} | rows
    if kept is None:
        return new
    return {name: torch.cat([kept[name], tensor], SLOT_DIM.get(name, 2)) for name, tensor in new.items()}


def _sketch_last_query(state: SlotState, call: AttentionCall, kept: Kept, new_position: Tensor, numbers: Tensor) -> None:
    """Choose the sketch by the last query of every row."""
    newest, last = new_position.max(1, keepdim=True)
    query = call.query.gather(2, last[:, None, :, None].expand(-1, call.query.shape[1], -1, call.query.shape[3]))
    row = row_view(state, kept, query, newest, numbers)
    width = selection.sketch_width(state, numbers, call.key.shape[-1])
    found = selection.sketched(state, row, numbers, width)
    if state.sketch.dim() == 1:
        state.sketch = found
        return
    old = torch.nn.functional.pad(state.sketch, (0, width), value=-1)[..., :width]
    state.sketch = torch.where((newest >= 0)[..., None], found, old)
