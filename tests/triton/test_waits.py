"""The host never waits for the device in a step, which could not be captured. For prompts see `test_prompt_launches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import kvdsl
from kvdsl.runtime import graph
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.hf import checks
from kvdsl.runtime.hf.layer import SlotLayer
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.state.layers import slot_state
from kvdsl_lab.bench.decode import rotation
from kvdsl_lab.bench.shifting import ShiftedCache, twin
from scripts.gpu.setting import TOY, Setting
from scripts.gpu.whole import tiny
from tests.differential.test_random import POLICIES
from tests.quick import few

from .waits import Waits

pytestmark = pytest.mark.nightly

CPU = torch.device("cpu")
HEADS, GROUP, DIM, PROMPT = 1, 2, 16, 40


def call(tokens: int) -> AttentionCall:
    query, key, value = (torch.randn(2, heads, tokens, DIM) for heads in (HEADS * GROUP, HEADS, HEADS))
    return AttentionCall(query, key, value, None, 0.25, rope=rotation(DIM))


def waiting(call: AttentionCall, patch: pytest.MonkeyPatch, *others: torch.Tensor) -> Waits:
    return Waits(patch, (call.query, call.key, call.value, *others))


GIVEN = {"vatp_h2o": {"budget": 39.0}, "pyramidkv": {"budget": 640.0}, "lazy_answer": {"budget": 64.0}}
"""For policies that protect more tokens than 36."""


@pytest.mark.parametrize("policy", few(POLICIES, "roco", "streaming_llm", "quest", "sparcas", "adakv"))
def test_a_step_never_waits(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even the second, when all that it works in is there."""
    spec = kvdsl.load(policy).spec
    given = GIVEN.get(policy, {"budget": 36.0} if "budget" in spec.params else {})
    state = slot_state(spec, given, layer=2, layers=4)
    state.room.reserves = True
    server = choose(spec, "triton", CPU, torch.float32)
    server.prefill(state, call(PROMPT))
    server.decode(state, call(1))
    token = call(1)
    with torch.no_grad(), waiting(token, monkeypatch, *state.tensors().values(), *state.workspace.tensors.values()) as waits:
        server.decode(state, token)
    assert not waits.lines, "\n".join(waits.lines)


@pytest.mark.parametrize("policy", few(["roco", "roco_sparcas", "equip_h2o"], "roco"))
def test_a_compiled_step_never_waits(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the operator, which serves a state of its own that adopts the tensors."""
    spec = kvdsl.load(policy).spec
    state = slot_state(spec, {"budget": 36.0}, layer=2, layers=4)
    state.room.reserves = True
    server = choose(spec, "triton", CPU, torch.float32)
    server.prefill(state, call(PROMPT))
    token = call(1)
    with torch.no_grad(), waiting(token, monkeypatch, *state.tensors().values(), *state.workspace.tensors.values()) as waits:
        graph._decode(*graph.arguments(server, state, token), **graph.constants(state, token))
    assert not waits.lines, "\n".join(waits.lines)


@pytest.mark.parametrize("policy", few(["streaming_llm", "equip_h2o"], "equip_h2o"))
def test_a_whole_token_never_waits(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a graph can have it, in place and shifted; what cannot be captured does wait: published H2O, which chooses by a mask."""
    for check in ("check_text", "check_counting"):  # on a GPU they look at prompts only
        monkeypatch.setattr(checks, check, lambda *_: None)
    model = tiny(Setting("cpu", TOY, (), Path()))
    shifted, cls, given = twin(model), kvdsl.load(policy), {"budget": 16}
    ways = (
        (model, cls(model, backend="triton", **given), True),
        (shifted, ShiftedCache(shifted, cls.spec, given, fresh=False), True),
        (shifted, ShiftedCache(shifted, cls.spec, given, fresh=True), not cls.spec.reads_attention),
    )
    for way, cache, captures in ways:
        with torch.inference_mode():
            step = _token(way, cache)
            step(), step()
            with Waits(monkeypatch, [*way.parameters(), *way.buffers(), *_held(cache)]) as waits:
                step()
        assert captures == (not waits.lines), "\n".join(waits.lines)


def _token(model: Any, cache: Any) -> Callable[[], torch.Tensor]:
    """A token more of two rows, behind one prompt that they share and that fills the cache: from its second call on, one leaves."""
    forward = partial(model, **with_cache(cache), use_cache=True, logits_to_keep=1)
    newest = forward(input_ids=torch.randint(1, 128, (1, 16))).logits[0, -1].topk(2).indices[:, None]
    cache.batch_repeat_interleave(2)
    return lambda: newest.copy_(forward(input_ids=newest).logits[:, -1].argmax(-1, keepdim=True))


def _held(cache: Any) -> Iterator[torch.Tensor]:
    """The tensors of a cache, ours or a shifted one."""
    for layer in cache.layers:
        if isinstance(layer, SlotLayer):
            yield from (*layer.state.tensors().values(), *layer.state.workspace.tensors.values())
        else:
            yield from (x for x in (*layer.tensors(), layer.victim) if isinstance(x, torch.Tensor))


def test_what_counts_as_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    there, here = torch.ones(3), torch.ones(3)
    with Waits(monkeypatch, [there]) as waits:
        assert bool((here > 0).all()) and here.sum().cpu() == 3
        assert not waits.lines
        moved = (there * here).cpu()
        assert float(moved.sum()) == 3 and len(waits.lines) == 1
        assert bool((there > 0).all()) and there.nonzero().shape == (3, 1) and len(there[there > 0]) == 3
        assert there.tolist() == [1, 1, 1] and int(there.sum()) == 3
    assert len(waits.lines) == 6
