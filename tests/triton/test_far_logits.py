"""Logits far from 0 in the Triton kernels: prompts leave them to torch's observer, decoded tokens do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvdsl.runtime.backends import choose
from kvdsl.runtime.forward import Later
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch import statistics
from tests.runtime.test_far_logits import clear, scaled
from tests.runtime.test_prefill import ROUNDING, WATCH, Case, Matrix
from tests.texts import spec_of

pytestmark = pytest.mark.nightly

CPU = torch.device("cpu")
CASES = {
    "causal": Case(),
    "padding": Case(padding="left"),
    "window": Case(window=17),
    "sinks": Case(sinks=True),
    "bfloat16": Case(dtype=torch.bfloat16),
}


@pytest.mark.parametrize("far", [1e5, 1e10, 1e18])
@pytest.mark.parametrize("name", CASES)
def test_prompts_and_decoded_tokens(name: str, far: float) -> None:
    """Outputs and sums of attention are float64's where rounding does not decide."""
    case, spec = replace(CASES[name], tokens=45, heads=1, group=2), spec_of(WATCH)
    call, state, prompt = scaled(case, far), SlotState(spec, {}), 42
    server = choose(spec, "triton", CPU, case.dtype)
    outs = [server.prefill(state, call.part(slice(0, prompt)))]
    outs += [server.decode(state, call.part(slice(t, t + 1))) for t in range(prompt, case.tokens)]
    out = torch.cat(outs, 1)
    assert out.isfinite().all()
    for row in range(len(call.key)):
        real = slice(None) if call.real is None else call.real[row]
        matrix = Matrix(call, row, 0)
        sure, found = clear(matrix, call.sinks), out[row, real].transpose(0, 1).double()
        assert sure.double().mean() > 0.9
        assert torch.allclose(found[sure], matrix.out[sure], rtol=ROUNDING[case.dtype], atol=ROUNDING[case.dtype])
        place = {p: slot for slot, p in enumerate(state.position[row, 0].tolist()) if p >= 0}
        order = [place[p] for p in range(len(matrix.key))]
        given = state.column_index.single(state.columns)["sum_attn"][row, 0, order].double()
        assert float((given - matrix.column("sum_attn")).abs().max()) < 1e-3 + float((~sure).double().mean(0).sum())


def test_equal_logits_share_what_a_decoded_token_gives() -> None:
    """Their common log-sum-exp, rounded, would be one of them: each would get all."""
    case, spec = Case(tokens=20, group=1, heads=1), spec_of(WATCH)
    call, state = case.call(), SlotState(spec, {})
    one = call.key[:, :, :1] * 1e6
    call = call._replace(query=one.expand_as(call.query).contiguous(), key=one.expand_as(call.key).contiguous())
    server = choose(spec, "triton", CPU, torch.float32)
    server.prefill(state, call.part(slice(0, 19)))
    before = state.column_index.single(state.columns)["sum_attn"].clone()
    server.decode(state, call.part(slice(19, 20)))
    gave = (state.column_index.single(state.columns)["sum_attn"] - before)[0, 0, :19]
    assert torch.allclose(gave, torch.full((19,), 1 / 20), rtol=1e-3)


def test_ordinary_logits_are_observed_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "observe", lambda *_: pytest.fail("observed by torch"))
    case, spec = Case(tokens=20, heads=1, group=1), spec_of(WATCH)
    choose(spec, "triton", CPU, torch.float32).prefill(SlotState(spec, {}), case.call())


def test_a_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a prompt defers its questions, so is that one."""

    class Asked:
        position = torch.zeros(1, 3, dtype=torch.int32)
        later = Later()
        far: bool | None

    class Lse(torch.Tensor):
        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda")

    prompt = Asked()
    for far in (5.0, 1e5, torch.nan):
        lse, prompt.far = torch.full((1, 1, 1, 3), far).as_subclass(Lse), None
        assert not statistics.is_far(prompt, lse)  # type: ignore[arg-type]
    assert [float(furthest) <= most for furthest, most in prompt.later.doubts] == [True, False, False]
