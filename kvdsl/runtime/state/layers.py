"""The slots of all layers of a cache: their layouts, and the links between layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvdsl.errors import KvdslError
from kvdsl.runtime.lifetimes import Weakly
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.blocks import Blocks
from kvdsl.runtime.state.flat import Flat
from kvdsl.runtime.state.layout import Layout, SlotAfterSlot
from kvdsl.runtime.state.shared import Choices, Together
from kvdsl.runtime.state.slots import SlotState


def slot_state(spec: PolicySpec, params: Mapping[str, float | None], **where: Any) -> SlotState:
    """Create the slots of one layer in the layout that the policy needs. Further arguments are those of `SlotState`."""
    return SlotState(spec, params, layout=_layout(spec), **where)


def _layout(spec: PolicySpec) -> Layout:
    if spec.in_blocks:
        return Blocks()
    kept_beside = spec.compact or spec.selects
    lengths_differ = (spec.across and spec.when == "prefill") or spec.heads_differ
    return Flat() if lengths_differ and not kept_beside else SlotAfterSlot()


def introduce(states: Iterable[SlotState]) -> None:
    """Link the layers of a cache: they share warnings, joint decisions, and selections that some layers make for others.

    Raises:
        KvdslError: if a layer would reuse the selection of a layer that is not among them.
    """
    known: dict[int, SlotState] = {state.layer: state for state in states}
    warned: set[str] = set()
    together: Together[SlotState, Any] = Together()
    for state in known.values():
        state.warned = warned
        if state.spec.victims == "layers" or state.spec.across_layers:
            together.states.append(Weakly(state))
            state.together = together
    made: dict[int, Choices] = {}
    for layer, state in known.items():
        chooser = state.settings.chooser()
        if chooser < 0:
            continue
        if chooser not in known:
            raise KvdslError(
                f"layer {layer} would attend to what layer {chooser} chooses, but {state.spec.name} does not serve that one, whose "
                f"window is the model's own: name another layer in `from layers`"
            )
        state.choices = made.setdefault(chooser, Choices(chooser))
