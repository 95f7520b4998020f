"""Logits far from 0: float32 holds them, but neither their sums nor their differences are what they are near 0."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.state.slots import SlotState
from tests.quick import paired
from tests.runtime.test_prefill import LOGITS, ROUNDING, WATCH, Case, Matrix, served_by
from tests.texts import spec_of

pytestmark = pytest.mark.nightly

FAR = [1e5, 1e7, 1e9, 1e10, 1e12, 1e15, 1e18, 1e30]

CASES = {
    "causal": Case(group=2),
    "padding": Case(padding="left", group=3),
    "window": Case(window=23, group=2),
    "padded window": Case(padding="scattered", window=17),
    "sinks": Case(sinks=True, group=2),
    "softcap": Case(softcap=50.0, group=2),
    "two forwards": Case(cuts=2, group=1),
    "bfloat16": Case(dtype=torch.bfloat16, group=2, padding="left"),
    "bfloat16 for a matrix unit": Case(dtype=torch.bfloat16, group=3, dim=64, value_dim=64, window=31),
    "half": Case(dtype=torch.float16, group=2),
}


def scaled(case: Case, far: float) -> AttentionCall:
    """The case's call with logits about so large, and sinks among them; no two logits are so close that rounding decides."""
    make = torch.Generator().manual_seed(case.tokens)
    call, root = case.call(), far**0.5
    half = torch.float16 == case.dtype
    query, key = (x.float() * (min(root, 1e3) if half else root) for x in (call.query, call.key))
    sinks = None if call.sinks is None else torch.randn(len(call.sinks), generator=make) * far
    return call._replace(query=query.to(case.dtype), key=key.to(case.dtype), sinks=sinks)


def forwards(call: AttentionCall, cuts: int) -> list[AttentionCall]:
    sizes = [len(part) for part in torch.arange(call.query.shape[2]).tensor_split(cuts)]
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [call.part(slice(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def clear(matrix: Matrix, sinks: Tensor | None) -> Tensor:
    """The queries of which float32's rounding of logits does not decide what they attend to, bool [group, n]."""
    least = torch.full_like(matrix.logit[..., :1], -torch.inf)
    sink = least if sinks is None else sinks.double().view(-1, 1, 1).expand_as(least)
    hidden = torch.cat([matrix.logit.masked_fill(~matrix.seen, -torch.inf), sink, least], -1)
    best, second = hidden.topk(2, -1).values.unbind(-1)
    size = matrix.query.norm(dim=-1) * matrix.key.norm(dim=-1).amax()
    return (best - second) > 30 + 1e-5 * size


@pytest.mark.parametrize(("name", "backend", "far"), paired(list(CASES), ["cpu", "torch"], FAR[::2]))
def test_prompts(name: str, backend: str, far: float) -> None:
    """Outputs and statistics are float64's where rounding does not decide; all are finite, and probabilities add up to 1."""
    case, spec = CASES[name], spec_of(WATCH)
    call, state = scaled(case, far), SlotState(spec, {})
    server = served_by(spec, backend, case.dtype)
    out = torch.cat([server.prefill(state, part) for part in forwards(call, case.cuts)], 1)
    assert out.isfinite().all()
    for row in range(len(call.key)):
        real = slice(None) if call.real is None else call.real[row]
        for head in range(case.heads):
            matrix = Matrix(call, row, head)
            heads = slice(head * case.group, (head + 1) * case.group)
            found = out[row, real, heads].transpose(0, 1).double()
            sinks = None if call.sinks is None else call.sinks[heads]
            sure = torch.ones_like(found[..., 0], dtype=torch.bool) if case.softcap else clear(matrix, sinks)
            assert sure.double().mean() > 0.9
            assert torch.allclose(found[sure], matrix.out[sure], rtol=ROUNDING[case.dtype], atol=ROUNDING[case.dtype])
            held = state.position[row, head] >= 0
            given = state.column_index.single(state.columns)["sum_attn"][row, head, held].double()
            assert given.isfinite().all() and (given >= 0).all()
            unsure = float((~sure).double().mean(0).sum())
            assert float((given - matrix.column("sum_attn")).abs().max()) < 1e-3 + unsure
            if not case.sinks:
                assert abs(float(given.sum()) / len(matrix.key) - 1) < 1e-4


@pytest.mark.parametrize(("backend", "dtype", "far"), paired(["cpu", "torch"], [torch.float32, torch.bfloat16], FAR))
def test_decoded_tokens(backend: str, dtype: torch.dtype, far: float) -> None:
    """A decoded token attends as it would at the end of a longer prompt."""
    case, spec = Case(group=2, tokens=60, dtype=dtype), spec_of(WATCH)
    call = scaled(case, far)
    server, state = served_by(spec, backend, dtype), SlotState(spec, {})
    server.prefill(state, call.part(slice(0, 50)))
    out = torch.cat([server.decode(state, call.part(slice(t, t + 1))) for t in range(50, 60)], 1)
    given = state.column_index.single(state.columns)["sum_attn"][0]
    for head in range(case.heads):
        matrix = Matrix(call, 0, head)
        sure = clear(matrix, None)[:, 50:]
        found = out[0, :, head * 2 : head * 2 + 2].transpose(0, 1).double()
        assert sure.double().mean() > 0.9
        assert torch.allclose(found[sure], matrix.out[:, 50:][sure], rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
        assert abs(float(given[head, state.position[0, head] >= 0].sum()) / 60 - 1) < 1e-4


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("far", FAR)
def test_equal_logits_share(backend: str, far: float) -> None:
    """Keys that are all the same get the same probability, however large the logit is."""
    case, spec = Case(tokens=40, group=1, heads=1), spec_of(WATCH)
    call, state = case.call(), SlotState(spec, {})
    one = call.key[:, :, :1]
    query = one.expand_as(call.query) * far**0.5
    call = call._replace(query=query.contiguous(), key=(one * far**0.5).expand_as(call.key).contiguous())
    out = served_by(spec, backend, torch.float32).prefill(state, call)
    means = call.value[0, 0].cumsum(0) / torch.arange(1, 41)[:, None]
    assert torch.allclose(out[0, :, 0], means, atol=1e-5)
    expected = (1 / torch.arange(1, 41.0)).flip(0).cumsum(0).flip(0)
    assert torch.allclose(state.column_index.single(state.columns)["sum_attn"][0, 0, :40], expected, rtol=1e-4)


@pytest.mark.parametrize("far", [1e9, 1e14])
def test_lanes_near_and_far(far: float) -> None:
    """Queries whose logits are ordinary get the same bits beside others whose logits are not."""
    case, spec = Case(group=2), spec_of(WATCH)
    call, outs = case.call(), []
    for factor in (1.0, far):
        query = call.query.clone()
        query[:, :, 1::2] *= factor
        outs.append(served_by(spec, "cpu", torch.float32).prefill(SlotState(spec, {}), call._replace(query=query))[:, ::2])
    assert torch.equal(*outs)


def test_values_that_could_overflow_under_their_weights_are_left_to_torch() -> None:
    """Each score is a little above the one before it, so that weights are above 1."""
    case, spec = Case(tokens=40, group=1, heads=1, dim=16), spec_of(WATCH)
    call = case.call()
    query, key = torch.zeros_like(call.query), torch.zeros_like(call.key)
    query[..., 0], key[..., 0] = 1.0, torch.linspace(0, 30, 40)
    call = call._replace(query=query, key=key, value=torch.full_like(call.value, 1e35))
    ours, torchs = (served_by(spec, name, torch.float32).prefill(SlotState(spec, {}), call) for name in ("cpu", "torch"))
    assert torchs.isfinite().all() and torch.allclose(ours, torchs, rtol=1e-4)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_logits_themselves(backend: str) -> None:
    """Their means, and what is compared with them, are as exact as float32."""
    case = replace(CASES["causal"], tokens=60)
    call, spec = scaled(case, 1e12), spec_of(LOGITS)
    state = SlotState(spec, {})
    served_by(spec, backend, torch.float32).prefill(state, call)
    for head in range(case.heads):
        matrix = Matrix(call, 0, head)
        found = state.column_index.single(state.columns)["sum_logit"][0, head, :60].double()
        size = matrix.logit.abs().sum(1).mean(0)
        assert ((found - matrix.column("sum_logit")).abs() <= 1e-5 * size).all()
