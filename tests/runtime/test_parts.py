"""A prompt that comes in parts leaves what it leaves as a whole."""

from __future__ import annotations

import pytest
import torch

import kvdsl
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.slots import SlotState
from tests.quick import thinned
from tests.texts import spec_of

TOKENS = 90
CUTS = (1, 2, 40, 41)
"""Where one part ends and the next begins; one of them has a single token."""

POLICIES = ["h2o", "roco", "tova", "snapkv", "scissorhands", "a2sf", "adakv", "streaming_llm", "keydiff", "keydiff_blocks"]


def call(real: torch.Tensor | None = None) -> AttentionCall:
    make = torch.Generator().manual_seed(1)
    batch = 1 if real is None else len(real)
    query, key, value = (torch.randn(batch, heads, TOKENS, 16, generator=make) for heads in (6, 2, 2))
    return AttentionCall(query, key, value, real, 0.25)


IN_BLOCKS = "param budget = 20\nscore mean(attn over last 32 queries)\nwhen prefill\nprefill blocks of 30"
"""A block ends within a part, and its ring began in the part before."""


def served(policy: str, backend: str, whole: AttentionCall, cuts: tuple[int, ...]) -> tuple[SlotState, torch.Tensor]:
    spec = spec_of(policy) if policy == IN_BLOCKS else kvdsl.load(policy).spec
    given = {"budget": 40} if "budget" in spec.params and policy != IN_BLOCKS else {}
    state = slot_state(spec, given, layer=0, layers=1)
    state.expected = TOKENS
    server = choose(spec, backend, torch.device("cpu"), torch.float32)
    outs = []
    for first, last in zip((0, *cuts), (*cuts, TOKENS), strict=True):
        part = whole.part(slice(first, last))._replace(goes_on=last < TOKENS)
        outs.append(server.prefill(state, part))
    return state, torch.cat(outs, 1)


def kept(state: SlotState) -> list[list[list[int]]]:
    return [[sorted(head[head >= 0].tolist()) for head in row] for row in state.position]


@pytest.mark.parametrize("backend", ["torch", "auto"])
@pytest.mark.parametrize("policy", [*thinned(POLICIES, 3), pytest.param(IN_BLOCKS, id="in blocks")])
def test_a_prompt_in_parts(policy: str, backend: str) -> None:
    (one, whole), (other, parts) = (served(policy, backend, call(), cuts) for cuts in ((), CUTS))
    assert kept(one) == kept(other)
    assert torch.allclose(whole, parts, atol=1e-5)
    assert torch.equal(one.seen, other.seen)


def test_rows_of_other_lengths() -> None:
    """Padding on the left: a row's prompt begins in the third part."""
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    real[1, :60] = False
    (one, _), (other, _) = (served("roco", "torch", call(real), cuts) for cuts in ((), CUTS))
    assert kept(one) == kept(other)


def test_without_the_mark_each_part_is_a_prompt() -> None:
    """The comparison above can fail."""
    spec = kvdsl.load("h2o").spec
    state = slot_state(spec, {"budget": 40}, layer=0, layers=1)
    server = choose(spec, "torch", torch.device("cpu"), torch.float32)
    for part in (slice(0, 45), slice(45, TOKENS)):
        server.prefill(state, call().part(part))
    whole, _ = served("h2o", "torch", call(), ())
    assert kept(state) != kept(whole)
