"""Policies that attend to a selection: a steady state that refreshes its sketch on schedule, and where a step's time goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count, cycle

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import Backend
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch import selection
from kvdsl.runtime.torch.view import row_view
from kvdsl_lab.bench.baselines import Token

LAYERS = 32
"""Layers of the model of which one is measured."""

_LONGEST_PERIOD = 1024
_STAGES = {
    "place": "place_ms", "renew": "sketch_ms", "look": "partial_scores_ms", "choose": "top_k_ms", "attend": "attention_ms",
    "finish": "finish_ms",
}  # fmt: skip
"""The kernel's stages, as SparCas' figure 5 names them."""


def first_selecting_layer(spec: PolicySpec, given: Mapping[str, float | None], prompt: Tensor) -> int:
    """A layer in which the policy selects; 0 of a policy that never does.

    Raises:
        KvdslError: if it selects in none of so many layers.
    """
    if not spec.selects:
        return 0
    for layer in range(LAYERS):
        state = SlotState(spec, given, layer=layer, layers=LAYERS)
        if bool(state.settings.named(state.settings.resolve(prompt))["select"].isfinite().any()):
            return layer
    raise KvdslError(f"`{spec.stem}` selects in none of {LAYERS} layers")


def sketch(state: SlotState, query: Tensor) -> None:
    """Give a state that was filled by hand the sketch that its prompt's last query, [batch, query_heads, 1, key_dim], leaves."""
    kept = state.in_slots()
    row = row_view(state, kept, query, state.seen[:, None] - 1, state.numbers)
    width = selection.sketch_width(state, state.numbers, state.keys.shape[-1])
    state.sketch = selection.sketched(state, row, state.numbers, width)


def period(state: SlotState) -> int:
    """After how many steps every one of them has cost what it costs: the refresh is one of so many."""
    if not state.spec.sketches:
        return 1
    return min(_LONGEST_PERIOD, int(state.settings.named(state.numbers)["sketch_every"].max()))


def on_schedule(state: SlotState, step: Callable[[Token], Tensor]) -> Callable[[Token], Tensor]:
    """The same step, of which every so many-th refreshes the sketch although the token is taken back each time."""
    if not state.spec.sketches:
        return step
    newest, turns = int(state.seen[0]), count(1)

    def scheduled(token: Token) -> Tensor:
        state.prompt.fill_(newest + 1 - next(turns))
        return step(token)

    return scheduled


def breakdown(backend: Backend, state: SlotState, step: Callable[[Token], Tensor], tokens: list[Token]) -> dict[str, float]:
    """Milliseconds a step of every stage, the mean over the threads and over whole periods; nothing from torch's backend."""
    if backend.name != "cpu":
        return {}
    from kvdsl.runtime.cpu.backend import STAGES, CpuBackend

    assert isinstance(backend, CpuBackend)
    steps = max(64, period(state))
    endless = cycle(tokens)
    backend.seconds = torch.zeros(len(STAGES), dtype=torch.float64)
    for _ in range(steps):
        step(next(endless))
    spent = backend.seconds * 1e3 / steps / torch.get_num_threads()
    backend.seconds = None
    return {_STAGES[stage]: round(ms, 4) for stage, ms in zip(STAGES, spent.tolist(), strict=True)}
