"""A step's launches, prepared: what a launcher is given is what Triton would have given it. A stub of a GPU's driver, under which
kernels are compiled and not run, writes down what that is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.gpu import backend as triton_backend
from kvdsl_lab.bench.decode import Shape
from tests.triton.stub import BEFORE_ARGUMENTS, served, stub_driver

pytestmark = pytest.mark.nightly

SHAPE = Shape(batch=1, kv_heads=2, group=4, head_dim=64, live=100, dtype="fp16")


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """What every launch was given, tensors by their addresses, and its grid."""
    seen: list[list[Any]] = []

    def told(*passed: Any) -> None:
        arguments = passed[BEFORE_ARGUMENTS:]
        seen.append([x.data_ptr() if isinstance(x, Tensor) else x for x in arguments] + [passed[:3]])

    stub_driver(monkeypatch, told)
    return seen


def but_for_outputs(launches: list[list[Any]], outputs: list[Tensor]) -> list[list[Any]]:
    addresses = {out.data_ptr() for out in outputs}
    return [["out" if isinstance(x, int) and x in addresses else x for x in launch] for launch in launches]


@pytest.mark.parametrize("policy", ["roco", "streaming_llm", "sparcas"])
def test_launchers_are_given_the_same(policy: str, given: list[list[Any]]) -> None:
    server, state, calls = served(policy, SHAPE)
    outputs = [server.decode(state, calls[0])]
    first = triton_backend._prepared[state.workspace]
    given.clear()
    outputs.append(server.decode(state, calls[1]))
    assert triton_backend._prepared[state.workspace] is first
    ours = but_for_outputs(given, outputs)
    given.clear()
    triton_backend._prepared.clear()
    outputs.append(server.decode(state, calls[1]))
    assert len(ours) == (4 if policy == "sparcas" else 2)
    assert ours == but_for_outputs(given, outputs)


@pytest.mark.parametrize("changed", ["tensor", "scaling", "alignment", "padding", "nothing"])
def test_what_was_prepared_holds_for_its_kind(changed: str, given: list[list[Any]]) -> None:
    server, state, calls = served("roco", SHAPE)
    server.decode(state, calls[0])
    first, call = triton_backend._prepared[state.workspace], calls[1]
    if changed == "tensor":
        state.columns = state.columns.clone()
    elif changed == "scaling":
        call = AttentionCall(call.query, call.key, call.value, None, 0.25)
    elif changed == "alignment":
        moved = torch.empty(call.query.numel() + 1, dtype=call.query.dtype)[1:].view(call.query.shape).copy_(call.query)
        call = AttentionCall(moved, call.key, call.value, None, 0.125)
    elif changed == "padding":
        call = AttentionCall(call.query, call.key, call.value, torch.ones(1, 1, dtype=torch.bool), 0.125)
    server.decode(state, call)
    assert (triton_backend._prepared[state.workspace] is first) == (changed in ("nothing", "padding"))
