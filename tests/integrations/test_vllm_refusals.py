"""What vLLM's pages cannot hold is refused before a server starts; needs no vLLM."""

from __future__ import annotations

import math

import pytest

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.refusals import refuse_policy
from kvdsl.integrations.vllm.settings import Settings
from kvdsl.runtime.state.slots import SlotState
from tests.texts import spec_of

CAPPED = "param budget = 12\nscore sum(attn)\ncap hard"


@pytest.mark.parametrize(
    "lazily", ["trigger overflow >= 2", "trigger overflow >= 0", "trigger overflow >= 4\nslack 2\nmax_drop 3"]
)
def test_a_prompt_may_not_leave_more_than_a_page_holds(lazily: str) -> None:
    with pytest.raises(KvdslError, match="under `cap hard` a prompt of P may leave more than a page holds"):
        refuse_policy(SlotState(spec_of(f"{CAPPED}\n{lazily}"), {}))


@pytest.mark.parametrize("other", ["", "trigger overflow >= 3\nslack 2\nmax_drop 3", "slack 4\nmax_drop 2"])
def test_what_leaves_no_more_is_served(other: str) -> None:
    refuse_policy(SlotState(spec_of(f"{CAPPED}\n{other}"), {}))


def test_a_budget_that_holds_less_than_is_kept() -> None:
    """It is not said to depend on the prompt."""
    with pytest.raises(KvdslError, match=r"H2O protects 20 tokens .* but its budget holds 12; raise the budget"):
        refuse_policy(Settings("h2o", (("budget", 12), ("recent", 20))).state(0, 1))


@pytest.mark.parametrize("budget", [2.5, math.inf, -3])
def test_a_budget_that_is_none(budget: float) -> None:
    with pytest.raises(KvdslError, match="`budget` of H2O"):
        Settings("h2o", (("budget", budget),)).state(0, 1)
