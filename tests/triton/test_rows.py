"""Some caches of many in one step, as a serving engine has them: the rows of one state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.gpu.backend import TritonBackend
from kvdsl.runtime.gpu.rows import Rows
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.slots import SlotState
from tests.texts import spec_of

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("small_blocks")]

CPU = torch.device("cpu")
HEADS, GROUP, DIM = 2, 3, 32
ROPE = Rope(1.0 / 10_000 ** (torch.arange(DIM // 2, dtype=torch.float64) / (DIM // 2)), "half")
CACHES = 7
PROMPTS = {1: 30, 2: 5, 4: 50, 6: 13}
"""Tokens of their prompts, by the caches' numbers; others are somebody's who has gone."""

SHIPPED: dict[str, dict[str, float]] = {
    "h2o": {"budget": 12, "recent": 4},
    "roco": {"budget": 12},
    "tova": {"budget": 12},
    "snapkv": {"budget": 34},
    "scissorhands": {"budget": 12, "recent": 4, "m": 4},
    "streaming_llm": {"budget": 12},
    "equip_h2o": {"budget": 12, "recent": 4},
    "sparcas": {"budget": 16},
    "quest": {"budget": 16, "page": 4},
    "h2o, int8": {"budget": 12, "recent": 4},
    "equip_streaming, int4": {"budget": 12},
    "sparcas, fp8": {"budget": 16},
}
MEMORY: dict[str, dict[str, str]] = {
    "equip_h2o": {"rope": "cached"},
    "h2o, int8": {"kv_dtype": "int8"},
    "equip_streaming, int4": {"kv_dtype": "int4"},
    "sparcas, fp8": {"kv_dtype": "fp8"},
}
"""Options of memory layout, by the case."""
WRITTEN = {
    "a hard cap": "param budget = 12\nscore sum(attn)\nkeep last 3\ncap hard",
    "heads agree": "param budget = 12\nvictims shared by heads\nscore sum(attn)\npositions compact\ntrigger overflow >= 2",
    "heads agree, a hard cap": "param budget = 12\nvictims shared by heads\nscore sum(attn)\ncap hard",
    "of the token": "param budget = 12\nscore sum(attn) * mean(abs(v) over dims) + age / 1000 + random()",
}


def call(tokens: int, batch: int, generator: torch.Generator, real: Tensor | None = None) -> AttentionCall:
    query, key, value = (
        torch.randn(batch, heads, tokens, DIM, generator=generator) for heads in (HEADS * GROUP, HEADS, HEADS)
    )
    return AttentionCall(query, key, value, real, 0.2, rope=ROPE)


def empty(spec: PolicySpec, given: dict[str, Any]) -> SlotState:
    state = slot_state(spec, dict.fromkeys(spec.params) | given)
    state.room.longest = 64
    state.reserve()
    return state


def caches(backend: TritonBackend, spec: PolicySpec, given: dict[str, Any]) -> tuple[Rows, SlotState]:
    """What every cache was left by somebody: numbers that must not be seen."""
    state = empty(spec, given)
    backend.prefill(state, call(40, CACHES, torch.Generator().manual_seed(9)))
    rows, before = Rows(backend, state), {name: tensor.clone() for name, tensor in state.tensors().items()}
    rows.make_ready(6, call(1, 1, torch.Generator()))
    assert all(torch.equal(tensor.nan_to_num(), before[name].nan_to_num()) for name, tensor in state.tensors().items())
    return rows, state


def of_rows(one: AttentionCall, rows: list[int]) -> AttentionCall:
    real = None if one.real is None else one.real[rows]
    return one._replace(query=one.query[rows], key=one.key[rows], value=one.value[rows], real=real)


@pytest.mark.parametrize("name", [*SHIPPED, *WRITTEN])
def test_some_caches_of_many_are_what_each_is_alone(name: str) -> None:
    policy = name.partition(",")[0]
    spec: PolicySpec = kvdsl.load(policy, **MEMORY.get(name, {})).spec if name in SHIPPED else spec_of(WRITTEN[name])
    given = SHIPPED.get(name, {"budget": 12})
    backend, generator = TritonBackend(spec, CPU, torch.float32), torch.Generator().manual_seed(0)
    rows, state = caches(backend, spec, given)
    alone: dict[int, SlotState] = {}
    for number, tokens in PROMPTS.items():
        prompt = call(tokens, 1, generator)
        left, alone[number] = empty(spec, given), empty(spec, given)
        for one in (left, alone[number]):
            backend.prefill(one, prompt)
        left.room.limit = left.slots + 15  # on a GPU slots are a multiple of 16, and a page's were counted on a CPU
        left.extend()
        rows.put(torch.tensor([number]), left)
    asleep = state.position[[0, 3, 5]].clone()
    for numbers in ([4, 1, 6, 2], [6, 2], [1, 4, 2], [2], [6, 1, 4, 2]) * 2:
        which = torch.tensor([*numbers, 0, 0], dtype=torch.int32)  # behind them nobody, as in a captured graph
        real = torch.tensor([[True]] * len(numbers) + [[False]] * 2)
        token = call(1, len(which), generator, real)
        out = rows.decode(which, token)
        assert not out[len(numbers) :].any()
        for row, number in enumerate(numbers):
            wanted = backend.decode(alone[number], of_rows(token, [row]))
            torch.testing.assert_close(out[row : row + 1], wanted, rtol=1e-5, atol=1e-6)
    for number, one in alone.items():
        held = min(state.slots, one.slots)
        assert torch.equal(state.position[number, :, :held], one.position[0, :, :held])
        assert (state.position[number, :, held:] < 0).all()
        assert state.seen[number] == one.seen[0]
    assert torch.equal(state.position[[0, 3, 5]], asleep)


def test_layers_work_in_the_same() -> None:
    """One after the other; each is as it is alone, and nothing new is made once both are ready."""
    spec: PolicySpec = kvdsl.load("h2o").spec
    backend, shared, generator = TritonBackend(spec, CPU, torch.float32), {}, torch.Generator().manual_seed(3)
    layers, alone = [], []
    for _ in range(2):
        state, own = empty(spec, {"budget": 12}), empty(spec, {"budget": 12})
        prompt = call(40, 3, generator)
        for one in (state, own):
            backend.prefill(one, prompt)
        layers.append(Rows(backend, state, shared))
        layers[-1].make_ready(3, call(1, 1, generator))
        alone.append(own)
    assert [rows for rows, _ in shared] == [1, 2, 4]
    known = {id(tensor) for tensors in shared.values() for tensor in tensors.values()}
    for _ in range(3):
        for rows, own in zip(layers, alone, strict=True):
            token = call(1, 3, generator)
            out = rows.decode(torch.arange(3, dtype=torch.int32), token)
            torch.testing.assert_close(out, backend.decode(own, token), rtol=1e-5, atol=1e-6)
            assert {id(x) for work in rows._works._made.values() for x in work.tensors.values()} == known


def test_caches_whose_slots_have_no_place_of_their_own_are_refused() -> None:
    spec: PolicySpec = kvdsl.load("full").spec
    backend = TritonBackend(spec, CPU, torch.float32)
    state = slot_state(spec, {})
    backend.prefill(state, call(4, 2, torch.Generator().manual_seed(0)))
    with pytest.raises(KvdslError, match="no places that are known before a request is"):
        Rows(backend, state)


def test_a_prompt_that_a_cache_cannot_hold_is_refused() -> None:
    spec: PolicySpec = kvdsl.load("h2o").spec
    backend, generator = TritonBackend(spec, CPU, torch.float32), torch.Generator().manual_seed(0)
    rows, _ = caches(backend, spec, {"budget": 12, "recent": 4})
    left = empty(spec, {"budget": 40, "recent": 4})
    backend.prefill(left, call(30, 1, generator))
    with pytest.raises(KvdslError, match="has kept 30 tokens of a prompt, and a page holds 1"):
        rows.put(torch.tensor([1]), left)
