"""What the host does for a layer while a prompt is read: what it launches, and that it reads nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvdsl
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.forward import Forward, Later
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.state.layers import slot_state
from kvdsl_lab.bench.decode import rotation
from scripts.gpu.setting import TOY, Setting
from scripts.gpu.whole import tiny

from .waits import Waits

CPU = torch.device("cpu")
HEADS, GROUP, DIM, PROMPT, LAYERS = 2, 2, 16, 40, 2

LAUNCHES = {
    "h2o": (15, 19), "roco": (15, 19), "tova": (16, 20), "streaming_llm": (20, 25),
    "quest": (16, 19), "sparcas": (55, 59), "snapkv": (174, 178),
}  # fmt: skip
"""At most so many in a layer but the first, which makes what all share; and if the two rows are padded otherwise, so that each has an
attention of its own. Where a policy observes, one of the first copies what CPUs' attention lays out otherwise than GPUs'.
"""


def call(forward: Forward, real: torch.Tensor | None) -> AttentionCall:
    query, key, value = (torch.randn(2, heads, PROMPT, DIM) for heads in (HEADS * GROUP, HEADS, HEADS))
    return AttentionCall(query, key, value, real, 0.25, rope=rotation(DIM), forward=forward)


@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("policy", LAUNCHES)
def test_a_layers_prompt(policy: str, pads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding is read once, by the first layer; what may not be finite is asked for all layers, when everything is under way."""
    spec, forward = kvdsl.load(policy).spec, Forward(Later())
    real = torch.arange(PROMPT) >= torch.tensor([[0], [9]]) if pads else None
    calls = [call(forward, real) for _ in range(LAYERS)]
    counts = []
    with torch.no_grad(), Waits(monkeypatch, [x for one in calls for x in (one.query, one.key, one.value, real)]) as waits:
        for layer, one in enumerate(calls):
            state = slot_state(spec, {"budget": 36.0} if "budget" in spec.params else {}, layer=layer, layers=LAYERS)
            state.room.reserves = True
            before = len(waits.launches)
            choose(spec, "triton", CPU, torch.float32).prefill(state, one)
            counts.append(waits.launches[before:])
        assert len(waits.lines) == pads, "\n".join(waits.lines)
        assert forward.later is not None and forward.later.is_right()
        assert len(waits.lines) == pads + 1, "\n".join(waits.lines)
    assert len(counts[-1]) <= LAUNCHES[policy][pads], "\n".join(counts[-1])


@pytest.mark.parametrize("pads", [False, True])
def test_a_models_prompt(pads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward reads what is doubted at its end, and before that only where padding lies."""
    model = tiny(Setting("cpu", TOY, (), Path()))
    cache = kvdsl.load("h2o")(model, backend="triton", budget=16)
    ids = torch.randint(1, 128, (2, 24))
    mask = torch.arange(24) >= torch.tensor([[0], [5]]) if pads else None
    with torch.inference_mode(), Waits(monkeypatch, [*model.parameters(), *model.buffers(), mask]) as waits:
        model(input_ids=ids, attention_mask=mask, **with_cache(cache), use_cache=True, logits_to_keep=1)
    assert len(waits.lines) == pads + 1, "\n".join(waits.lines)
