"""What a policy keeps of a prompt is what its own cache goes on with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.integrations.prompts import Survivors, survivors
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.backend import TorchBackend
from tests.texts import spec_of

pytestmark = pytest.mark.nightly

TOKENS, BUDGET, HEADS, GROUP, DIM = 60, 24, 2, 2, 8
ROPE = Rope(10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4), "half")


def made(first: int, tokens: int, window: int | None = None) -> AttentionCall:
    """Random vectors for the tokens from `first` on, rotated where they stand."""
    generator = torch.Generator().manual_seed(first)
    position = torch.arange(first, first + tokens)
    query, key, value = (torch.randn(1, heads, tokens, DIM, generator=generator) for heads in (HEADS * GROUP, HEADS, HEADS))
    return AttentionCall(
        ROPE.rotate(2 * query, position), ROPE.rotate(key, position), value, None, 0.5, window=window, rope=ROPE
    )


def plain(found: Survivors, new: AttentionCall) -> Tensor:
    """Attention of one new token over the survivors and itself, [batch, 1, query_heads, dim], as any cache has it."""
    keys, values = torch.cat([found.keys, new.key], 2), torch.cat([found.values, new.value], 2)
    seen = torch.cat([~found.free, torch.ones(1, HEADS, 1, dtype=torch.bool)], -1).repeat_interleave(GROUP, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        new.query, keys, values, attn_mask=seen.unsqueeze(2), scale=new.scaling, enable_gqa=True
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize("policy", ["h2o", "tova", "knorm", "snapkv", "streaming_llm", "equip_h2o", "adakv"])
def test_the_next_token_sees_what_the_policys_cache_shows_it(policy: str) -> None:
    spec, given = kvdsl.load(policy).spec, {"budget": float(BUDGET + 16 if "kv" in policy else BUDGET)}
    found = survivors(spec, given, made(0, TOKENS), layer=1, layers=2, backend="torch")

    state = SlotState(spec, dict.fromkeys(spec.params) | given, layer=1, layers=2)
    TorchBackend().prefill(state, made(0, TOKENS))
    expected = TorchBackend().decode(state, made(TOKENS, 1))
    torch.testing.assert_close(plain(found, made(TOKENS, 1)), expected, atol=2e-6, rtol=0)
    assert found.position.shape[-1] < TOKENS


@pytest.mark.parametrize(("budget", "held"), [(1.0, TOKENS), (1, 1), (0.5, TOKENS // 2)])
def test_a_float_up_to_one_is_a_rate(budget: float, held: int) -> None:
    assert survivors(kvdsl.load("tova").spec, {"budget": budget}, made(0, TOKENS)).position.shape[-1] == held


def test_a_budget_with_a_fraction_is_refused() -> None:
    with pytest.raises(KvdslError, match=r"is 1\.5, which is neither"):
        survivors(kvdsl.load("tova").spec, {"budget": 1.5}, made(0, TOKENS))


def test_survivors_are_in_the_order_of_the_text() -> None:
    found = survivors(kvdsl.load("h2o").spec, {"budget": BUDGET}, made(0, TOKENS))
    assert found.position.shape == (1, HEADS, BUDGET) and not found.free.any()
    assert (found.position.diff(dim=-1) > 0).all()
    torch.testing.assert_close(
        found.values, made(0, TOKENS).value.gather(2, found.position.long()[..., None].expand(-1, -1, -1, DIM))
    )


def test_heads_with_budgets_of_their_own_leave_places_free() -> None:
    found = survivors(kvdsl.load("adakv").spec, {"budget": 36.0}, made(0, TOKENS))
    kept = (~found.free).sum(-1)
    assert kept.sum() == 2 * 36 and kept.max() == found.position.shape[-1]


def test_a_rate_of_the_prompt() -> None:
    assert survivors(kvdsl.load("tova").spec, {"budget": 0.25}, made(0, TOKENS)).keys.shape[2] == TOKENS // 4


def test_a_prompt_shorter_than_the_budget_stays() -> None:
    found = survivors(kvdsl.load("tova").spec, {"budget": 100}, made(0, 9))
    assert torch.equal(found.keys, made(0, 9).key)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("full", "evicts nothing while a prompt is read"),
        ("quest", "evicts nothing while a prompt is read"),
        ("roco_sparcas", "attends to a selection"),
    ],
)
def test_what_a_prompts_survivors_cannot_hold(policy: str, reason: str) -> None:
    with pytest.raises(KvdslError, match=reason):
        survivors(kvdsl.load(policy).spec, {}, made(0, TOKENS))


def test_layers_that_agree_cannot_be_asked_alone() -> None:
    with pytest.raises(KvdslError, match="the layers of P agree"):
        survivors(spec_of("param budget = 8\nscore sum(attn)\nvictims shared by layers"), {}, made(0, TOKENS))
