"""Several at once: tokens leave from given slots, and new ones take their places."""

from __future__ import annotations

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.call import AttentionCall
from kvdsl.runtime.state.order import FREE
from kvdsl.runtime.state.slots import SlotState

NOT_LIVE = "a slot that is to be replaced does not exist, is free, or is named twice"


def check_text(state: SlotState) -> None:
    """Raise KvdslError for a policy with pages: they are stretches of the text, of which no token leaves."""
    if "page" in state.spec.numbers:
        raise KvdslError(f"{state.spec.name} attends by pages of the text: none of its tokens can be replaced")


def check_count(slots: Tensor, call: AttentionCall) -> None:
    """Raise KvdslError unless there are as many slots, [batch, kv_heads, tokens], as new tokens."""
    wanted = list(call.key.shape[:3])
    if list(slots.shape) != wanted:
        raise KvdslError(
            f"{list(slots.shape)} slots are to be replaced by {wanted} tokens: name as many as there are tokens"
        )


def check_live(state: SlotState, slots: Tensor) -> None:
    """Raise KvdslError unless these are different slots that hold a token."""
    inside = (slots >= 0) & (slots < state.slots)
    index = slots.long().masked_fill(~inside, 0)
    named = torch.zeros_like(state.position).scatter_add_(2, index, inside.int())
    if not bool(inside.all()) or bool((named > 1).any()) or bool(((named > 0) & (state.position == FREE)).any()):
        raise KvdslError(NOT_LIVE)
