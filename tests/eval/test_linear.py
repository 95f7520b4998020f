"""Linear layers of bfloat16 that multiply in float32."""

from __future__ import annotations

import pytest
import torch

from kvdsl import load_model
from kvdsl_lab.eval.linear import widened


def test_where_the_processor_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    narrow, tokenizer = load_model(None, "bf16")
    exact, _ = load_model(None, "fp32")
    exact.load_state_dict(narrow.state_dict())
    ids = tokenizer("The ship went down in a storm off the coast", return_tensors="pt").input_ids
    with torch.inference_mode():
        wanted, ours = exact(ids).logits, narrow(ids).logits.float()
        assert widened(narrow) is narrow and narrow.dtype == torch.bfloat16
        found = narrow(ids).logits
    assert found.dtype == torch.bfloat16
    assert 0 < torch.dist(found.float(), wanted) < 1.5 * torch.dist(ours, wanted), "rounded as before, and as often"
    before = {name: id(module) for name, module in narrow.named_modules()}
    assert {name: id(module) for name, module in widened(narrow).named_modules()} == before, "nothing is left to do"


def test_where_it_can_or_need_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype, able in (("bf16", True), ("fp32", False)):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda able=able: able)
        model, _ = load_model(None, dtype)
        before = {name: id(module) for name, module in model.named_modules()}
        assert {name: id(module) for name, module in widened(model).named_modules()} == before
