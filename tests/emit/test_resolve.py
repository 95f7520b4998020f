"""Generated packages are imported and asked for their numbers, statement by statement."""

from __future__ import annotations

import math

import pytest
import torch

import kvdsl
from kvdsl.compiler import shipped_policies
from kvdsl.errors import KvdslError
from kvdsl.runtime.given import Given
from kvdsl.runtime.spec import PolicySpec
from tests.texts import spec_of

INF = math.inf
EVICTING = "param budget = 40\nscore sum(attn)\n"
SELECTING = "param tokens = 16\nselect top tokens by dot(q, k)"

NUMBERS = {
    # statements: the numbers of rows with prompts of 100 and 41 tokens, in layer 3 of 8
    EVICTING: {"capacity": [40, 40]},
    f"{EVICTING}layers 3..": {"capacity": [40, 40]},
    f"{EVICTING}layers 4..": {"capacity": [INF, INF]},
    f"{EVICTING}layers ..3": {"capacity": [40, 40]},
    f"{EVICTING}layers ..layers / 4": {"capacity": [INF, INF]},
    f"{EVICTING}layers 2.9..3.1": {"capacity": [40, 40]},
    f"{EVICTING}layers 4..\nkeep where age < budget": {"budget": [40, 40], "capacity": [INF, INF]},
    f"{EVICTING}prefill blocks of prompt / 8": {"capacity": [40, 40], "prefill_block": [12, 5]},
    f"{EVICTING}trigger overflow >= prompt / 50\nslack prompt / 50\nmax_drop prompt / 50": {
        "capacity": [40, 40],
        "trigger": [2, 1],
        "slack": [2, 0],
        "max_drop": [2, 1],
    },
    "budget prompt / 2 across heads floor 0.25\nwhen prefill\nscore sum(attn)": {"capacity": [50, 20], "floor": [12, 5]},
    "budget prompt / 2 across heads\nwhen prefill\nscore sum(attn)": {"capacity": [50, 20], "floor": [0, 0]},
    "budget 40\nscore sum(attn over last prompt / 3 queries)": {"capacity": [40, 40], "size_attn_ring": [33, 13]},
    "budget 40\nscore sum(attn over last prompt / 50 queries)": {"capacity": [40, 40], "size_attn_ring": [2, 1]},
    "budget 40\nparam d = 0.5\nscore ema(attn, d)": {"d": [0.5, 0.5], "capacity": [40, 40]},
    SELECTING: {"select": [16, 16]},
    f"{SELECTING} in layers 2..": {"select": [16, 16]},
    f"{SELECTING} in layers ..2": {"select": [INF, INF]},
    "pages prompt / 30\nselect top prompt / 3 by max(norm1(k) over page)": {"select": [33, 13], "page": [3, 1]},
    "sketch top prompt / 20 dims by abs(q) every prompt / 60 queries\nselect top 9 by dot(q, k over sketch)": {
        "select": [9, 9],
        "sketch_dims": [5, 2],
        "sketch_every": [1, 1],
    },
    f"param select = 3\nparam page = 5\n{EVICTING}keep top select by age\nkeep top page by attn_age\nlet attn_age = age": {
        "select_": [3, 3],
        "page_": [5, 5],
        "capacity": [40, 40],
    },
}


def resolved(spec: PolicySpec, **values: float) -> dict[str, list[float]]:
    given = Given(spec.name, values, torch.tensor([100, 41]), layer=3, layers=8)
    return {name: value.tolist() for name, value in spec.resolve(given).items()}


@pytest.mark.parametrize("body", NUMBERS)
def test_numbers(body: str) -> None:
    spec = spec_of(body)
    assert resolved(spec) == NUMBERS[body]
    assert spec.numbers == tuple(NUMBERS[body])


def test_what_is_selected_must_hold_what_is_kept() -> None:
    spec = spec_of("param tokens = 16\nkeep last 8\nselect top tokens by dot(q, k) in layers 2..")
    with pytest.raises(
        KvdslError, match=r"P protects 8 tokens \(keep last 8\) but it selects 5; select more or protect fewer"
    ):
        resolved(spec, tokens=5.5)
    assert resolved(spec, tokens=8) == {"select": [8, 8]}


def test_what_is_kept_in_layers_that_do_not_evict_is_no_matter() -> None:
    body = "budget 6 - layer\nscore sum(attn)\nkeep last 4\nlayers"
    assert resolved(spec_of(f"{body} ..2")) == {"capacity": [INF, INF]}
    with pytest.raises(KvdslError, match="its budget holds 3"):
        resolved(spec_of(f"{body} ..3"))


@pytest.mark.parametrize("policy", [path.stem for path in shipped_policies()])
def test_a_negative_count_is_refused(policy: str) -> None:
    """Every param of the shipped policies but the budget and shares counts something."""
    spec = kvdsl.load(policy).spec
    for name in spec.params:
        if name not in ("budget", "alpha", "mix", "close"):
            with pytest.raises(KvdslError, match=f"`{name}` of {spec.name} is -1; give [01] or more"):
                resolved(spec, **{name: -1})


@pytest.mark.parametrize("value", [-0.1, 1.5])
@pytest.mark.parametrize("decay", ["d", "1 - d"])
def test_a_decay_is_a_share(decay: str, value: float) -> None:
    spec = spec_of(f"{EVICTING.replace('sum(attn)', f'ema(attn, {decay})')}param d = 0.5")
    assert resolved(spec, d=1)["d"] == [1, 1]
    with pytest.raises(
        KvdslError, match=r"`d` of P is .*; give a number in 0..1|the decay of P's `ema` is .*; it must lie in 0..1"
    ):
        resolved(spec, d=value)


@pytest.mark.parametrize(
    ("body", "bounds"),
    [
        ("score max_pool(sum(attn), n)", "1 or more"),
        ("score sum(attn over last n queries)", "1 or more"),
        ("score sum(attn)\nprefill blocks of n", "1 or more"),
        ("score sum(attn)\nkeep first n", "0 or more"),
        ("score sum(attn)\nkeep first n\nprefill blocks of n", "1 or more"),
        ("score ema(attn, n / 8)\nkeep first n", "0 or more"),
    ],
)
def test_params_lie_where_defaults_must(body: str, bounds: str) -> None:
    spec = spec_of(f"param budget = 40\nparam n = 8\n{body}")
    resolved(spec, n=float(bounds[0]))
    with pytest.raises(KvdslError, match=f"`n` of P is {int(bounds[0]) - 1}; give {bounds}"):
        resolved(spec, n=int(bounds[0]) - 1)


@pytest.mark.parametrize("rate", [-0.1, 1.5, math.nan])
def test_a_floor_is_a_rate(rate: float) -> None:
    spec = spec_of("param r = 0.5\nbudget 8 across heads floor r\nwhen prefill\nscore sum(attn)")
    assert resolved(spec, r=1)["floor"] == [8, 8]
    with pytest.raises(KvdslError, match=r"lie in|`r` of P is nan; give a number"):
        resolved(spec, r=rate)


def test_what_a_policy_does_stands_in_its_spec() -> None:
    spec = spec_of(f"{EVICTING}when decode\npositions compact\nvictims shared by layers\ncap hard")
    assert (spec.when, spec.compact, spec.victims, spec.hard_cap) == ("decode", True, "layers", True)
    spec = spec_of("budget 9\nscore sum(attn over last 3 queries) + norm1(v)")
    assert (spec.columns, spec.column_rules, spec.rings) == (("norm1_v",), ("token",), (("attn_ring", "size_attn_ring"),))
