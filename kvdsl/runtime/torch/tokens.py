"""New tokens: where they stand in their rows' texts, and what they have by themselves."""

from __future__ import annotations

from torch import Tensor

from kvdsl.runtime.call import AttentionCall
from kvdsl.runtime.state.slots import FREE, SlotState
from kvdsl.runtime.torch.view import Columns, View


def seen_before(state: SlotState, call: AttentionCall) -> Tensor:
    """How many tokens every row has had before the call, int32 [batch]."""
    return state.seen if state.allocated else call.key.new_zeros(call.key.shape[0]).int()


def new_positions(state: SlotState, call: AttentionCall) -> Tensor:
    """Positions of the new tokens in their rows' texts, int32 [batch, tokens], FREE for padding."""
    real = call.real
    if real is None:
        real = call.key.new_ones(call.key.shape[0], call.key.shape[2]).bool()
    position = seen_before(state, call)[:, None] + real.cumsum(1).int() - 1
    return position.masked_fill(~real, FREE).int()


def place(state: SlotState, call: AttentionCall, columns: Tensor) -> None:
    """Compute the columns that the new tokens have by themselves, [at least len(spec.columns), batch, kv_heads, tokens]."""
    if "token" not in state.spec.column_rules:
        return
    nothing = columns.new_zeros(1, 1, 1, 1)  # such a column reads keys and values only
    view = View(
        visible=nothing.bool(), position=nothing, newest=nothing, live=nothing, window=None, numbers={},
        columns=state.single_columns(columns), key=call.key, value=call.value, group=state.spec.group, random_key=(0, 0, 0),
    )  # fmt: skip
    state.spec.torch_kernels.place(view, Columns(view))
