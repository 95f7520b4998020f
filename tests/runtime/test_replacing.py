"""Several tokens leave and as many come in, in place: on every backend alike, and the steps after that see it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall, Backend
from kvdsl.runtime.backends import choose
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.state.order import free, ranks
from kvdsl.runtime.state.slots import SlotState
from tests.quick import few

BATCH, HEADS, DIM, LIVE = 2, 3, 16, 40
BACKENDS = ("torch", "cpu")
ROPES = {"equip_h2o": "cached"}
GIVEN = {
    "h2o": {"recent": 4.0},
    "vatp_h2o": {"recent": 4.0, "sinks": 2.0},
    "equip_h2o": {"recent": 4.0},
    "streaming_llm": {},
    "ema": {},
}
EMA = "kv 1\npolicy Ema {\n  param budget = 40\n  score ema(attn, 0.9)\n  keep last 4\n}\n"
"""Its column begins with a token's own query, which a token that only takes a place never makes."""


class Run:
    """A full cache of a policy and a backend to work on it."""

    def __init__(self, policy: str, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.spec, self.dtype = (
            (kvdsl.compile(EMA) if policy == "ema" else kvdsl.load(policy, rope=ROPES.get(policy))).spec,
            dtype,
        )
        self.backend: Backend = choose(self.spec, name, torch.device("cpu"), dtype)
        self.state = SlotState(self.spec, {"budget": float(LIVE), **GIVEN[policy]})
        self.make = torch.Generator().manual_seed(1)
        self.rope = Rope(100.0 ** -(torch.arange(DIM // 2, dtype=torch.float64) / (DIM // 2)), "half")
        self.backend.prefill(self.state, self.call(60))
        self.decode(9)

    def call(self, tokens: int, real: Tensor | None = None) -> AttentionCall:
        key, value = torch.randn(2, BATCH, HEADS, tokens, DIM, generator=self.make).to(self.dtype)
        query = torch.randn(BATCH, HEADS * 2, tokens, DIM, generator=self.make).to(self.dtype)
        return AttentionCall(query, key, value, real, 0.25, rope=self.rope)

    def decode(self, tokens: int) -> Tensor:
        return self.backend.decode(self.state, self.call(tokens))

    def some_live(self, tokens: int) -> Tensor:
        """Different slots that hold a token, any of every head: [batch, kv_heads, tokens]."""
        chance = torch.rand(self.state.position.shape, generator=self.make).masked_fill(self.state.position < 0, -1.0)
        return chance.topk(tokens).indices


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", few(GIVEN, "h2o"))
def test_backends_replace_alike(policy: str, dtype: torch.dtype, padded: bool) -> None:
    runs = [Run(policy, name, dtype) for name in BACKENDS]
    for run in runs:
        before = copy.copy(run.state).position.clone()
        slots, real = run.some_live(7), torch.rand(BATCH, 7, generator=run.make) < 0.6 if padded else None
        call, seen = run.call(7, real), run.state.seen.clone()
        run.backend.replace(run.state, slots, call)
        _check_replaced(run.state, before, seen, slots, call)
    ours, theirs = runs
    for (name, our), their in zip(ours.state.tensors().items(), theirs.state.tensors().values(), strict=True):
        assert torch.allclose(our, their, atol=1e-4), name
    assert torch.allclose(ours.decode(3).float(), theirs.decode(3).float(), atol=2e-5 if dtype == torch.float32 else 2e-2)


def _check_replaced(state: SlotState, before: Tensor, seen: Tensor, slots: Tensor, call: AttentionCall) -> None:
    real = torch.ones(BATCH, 7, dtype=torch.bool) if call.real is None else call.real
    expected = before.clone()
    for b in range(BATCH):
        position = int(seen[b])
        for t in range(7):
            if not real[b, t]:
                continue
            for h in range(HEADS):
                slot = slots[b, h, t]
                expected[b, h, slot] = position
                assert torch.equal(state.keys[b, h, slot], call.key[b, h, t])
                assert torch.equal(state.values[b, h, slot], call.value[b, h, t])
                for column, rule in zip(state.columns, state.spec.column_rules, strict=True):
                    own = call.value[b, h, t].float().abs().sum()  # norm1(v) is the only such column here
                    torch.testing.assert_close(column[b, h, slot], own if rule == "token" else torch.tensor(0.0))
            position += 1
        assert int(state.seen[b]) == position
    assert torch.equal(state.position, expected)
    if state.spec.compact:
        assert torch.equal(state.rank, ranks(state.position))


@pytest.mark.parametrize("name", BACKENDS)
def test_what_cannot_be_replaced(name: str) -> None:
    run = Run("h2o", name)
    slots, before = run.some_live(3), run.state.position.clone()
    free = slots.clone()
    free[0, 0, 0] = int((run.state.position[0, 0] < 0).int().argmax())
    for wrong, message in (
        (slots[..., :2], "name as many as there are tokens"),
        (slots[..., :1].expand_as(slots), "named twice"),
        (free, "is free"),
        (slots - 1000, "does not exist"),
        (slots + run.state.slots, "does not exist"),
    ):
        with pytest.raises(KvdslError, match=message):
            run.backend.replace(run.state, wrong, run.call(3))
    assert torch.equal(run.state.position, before)


def test_freed_slots_are_filled_by_the_next_tokens() -> None:
    """Evict some by hand; a forward of as many tokens fills their slots, and nobody else leaves."""
    for policy in ("equip_h2o", "h2o"):
        outs = []
        for name in BACKENDS:
            run = Run(policy, name)
            leaving = torch.zeros_like(run.state.position, dtype=torch.bool).scatter_(2, run.some_live(5), True)
            stay = run.state.position.masked_fill(leaving, -1)
            free(run.state.position, run.state.rank if run.state.spec.compact else None, leaving)
            outs.append(run.decode(5))
            assert bool(((run.state.position == stay) | (stay < 0)).all())
            assert bool(((run.state.position >= 0).sum(-1) == LIVE).all())
        assert torch.allclose(*outs, atol=2e-5)
