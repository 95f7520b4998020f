"""Far into a text: positions that float32 cannot tell apart, and the last that 32 bits hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.hf.checks import MOST_TOKENS
from kvdsl.runtime.hf.text import Text
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.slots import SlotState
from tests.hf import zoo

pytestmark = pytest.mark.nightly

HEADS, DIM, STEPS = 2, 16, 25
AGES = 'kv 1\n\npolicy Ages {\n  "By lot and by age."\n  param budget = 12\n  score random() - (age % 3) * 2\n  keep last 2\n}\n'
RINGS = (
    'kv 1\n\npolicy Rings {\n  "By what few queries say."\n  param budget = 12\n  score max(attn over last 3 queries)\n}\n'
)


def far(policy: str, start: int, backend: str) -> tuple[SlotState, torch.Tensor]:
    """A cache some tokens before `start`, and after some more on a backend."""
    spec = kvdsl.load(policy).spec
    state = slot_state(spec, {"budget": 12.0})
    server = choose(spec, backend, torch.device("cpu"), torch.float32)
    rope = Rope(100.0 ** -(torch.arange(DIM // 2, dtype=torch.float64) / (DIM // 2)), "half")
    make = torch.Generator().manual_seed(1)

    def call(tokens: int) -> AttentionCall:
        key, value = torch.randn(2, 1, HEADS, tokens, DIM, generator=make)
        return AttentionCall(torch.randn(1, 2 * HEADS, tokens, DIM, generator=make), key, value, None, 0.25, rope=rope)

    server.prefill(state, call(20))
    state.decoding = True
    state.position.add_(torch.where(state.position >= 0, start - 20, 0).int())
    state.seen.fill_(start)
    return state, torch.cat([server.decode(state, call(1)) for _ in range(STEPS)], 1)


FAR = [
    (policy, start)
    for policy in ("ages", "rings", "roco", "streaming_llm")
    for start in (2**24 - 10, 2**26 + 1, MOST_TOKENS - STEPS)
]


@pytest.mark.parametrize(("policy", "start"), FAR)
def test_backends_agree_where_float32_cannot_count(policy: str, start: int, tmp_path: Path) -> None:
    for name, text in (("ages", AGES), ("rings", RINGS)):
        (tmp_path / f"{name}.kv").write_text(text, encoding="utf-8")
    named = str(tmp_path / f"{policy}.kv") if policy in ("ages", "rings") else policy
    (state, out), (other, expected) = (far(named, start, backend) for backend in ("cpu", "torch"))
    assert torch.equal(state.position.sort(-1).values, other.position.sort(-1).values)
    assert int(state.position.max()) == start + STEPS - 1
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_text_that_32_bits_cannot_count_is_refused(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Text, "note", lambda *_: None)  # of such a text the ids alone would take 8 GB
    model = zoo.model("llama")
    cache = kvdsl.load("roco")(model, budget=8, backend=backend)
    token = torch.tensor([[5]])
    with torch.no_grad():
        model(torch.arange(1, 20)[None], **with_cache(cache))
        for layer in cache.layers:
            layer.counted = MOST_TOKENS - 1
            layer.state.position.add_(torch.where(layer.state.position >= 0, MOST_TOKENS - 1 - 19, 0).int())
            layer.state.seen.fill_(MOST_TOKENS - 1)
        model(token, **with_cache(cache))
        with pytest.raises(KvdslError, match=r"counts 2,147,483,647 tokens.*reset"):
            model(token, **with_cache(cache))
        assert [int(layer.state.position.max()) for layer in cache.layers] == [MOST_TOKENS - 1] * len(cache.layers)
        cache.reset()
        model(token, **with_cache(cache))
