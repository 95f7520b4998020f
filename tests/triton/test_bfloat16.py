"""On a GPU matrices are multiplied in the model's dtype; elsewhere in these tests in float32, which Triton's interpreter has.

Queries and keys in bfloat16 are multiplied exactly in either, so that nothing of what the policy sees may differ; keys that were turned
are the sum of two such numbers, which leaves 16 of their bits. Attention's weights lose bits when they meet the values.
"""

from __future__ import annotations

import pytest
import torch
import triton.language as tl

import kvdsl
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.gpu.backend import TritonBackend
from kvdsl.runtime.state.slots import SlotState
from kvdsl_lab.bench.decode import rotation
from tests.quick import few

HEADS, GROUP, DIM, PROMPT, STEPS = 2, 2, 16, 48, 4
NUMBERS: dict[str, dict[str, float]] = {
    "snapkv": {"budget": 40},
    "sparcas": {"tokens": 12},
    "quest": {"tokens": 12, "page_size": 4},
}


@pytest.mark.parametrize(
    "policy", few(["full", "h2o", "roco", "snapkv", "streaming_llm", "equip_h2o", "sparcas", "quest"], "roco")
)
def test_a_policy_sees_the_same(policy: str) -> None:
    spec = kvdsl.load(policy).spec
    states = [SlotState(spec, NUMBERS.get(policy, {"budget": 16} if "budget" in spec.params else {})) for _ in range(2)]
    servers = [choose(spec, "triton", torch.device("cpu"), torch.bfloat16) for _ in range(2)]
    assert all(isinstance(server, TritonBackend) for server in servers)
    servers[1]._dot = tl.bfloat16  # type: ignore[attr-defined]
    rope = rotation(DIM) if spec.compact else None
    torch.manual_seed(0)
    for tokens in (PROMPT, *[1] * STEPS):
        query, key, value = (torch.randn(1, n, tokens, DIM, dtype=torch.bfloat16) for n in (HEADS * GROUP, HEADS, HEADS))
        call = AttentionCall(query, key, value, None, DIM**-0.5, rope=rope)
        out, same = (
            (server.decode if tokens == 1 else server.prefill)(state, call)
            for server, state in zip(servers, states, strict=True)
        )
        near = 2**-14 if spec.compact else 0.0
        for name, tensor in states[0].tensors().items():
            tolerance = near if name == "columns" else 0.0
            torch.testing.assert_close(states[1].tensors()[name], tensor, rtol=tolerance, atol=tolerance, equal_nan=True)
        torch.testing.assert_close(same.float(), out.float(), rtol=2**-7, atol=2**-7)
