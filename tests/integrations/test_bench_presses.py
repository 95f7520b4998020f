"""Presses in `kvdsl bench generate`, in kvpress's own environment (`make peers`)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("kvpress", reason="kvpress is not installed; `make peers` tests this in an environment where it is")

from kvdsl_lab.bench.contenders import contenders
from kvdsl_lab.bench.shapes import shaped_model
from kvdsl_lab.bench.shares import watching
from tests.cli.harness import run

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize(("budget", "left"), [(16, 16), (0.5, 20), (64, 40)])
def test_a_press_leaves_the_budget_of_the_prompt(budget: float, left: int) -> None:
    """What is generated stays, and another text is pressed anew."""
    model = shaped_model("tiny:2")
    (pressed,) = contenders(["kvpress:KnormPress"], {}, [budget], model, "torch")
    ids = torch.randint(128, (2, 40), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        with torch.inference_mode():
            text = pressed.begin(model)
            text.read(ids)
            assert [layer.keys.shape[2] for layer in text.cache.layers] == [left, left]
            text.go_on()
            text.go_on()
        assert [layer.keys.shape[2] for layer in text.cache.layers] == [left + 2, left + 2]
    assert not any(module._forward_hooks for module in model.modules()), "the press should have let go"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "generate", "--shape", "tiny:2", "--prompt-tokens", "40", "--new-tokens", "3", "--repeats", "1"]
    rows = run(
        capsys, *words, "--policies", "transformers,kvpress:SnapKVPress,h2o", "--budgets", "16", "--json", code=0
    ).json()["rows"]
    assert [row["policy"] for row in rows] == ["transformers", "kvpress:SnapKVPress", "h2o"]
    assert rows[1]["cache_bytes"] < rows[0]["cache_bytes"]
    assert "kvpress has no press `SnapPress`" in run(capsys, *words, "--policies", "kvpress:SnapPress", code=2).err


def test_shares_are_of_the_model_that_a_press_has_left() -> None:
    """A press hangs the model's rotary embedding on every attention module, and nothing takes it off."""
    model = shaped_model("tiny:2")
    ids = torch.randint(128, (1, 40), generator=torch.Generator().manual_seed(1))
    (pressed,) = contenders(["kvpress:KnormPress"], {}, [16], model, "torch")
    with torch.inference_mode():
        text = pressed.begin(model)
        text.read(ids)
        with watching(model, text.cache) as spent:
            text.go_on()
    assert 0 < spent["projections"] < spent["modules"] - spent["update"]
