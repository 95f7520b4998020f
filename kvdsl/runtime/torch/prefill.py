"""The prompt, for every backend: attend, observe, settle.

Attention is torch's own, unless a backend has one that observes as it goes. Behind torch's, who observes computes the probabilities
once more, from what attention says of every query (its log-sum-exp), and only where the policy asks. So memory is linear in the length
of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.state.order import FREE, text_order
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.tensors import SLOT_DIM, taken
from kvdsl.runtime.torch import dense, eviction, selection, statistics
from kvdsl.runtime.torch.columns import INITIAL
from kvdsl.runtime.torch.eviction import Held
from kvdsl.runtime.torch.prompt import Kept, Prompt
from kvdsl.runtime.torch.tokens import known_lengths, new_positions, place, seen_before
from kvdsl.runtime.torch.view import row_view

Attend = Callable[[Prompt], Tensor]
"""Has the prompt's queries attend, and folds what they give the slots into the columns; see `attend_and_observe`."""


def attend_and_observe(prompt: Prompt, observe: Callable[[Prompt, Tensor], None] = statistics.observe) -> Tensor:
    """Torch's attention, observed where the policy asks.

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
    """Attend over what is cached and the new tokens, causally; observe every query; settle once the prompt ends, or at every block's end.

    Whether attention was right, the host asks when all else is done, so that a GPU has work while it waits; if not, all is done again.

    Args:
        kernel: settles, where it can.

    Returns:
        [batch, tokens, query_heads, value_dim].
    """
    if state.allocated or state.together is not None or state.choices is not None:
        return _prefill(state, call, attend, kernel)
    later = Later([], [])
    out = _prefill(state, call, attend, kernel, later)
    conditions, said = zip(*later.unsaid, strict=True) if later.unsaid else ((), ())
    numbers = _all_finite([*later.doubts, *conditions])
    if numbers is not None:
        for holds, say in zip(numbers[len(later.doubts) :], said, strict=True):
            if holds:
                say()
        return out
    expected, tensors = state.expected, state.tensors()
    state.reset()  # as if the prompt had not come; where it is to be laid stays
    state.expected = expected
    state.lay_into(tensors)
    return _prefill(state, call, attend, kernel)


def _all_finite(found: Sequence[Tensor]) -> list[float] | None:
    """These numbers, [] each, for which the host waits once; None if one is not finite."""
    numbers = torch.stack([x.float() for x in found]).tolist() if found else []
    return numbers if all(map(isfinite, numbers)) else None


class Later(NamedTuple):
    """What is looked at when all else of a prompt is done.

    Attributes:
        doubts: see `Prompt`.
        unsaid: see `Held`.
    """

    doubts: list[Tensor]
    unsaid: list[tuple[Tensor, Callable[[], None]]]


def _prefill(
    state: SlotState, call: AttentionCall, attend: Attend, kernel: eviction.Kernel, later: Later | None = None
) -> Tensor:
    """`prefill`, which may leave something for later."""
    state.window, state.scaling, state.rope = call.window, call.scaling, call.rope
    state.read_constants(call.key, call.value)
    position = new_positions(state, call)
    before = seen_before(state, call)
    seen = before + (position >= 0).sum(1, dtype=torch.int32)
    numbers = state.resolve_after(seen, known_lengths(state, call))
    state.column_index.size_rings(state.settings, numbers, state.numbers if state.allocated else None)
    # What is noted of the prompt comes behind all that may be refused: the next prompt is another one.
    if state.spec.reads_text:
        state.text.append((call.query, position))
    if state.spec.remembers_prompts and state.prompt_from is None:
        state.prompt_from = before.clone().view(-1, 1, 1)  # `before` may be `state.seen`, which goes on
    if "prefill_block" in state.spec.numbers and _evicts(state, numbers):
        return _in_blocks(state, call, position, seen, numbers, attend, kernel)
    doubts, unsaid = (None, None) if later is None else later
    kept, out = _encode(state, call, _cached(state), position, numbers, attend, doubts)
    evicts = _evicts(state, numbers) and not call.goes_on
    held = Held(state, kept, numbers, seen - 1, (position >= 0).any(1), evicts, of_prompt=True, unsaid=unsaid)
    staying = None if known_lengths(state, call) is None else eviction.known_to_stay(held)
    if call.goes_on:
        state.store(kept, seen, numbers, staying)
        return out
    eviction.settle(held, lambda: _settled(state, kept, seen, numbers, staying), kernel)
    return out


def _settled(state: SlotState, kept: Kept, seen: Tensor, numbers: Tensor, staying: tuple[int, int] | None = None) -> None:
    """What is left is laid into the slots; see `SlotState.store`."""
    state.text, state.prompt_from = [], None
    if state.spec.forgets:
        kept["columns"] = kept["columns"][: len(state.spec.columns)]
    state.store(kept, seen, numbers, staying)


def _in_blocks(
    state: SlotState, call: AttentionCall, new_position: Tensor, seen: Tensor, numbers: Tensor, attend: Attend,
    kernel: eviction.Kernel,
) -> Tensor:  # fmt: skip
    """Every row settles where its text has a whole number of blocks, however the prompt is cut into forwards."""
    size = state.settings.of_rows(numbers, "prefill_block").long()
    batch, query_heads, tokens, _ = call.query.shape
    kept, out = _cached(state), call.value.new_zeros(batch, tokens, query_heads, call.value.shape[-1])
    for chosen, real in _blocks(new_position, seen_before(state, call), size):
        position = new_position.gather(1, chosen).masked_fill(~real, FREE)
        kept, part = _encode(state, _only(call, chosen, real), kept, position, numbers, attend)
        newest = position.amax(1)
        whole = real.any(1) & ((newest + 1) % size == 0)
        held = Held(state, kept, numbers, newest, whole, evicts=True)
        eviction.warn_of_protected([held])
        eviction.settle(held, kernel=kernel)
        kept = _survivors(kept)
        out.scatter_add_(1, chosen[:, :, None, None].expand_as(part), part)  # onto zeros, and no more than once
    assert kept is not None
    if call.goes_on:
        state.store(kept, seen, numbers)
    else:
        _settled(state, kept, seen, numbers)
    return out


def _evicts(state: SlotState, numbers: Tensor) -> bool:
    """Whether a prompt of this layer loses anything."""
    return state.spec.bounded and state.spec.when != "decode" and state.settings.table(numbers).evicts


def _cached(state: SlotState) -> Kept | None:
    """What is cached; of rings that have gone with an earlier prompt, empty ones."""
    if not state.allocated:
        return None
    kept = state.in_slots()
    gone = state.column_index.rows - len(kept["columns"])
    return kept if not gone else kept | {"columns": torch.nn.functional.pad(kept["columns"], (0, 0) * 3 + (0, gone))}


# -- block by block ----------------------------------------------------------------------------------------------------


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
    supplied = call.supplied
    if supplied is not None:
        supplied = supplied.gather(3, tokens[None, :, None].expand(*supplied.shape[:3], -1))
    return call._replace(query=query, key=key, value=value, real=None if bool(real.all()) else real, supplied=supplied)


def _survivors(kept: Kept) -> Kept:
    """What is left, in the order of the text, in as few slots as hold it."""
    most = max(1, int((kept["position"] >= 0).sum(-1).max()))
    order = text_order(kept["position"])[..., :most]
    return {name: taken(name, tensor, order) for name, tensor in kept.items()}


# -- one part of the prompt --------------------------------------------------------------------------------------------


def _encode(
    state: SlotState, call: AttentionCall, kept: Kept | None, position: Tensor, numbers: Tensor, attend: Attend,
    doubts: list[Tensor] | None = None,
) -> tuple[Kept, Tensor]:  # fmt: skip
    """Attend to what is cached and to the new tokens, and observe: all that is cached now, and the output."""
    kept = _with_new(state, call, kept, position)
    prompt = Prompt(state, call, kept, position, numbers, doubts)
    out = attend(prompt)
    if state.spec.sketches:
        _sketch_last_query(state, call, kept, position, numbers)
    return kept, out


def _with_new(state: SlotState, call: AttentionCall, kept: Kept | None, new_position: Tensor) -> Kept:
    """The cached slots and, behind them, a slot for every new token; where nothing is cached, keys and values as they came, or as they
    are stored.
    """
    batch, heads, tokens, _ = call.key.shape
    columns = call.key.new_zeros(state.column_index.rows, batch, heads, tokens, dtype=torch.float32)
    for column, rule in zip(columns, state.spec.column_rules, strict=False):  # rings, behind, need no beginning
        if INITIAL[rule]:
            column.fill_(INITIAL[rule])
    rows = state.packed_rows(call.key, call.value)
    if rows:
        call = call._replace(key=state.read(rows["key_rows"]), value=state.read(rows["value_rows"]))
    place(state, call, columns)
    position = new_position[:, None].expand(batch, heads, tokens).contiguous()
    new = {"keys": call.key, "values": call.value, "position": position, "columns": columns} | rows
    if kept is None:
        return new
    return {name: torch.cat([kept[name], tensor], SLOT_DIM.get(name, 2)) for name, tensor in new.items()}


def _sketch_last_query(state: SlotState, call: AttentionCall, kept: Kept, new_position: Tensor, numbers: Tensor) -> None:
    """Find the sketch at the last query of every row that has one."""
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
