"""Programs that share a KV head's slots. Whatever the number of `settle`'s and their order, the same tokens leave; whatever rows are beside
one, it gets the same bits.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch

from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.gpu import backend
from kvdsl.runtime.gpu.sizes import SETTLERS_PER_PROCESSOR
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.slots import SlotState
from tests.quick import few
from tests.texts import spec_of
from tests.triton.test_poison import call, kept

pytestmark = pytest.mark.usefixtures("small_blocks")

PROMPT, STEPS = 100, 12
CPU = torch.device("cpu")
TEXT = "param budget = 90\nscore mean(attn)\n{}"
KEEPS = {
    "nothing": "",
    "ends": "keep first 5\nkeep last 20",
    "tops": "keep last 1\nkeep top 30 by std(attn)",
    "nearly all": "keep last 89",
    "staged": "keep first 3\nkeep last 9\nkeep top 7 by max(attn)\ntrigger overflow >= 4",
    "ranks": "keep first 5\nkeep last 20\npositions compact",
}


def begun(keeps: str) -> SlotState:
    state = slot_state(spec_of(TEXT.format(keeps)), {})
    choose(state.spec, "triton", CPU, torch.float32).prefill(
        state, call(PROMPT, torch.Generator().manual_seed(1), torch.float32)
    )
    return state


def steps(state: SlotState, served: str) -> list[torch.Tensor]:
    server, make = choose(state.spec, served, CPU, torch.float32), torch.Generator().manual_seed(2)
    return [server.decode(state, call(1, make, torch.float32)) for _ in range(STEPS)]


@pytest.mark.nightly
@pytest.mark.parametrize(("keeps", "processors"), [(keeps, 1 + 2 * (number % 2)) for number, keeps in enumerate(KEEPS)])
def test_any_number_of_programs(keeps: str, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_PROCESSORS_IN_THE_INTERPRETER", processors)
    ours, theirs = begun(KEEPS[keeps]), begun(KEEPS[keeps])
    mine, other = steps(ours, "triton"), steps(theirs, "torch")
    pieces, tensors = ours.workspace.pieces, ours.workspace.tensors  # type: ignore[attr-defined]
    assert pieces == min(-(-ours.slots // 16), processors * SETTLERS_PER_PROCESSOR // 4)
    assert kept(ours) == kept(theirs)
    assert torch.allclose(torch.cat(mine), torch.cat(other), atol=1e-5)
    assert not tensors["arrived"].any()


@pytest.mark.nightly
@pytest.mark.parametrize("keeps", ["ends", "staged"])
def test_some_of_the_last_tokens_have_left(keeps: str) -> None:
    """So that those which are protected are not the last ones of the text."""
    ours, theirs = begun(KEEPS[keeps]), begun(KEEPS[keeps])
    for state in (ours, theirs):
        gone = (state.position >= PROMPT - 9) & (state.position < PROMPT - 5)
        state.position[gone] = -1
    steps(ours, "triton"), steps(theirs, "torch")
    assert kept(ours) == kept(theirs)


BESIDE = ([3], [0, 3, 1, 2])
"""Rows of a step, of four: one by itself, and beside others."""


def of_four(tokens: int, make: torch.Generator) -> AttentionCall:
    calls = [call(tokens, make, torch.float32) for _ in range(2)]
    return calls[0]._replace(
        **{name: torch.cat([getattr(one, name) for one in calls]) for name in ("query", "key", "value")}
    )


@pytest.mark.parametrize("keeps", few(list(KEEPS), "tops"))
def test_the_same_bits_beside_others(keeps: str) -> None:
    """A row's output, columns and kept positions do not depend on the other rows of the batch."""
    state, make = slot_state(spec_of(TEXT.format(KEEPS[keeps])), {}), torch.Generator().manual_seed(3)
    server = choose(state.spec, "triton", CPU, torch.float32)
    server.prefill(state, of_four(PROMPT, make))
    token, found = of_four(1, make), []
    for rows in BESIDE:
        one, row = deepcopy(state), rows.index(3)
        one.select_rows(torch.tensor(rows))
        out = server.decode(one, token._replace(query=token.query[rows], key=token.key[rows], value=token.value[rows]))
        found.append((out[row], one.position[row], one.columns[:, row].where(one.position[row] >= 0, 0)))
    assert all(map(torch.equal, *found))
