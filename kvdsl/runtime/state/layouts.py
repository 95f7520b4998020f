"""How a policy's slots lie in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.blocks import BlockState
from kvdsl.runtime.state.flat import FlatState
from kvdsl.runtime.state.slots import SlotState


def slot_state(spec: PolicySpec, given: Mapping[str, float | None], **where: Any) -> SlotState:
    """The slots of one layer; the arguments are those of `SlotState`."""
    return _layout(spec)(spec, given, **where)


def _layout(spec: PolicySpec) -> type[SlotState]:
    if "block" in spec.numbers:
        return BlockState
    kept_beside = spec.compact or spec.selects
    return FlatState if spec.across and spec.when == "prefill" and not kept_beside else SlotState
