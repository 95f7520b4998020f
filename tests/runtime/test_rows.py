"""Many caches in one call, as a serving engine has them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.cpu.backend import CpuBackend
from kvdsl.runtime.cpu.rows import Rows
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.state.layers import slot_state

ROPE = Rope(1.0 / 10_000 ** (torch.arange(16, dtype=torch.float64) / 16), "half")


@pytest.mark.parametrize(
    ("policy", "sinks", "rope", "kv_dtype"),
    [
        ("roco", None, None, "model"), ("roco", torch.linspace(-1, 1, 6), None, "model"), ("streaming_llm", None, ROPE, "model"),
        ("roco", None, None, "int8"), ("streaming_llm", None, ROPE, "int4"),
    ],
)  # fmt: skip
def test_many_caches_in_one_call_are_what_each_is_alone(
    policy: str, sinks: Tensor | None, rope: Rope | None, kv_dtype: str
) -> None:
    spec = kvdsl.load(policy, kv_dtype=kv_dtype).spec
    numbers = {"budget": 12.0} | ({"protect": None} if policy == "roco" else {})
    backend = CpuBackend(spec, torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(0)

    def call(tokens: int) -> AttentionCall:
        query, key, value = (torch.randn(1, heads, tokens, 32, generator=generator) for heads in (6, 2, 2))
        return AttentionCall(query, key, value, None, 0.2, sinks=sinks, rope=rope)

    rows, alone = Rows(backend), []
    for number, tokens in ((7, 20), (3, 5), (4, 30)):
        prompt = call(tokens)
        states = [slot_state(spec, numbers) for _ in range(2)]
        for state in states:
            state.reserve()
            backend.prefill(state, prompt)
        rows.know(number, states[0], call(1), longest=40)
        alone.append((number, states[1]))
    for _ in range(5):
        query, key, value = (torch.randn(5, heads, 32, generator=generator) for heads in (6, 2, 2))
        out = torch.zeros(5, 6, 32)
        rows.decode(torch.tensor([number for number, _ in alone]), torch.tensor([4, 0, 2]), query, key, value, out, sinks)
        for (_, state), token in zip(alone, (4, 0, 2), strict=True):
            one = AttentionCall(*(x[token][None, :, None] for x in (query, key, value)), None, 0.2, sinks=sinks, rope=rope)
            assert torch.equal(backend.decode(state, one)[0, 0], out[token])
        assert not out[[1, 3]].any()
