"""How a policy's slots lie in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.blocks import Blocks
from kvdsl.runtime.state.flat import Flat
from kvdsl.runtime.state.layout import Layout, SlotAfterSlot
from kvdsl.runtime.state.slots import SlotState


def slot_state(spec: PolicySpec, given: Mapping[str, float | None], **where: Any) -> SlotState:
    """The slots of one layer, in the layout that the policy has; the other arguments are those of `SlotState`."""
    return SlotState(spec, given, layout=_layout(spec), **where)


def _layout(spec: PolicySpec) -> Layout:
    if spec.in_blocks:
        return Blocks()
    kept_beside = spec.compact or spec.selects
    lengths_differ = (spec.across and spec.when == "prefill") or spec.heads_differ
    return Flat() if lengths_differ and not kept_beside else SlotAfterSlot()
