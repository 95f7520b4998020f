"""The dyadic rows of `tests.differential.test_dyadic` for `settle`, which is told what the query attended to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.gpu import backend as triton_backend
from kvdsl.runtime.gpu import ops
from kvdsl.runtime.state.order import FREE
from kvdsl.runtime.state.slots import SlotState
from tests.differential import test_dyadic
from tests.differential.test_dyadic import DIM, POLICIES
from tests.quick import few

pytestmark = pytest.mark.usefixtures("small_blocks")


class Told:
    """In place of `attend`: what the slots get is given, [slots], and stands where logits do."""

    arg_names = triton_backend.attend.arg_names

    def __init__(self, attn: Tensor, slot: int) -> None:
        self._attn, self._slot = attn, slot

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*, logits, new_logits, first_free, held, position, seen, newest, part, top, total, **_: Any) -> None:
            logits[0, 0, 0, : logits.shape[-1]] = self._attn[: logits.shape[-1]]
            new_logits.fill_(self._attn[self._slot])
            first_free.fill_(2**31 - 1)
            first_free[0, 0, 0] = self._slot
            held.zero_()
            held[0, 0, 0] = int((position >= 0).sum())
            newest.copy_(seen)
            part.zero_(), top.zero_(), total.fill_(1.0)

        return launch


def observe(state: SlotState, attn: Tensor) -> None:
    """The token that was placed last is taken back: `settle` places it."""
    slot = int(state.position[0, 0].argmax())
    key, value = (x[:, :, slot : slot + 1].clone() for x in (state.keys, state.values))
    state.position[0, 0, slot] = FREE
    state.columns[:, 0, 0, slot] = torch.nan
    state.seen -= 1
    server = triton_backend.TritonBackend(state.spec, torch.device("cpu"), torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_backend, "attend", Told(attn, slot))
        patch.setattr(ops, "probability", lambda logit, base, above: logit)
        server.decode(state, AttentionCall(torch.zeros(1, 1, 1, DIM), key, value, None, 1.0))


@pytest.mark.nightly
@pytest.mark.parametrize("policy", few(POLICIES, "roco", "vatp_h2o"))
def test_agrees_to_the_bit(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_dyadic.OBSERVERS, "triton", observe)
    test_dyadic.test_backends_agree_to_the_bit(policy, "triton", 0)
