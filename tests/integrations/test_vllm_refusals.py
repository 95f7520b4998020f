"""What vLLM's pages cannot hold is refused before a server starts; needs no vLLM."""

from __future__ import annotations

import math

import pytest

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.refusals import refuse_layer, refuse_layers, refuse_policy
from kvdsl.integrations.vllm.settings import Settings, parsed
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


def test_a_ratio_is_a_rate() -> None:
    """JSON has `1` for all of the prompt."""
    with pytest.raises(KvdslError, match=r"`budget` of H2O is 1.0, a rate of each prompt"):
        refuse_policy(parsed({"policy": "h2o", "ratio": 1}).state(0, 1))
    with pytest.raises(KvdslError, match="`budget` and `ratio` of H2O are both given"):
        parsed({"policy": "h2o", "ratio": 0.5, "budget": 12}).state(0, 1)
    with pytest.raises(KvdslError, match="Full has no param `budget` that a `ratio` could set"):
        parsed({"policy": "full", "ratio": 0.5}).state(0, 1)


@pytest.mark.parametrize(
    ("lines", "what"),
    [
        (
            "param budget = 64\nscore sum(attn)\nselect top 32 by sum(q * max(k over page) over dims)\npages 4 + 4 * layer",
            "`pages`",
        ),
        (
            "select top 32 by sum(q * k over sketch)\nsketch top 4 + layer dims by abs(q) every 8 queries",
            "`sketch`",
        ),
        ("param budget = 64\nscore mean(attn over last (8 + 4 * layer) queries)", "`over last N queries`"),
    ],
)
def test_what_layers_cannot_have_of_their_own(lines: str, what: str) -> None:
    """A page has one size for all: bounds of more pages than it has room for were written over what lies behind them."""
    spec = spec_of(lines)
    with pytest.raises(KvdslError, match=f"{what} of P differs between layers"):
        refuse_layers([SlotState(spec, {}, layer=layer, layers=4) for layer in range(4)])
    refuse_layers([SlotState(spec, {}, layer=1, layers=4)] * 2)


def test_a_kind_of_a_known_layer_is_unknown() -> None:
    """It attends to something else, as vLLM's layers with sinks of their own do."""

    class Full: ...

    class WithSinks(Full): ...

    refuse_layer(Full(), Full)
    with pytest.raises(KvdslError, match="a layer's cache is vLLM's WithSinks"):
        refuse_layer(WithSinks(), Full)
