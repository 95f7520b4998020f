"""Steps of one launch, whose programs wait for each other, beside the same steps of two launches: the same bits."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch

import kvdsl
from kvdsl.runtime.backends import choose
from kvdsl.runtime.gpu import backend, sizes
from kvdsl.runtime.gpu.kernels import kernels_of
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.layers import slot_state
from tests.quick import few
from tests.texts import spec_of
from tests.triton.interpreter import let_programs_wait
from tests.triton.test_pieces import KEEPS, TEXT
from tests.triton.test_poison import call, poison

pytestmark = pytest.mark.usefixtures("small_blocks")

PROMPT, STEPS = 100, 4
CPU = torch.device("cpu")
TEXTS = {
    **{keeps: TEXT.format(text) for keeps, text in KEEPS.items()},
    "one split": "param budget = 20\nscore mean(attn)\nkeep last 2",
    "a ring": "param budget = 90\nscore mean(attn over last 5 queries)\nkeep last 2",
    "logits": "param budget = 90\nscore max(logit)",
    "a hard cap": "param budget = 90\nscore sum(attn)\ncap hard",
}
POLICIES = (
    "h2o",
    "roco",
    "tova",
    "streaming_llm",
    "a2sf",
    "equip_h2o",
    "random",
    "knorm",
    "vatp_roco",
)
TWICE = ("full", "sparcas", "quest", "scissorhands", "adakv", "gkv", "raas", "keydiff")
"""Policies whose steps take two launches, or more."""


def spec_for(name: str) -> PolicySpec:
    return spec_of(TEXTS[name]) if name in TEXTS else kvdsl.load(name).spec


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that are launched."""
    names, launch = list[str](), backend.launch

    def noting(kernel: Any, *rest: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, *rest)

    monkeypatch.setattr(backend, "launch", noting)
    return names


@pytest.mark.parametrize("dtype", few([torch.float32, torch.float16], torch.float32))
@pytest.mark.parametrize("name", few([*TEXTS, *POLICIES], "tops", "one split"))
def test_the_same_bits_as_two_launches(
    name: str, dtype: torch.dtype, launched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over poisoned memory, with a row that is padding in one step. A head of one split has nobody to wait for."""
    spec, make, alone = spec_for(name), torch.Generator().manual_seed(1), name == "one split"
    server = choose(spec, "triton", CPU, dtype)
    state = slot_state(spec, {"budget": 90.0} if "budget" in spec.params and name not in TEXTS else {}, layer=1, layers=2)
    server.prefill(state, call(PROMPT, make, dtype))
    together = deepcopy(state)
    together.workspace = None
    if not alone:
        let_programs_wait(monkeypatch)
        monkeypatch.setattr(backend, "_processors_at_once", lambda _: 99)
    for step in range(STEPS):
        token, found = call(1, make, dtype, torch.tensor([[True], [step != 1]])), []
        for once, one in enumerate((state, together)):
            monkeypatch.setattr(sizes, "AT_ONCE_PER_PROCESSOR", once)
            poison(one)
            out, held = server.decode(one, token), one.position >= 0
            ranks = one.rank.where(held, 0) if spec.compact else held
            found.append((out, one.position, one.seen, one.columns.where(held, 0).view(torch.int32), ranks))
        assert launched[-1] == "at_once" and "settle" in launched and (one.workspace.splits == 1) == alone  # type: ignore[attr-defined]
        assert all(map(torch.equal, *found)), f"step {step}"
        assert not any(one.workspace.tensors[name].any() for name in ("arrived", "heads_met"))  # type: ignore[attr-defined]
    assert held.sum(-1).max() < PROMPT + STEPS


@pytest.mark.parametrize("policy", TWICE)
def test_what_takes_more_launches(policy: str) -> None:
    assert "at_once" not in kernels_of(kvdsl.load(policy).spec.triton_source).KERNELS


def test_programs_that_wait_are_all_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two programs of each of 8 multiprocessors, and splits of 32 slots."""
    model = sizes.Sizes(group=4, key_dim=64, value_dim=64, item=2)
    assert not model.fits_at_once(32, 1, 8)
    monkeypatch.setattr(sizes, "AT_ONCE_PER_PROCESSOR", 2)
    assert model.fits_at_once(64, 8, 8) and not model.fits_at_once(64, 9, 8) and not model.fits_at_once(96, 8, 8)
    assert model.fits_at_once(32, 999, 0) and not model.fits_at_once(33, 1, 0)
    assert not model.fits_at_once(32 * sizes.MAX_SPLITS + 1, 1, 1000)
