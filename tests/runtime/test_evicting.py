"""Whom a prompt loses is the same whether C++ or torch finds it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvdsl.runtime.call import AttentionCall
from kvdsl.runtime.cpu.backend import CpuBackend
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.layouts import slot_state
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch import eviction
from tests.quick import few
from tests.texts import spec_of

TOKENS = 90

POLICIES = {
    "sum": "param budget = 24\nscore sum(attn)\nkeep last 8",
    "tops": "param budget = 24\nscore mean(attn)\nkeep top 10 by std(attn)\nkeep top 5 by norm1(v)\nkeep first 2",
    "where": "param budget = 24\nscore norm2(k)\nkeep where age < 4 or position % 16 == 3\nkeep first 1",
    "all protected": "param budget = 8\nscore sum(attn)\nkeep where age < 40",
    "equal": "param budget = 24\nscore max(attn) > 0.1",
    "not a number": "param budget = 24\nscore log(mean(attn) - 0.02)",
    "ring": "param budget = 24\nscore sum(attn over last 8 queries)\nkeep last 8",
    "ring, the prompt only": "param budget = 24\nscore std(attn over last 8 queries)\nkeep last 8\nwhen prefill",
    "random": "param budget = 24\nscore random()",
    "over slots": "param budget = 24\nscore where(mean(attn) > mean(mean(attn) over slots), age, 0)",
    "lazily": "param budget = 24\nscore mean(attn)\ntrigger overflow >= 30\nslack 20\nmax_drop 4",
    "compact": "param budget = 24\nscore sum(attn)\nkeep first 4\npositions compact",
    "in blocks": "param budget = 24\nscore mean(attn)\nkeep last 4\nprefill blocks of 16",
    "a rate": "param rate = 0.3\nbudget rate * prompt\nscore mean(attn)\nkeep last 1",
}


def call(padding: str, dtype: torch.dtype) -> AttentionCall:
    make = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(3, heads, TOKENS, 16, generator=make).to(dtype) for heads in (6, 2, 2))
    real = torch.ones(3, TOKENS, dtype=torch.bool)
    if padding == "left":
        real[1, :50], real[2, :85] = False, False
    elif padding == "right":
        real[1, 50:], real[2, 5:] = False, False
    return AttentionCall(query, key, value, None if padding == "none" else real, 0.25)


def left(spec: PolicySpec, whole: AttentionCall) -> SlotState:
    """What three forwards leave, each a prompt of its own, the last of fewer tokens than a ring has places."""
    state = slot_state(spec, {}, layer=0, layers=1, seed=7)
    backend = CpuBackend(spec, torch.device("cpu"), whole.key.dtype)
    for part in (slice(0, 60), slice(60, 85), slice(85, TOKENS)):
        backend.prefill(state, whole.part(part))
    return state


@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16], torch.float32), ids=["fp32", "bf16"])
@pytest.mark.parametrize("padding", few(["none", "left", "right"], "left"))
@pytest.mark.parametrize("name", POLICIES)
def test_the_same_leave(monkeypatch: pytest.MonkeyPatch, name: str, padding: str, dtype: torch.dtype) -> None:
    spec, whole = spec_of(POLICIES[name]), call(padding, dtype)
    monkeypatch.setattr(eviction, "evict", lambda *_: pytest.fail("torch evicts"))
    found = left(spec, whole)
    monkeypatch.undo()
    monkeypatch.setattr(CpuBackend, "_evict", lambda self, held: False)
    expected = left(spec, whole)
    same(found, expected)
    lost = int(found.seen.max()) - int((found.position >= 0).sum(-1).max())
    assert lost > 0, "nobody has left: the comparison says nothing"


def same(found: SlotState, expected: SlotState) -> None:
    tensors: dict[str, Tensor] = expected.tensors()
    held = expected.position >= 0
    for name, tensor in found.tensors().items():
        other = tensors[name]
        if name in ("key_pool", "value_pool"):
            assert torch.equal(tensor[held], other[held]), name
        elif name == "columns":
            assert torch.equal(tensor[:, held].nan_to_num(nan=-7.0), other[:, held].nan_to_num(nan=-7.0)), name
        else:
            assert torch.equal(tensor, other), name


def test_torch_evicts_where_heads_agree() -> None:
    """And where a score is beyond C++ that only a prompt is asked for."""
    for text in (
        "param budget = 24\nscore sum(attn)\nwhen prefill\nvictims shared by heads",
        "param budget = 24\nscore leverage(k, 1)\nwhen prefill",
    ):
        assert "KVDSL_ENTRY(settle)" not in spec_of(text).cpu_source.read_text(), text
