"""A decode step of the kernels as an operator: `torch.compile` can trace it, and it does what the step does."""

from __future__ import annotations

import copy
import re

import pytest
import torch

import kvdsl
from kvdsl.runtime import graph
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.state.slots import SlotState
from tests.differential.test_compact import rope_of

pytestmark = pytest.mark.nightly

CPU = torch.device("cpu")


def call(tokens: int, seed: int) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, heads, tokens, 16, generator=generator) for heads in (4, 2, 2))
    real = None if tokens > 1 else torch.tensor([[True], [seed % 3 > 0]])
    return AttentionCall(query, key, value, real, 0.25, rope=rope_of(16))


@pytest.mark.parametrize(
    ("policy", "kv_dtype"),
    [
        ("roco", "model"), ("equip_h2o", "model"), ("roco_sparcas", "model"), ("scissorhands_window", "model"),
        ("roco_sparcas", "int4"),
    ],
)  # fmt: skip
def test_the_operator_does_what_a_step_does(policy: str, kv_dtype: str) -> None:
    spec = kvdsl.load(policy, kv_dtype=kv_dtype).spec
    server = choose(spec, "triton", CPU, torch.float32)
    selects = {"tokens": 6.0, "dims": 4.0} if spec.selects else {}
    ours = SlotState(spec, {"budget": 12.0, "recent": 4.0, **selects}, layer=2, layers=4)
    server.prefill(ours, call(20, 1))
    work = ours.workspace
    theirs = copy.deepcopy(ours)
    torch._dynamo.reset()
    compiled = torch.compile(graph.step, fullgraph=True, dynamic=False, backend="aot_eager")
    with torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(2):
            token = call(1, 2 + step)
            assert torch.equal(compiled(server, ours, token), server.decode(theirs, token))
    assert all(map(torch.equal, ours.tensors().values(), theirs.tensors().values()))
    assert ours.workspace is work


def test_nothing_is_copied_for_the_operator() -> None:
    """What inductor makes of a step hands the operator the cache's own tensors, and makes none."""
    from torch._inductor.utils import run_and_get_code

    spec = kvdsl.load("roco").spec
    server = choose(spec, "triton", CPU, torch.float32)
    state = SlotState(spec, {"budget": 12.0})
    server.prefill(state, call(20, 1))
    torch._dynamo.reset()
    step = torch.compile(graph.step, fullgraph=True, dynamic=False, backend="inductor")
    with torch.no_grad():
        _, (code,) = run_and_get_code(step, server, state, call(1, 2))
    body = code[code.index("def call(") : code.index("def get_args(")]
    assert body.count("torch.ops.kvdsl.decode.default(") == 1
    assert not re.findall(r"empty_strided|clone|copy_|fused", body)


def test_the_operator_says_what_it_does() -> None:
    """Its schema, its shapes and its functional form, as torch checks them."""
    spec = kvdsl.load("roco").spec
    server = choose(spec, "triton", CPU, torch.float32)
    state = SlotState(spec, {"budget": 12.0})
    server.prefill(state, call(20, 1))
    token = call(1, 2)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    arguments, constants = graph.arguments(server, state, token), graph.constants(state, token)
    torch.library.opcheck(torch.ops.kvdsl.decode.default, arguments, constants, test_utils=checks)
