"""What statements become: the lines of `kernels_torch.py`, `kernels_cpu.cpp` and `resolve`."""

from __future__ import annotations

import pytest

from kvdsl.lower.plan import make_plan
from kvdsl.lower.spelling import spelled
from tests.lower.policies import checked, evicting

# -- expressions on state columns --------------------------------------------------------------------------------------


def test_ema() -> None:
    plan = make_plan(evicting("score ema(attn, 0.9)"))
    assert plan.cpp is not None
    assert plan.torch.observe == ('columns.ema("ema_attn", row.attn, 0.9)',)
    assert plan.cpp.observe == (
        "ema_attn[i] = seen ? kvdsl::ema(ema_attn[i], row.attn[i], 0.9f, row.age(i)) : ema_attn[i];",
    )
    assert plan.torch.score == ('ema_attn = slots.column("ema_attn")', "return ema_attn")


def test_the_decay_of_an_ema_may_be_any_number() -> None:
    plan = make_plan(evicting("score ema(attn, 1 - 1 / a)"))
    assert plan.cpp is not None
    assert plan.torch.observe == ('columns.ema("ema_attn", row.attn, 1 - 1 / row.number("a"))',)
    assert "1.0f - 1.0f / static_cast<float>(row.param(Number::a))" in plan.cpp.observe[0]
    assert dict(plan.numbers)["a"] == "a"


def test_rings() -> None:
    plan = make_plan(evicting("score sum(attn over last a queries) / a"))
    assert plan.cpp is not None
    assert plan.torch.observe == ('columns.ring("attn_ring", row.attn)',)
    assert plan.torch.score == ('return slots.ring("attn_ring", "sum") / slots.number("a")',)
    assert plan.cpp.observe == ("attn_ring[i] = seen ? row.attn[i] : attn_ring[i];",)
    assert plan.cpp.observe_before == (
        "float* const attn_ring = row.ring(Ring::attn_ring, kvdsl::count(row.param(Number::size_attn_ring)));",
    )
    assert plan.cpp.settle_before[0] == (
        "const float* const sum_of_attn_ring = "
        "head.ring_sum(Ring::attn_ring, kvdsl::count(head.param(Number::size_attn_ring)), head.scratch(1));"
    )
    assert plan.cpp.settle == ("score[i] = sum_of_attn_ring[i] / static_cast<float>(head.param(Number::a));",)
    assert plan.cpp.scratch == 2
    assert dict(plan.numbers)["size_attn_ring"] == "given.count(a, low=1)"
    assert dict(plan.flags) == {"rings": '(("attn_ring", "size_attn_ring"),)'}
    assert not plan.columns


def test_a_deviation_over_a_ring_needs_the_mean_first() -> None:
    plan = make_plan(evicting("score std(attn over last 4 queries)\nkeep top 2 by mean(attn over last 4 queries)"))
    assert plan.cpp is not None
    size = "kvdsl::count(head.param(Number::size_attn_ring))"
    assert plan.cpp.settle_before[:2] == (
        f"const float* const mean_of_attn_ring = head.ring_mean(Ring::attn_ring, {size}, head.scratch(2));",
        f"const float* const std_of_attn_ring = head.ring_std(Ring::attn_ring, {size}, mean_of_attn_ring, head.scratch(3));",
    )
    assert plan.cpp.scratch == 4


def test_what_is_over_slots_of_a_ring_comes_after_it() -> None:
    plan = make_plan(evicting("score sum(attn over last 4 queries) - mean(sum(attn over last 4 queries) over slots)"))
    assert plan.cpp is not None
    assert "sum_of_attn_ring = " in plan.cpp.settle_before[0]
    assert "[&](int i) { return sum_of_attn_ring[i]; }" in plan.cpp.settle_before[1]


def test_pools() -> None:
    plan = make_plan(evicting("score max_pool(sum(attn), 7) - mean_pool(age, a)"))
    assert plan.torch.score[-1] == 'return slots.max_pool(sum_attn, 7) - slots.mean_pool(slots.age, slots.number("a"))'
    assert (plan.cpp, plan.cpp_refusal) == (None, "`max_pool`")


# -- one query's own ---------------------------------------------------------------------------------------------------

SELECTIONS = {
    # `select ... by`: torch
    "dot(q, k)": "row.over_group(row.dot_qk)",
    "norm1(k) - age": "(torch.abs(row.k)).sum(-1) - row.age",
    "sum(q * min(k over page) over dims)": (
        'row.over_group((row.q * row.over_page("min", row.k, dims=True).unsqueeze(2)).sum(-1))'
    ),
    "dot(q, k) * max(norm1(k) over page)": (
        'row.over_group(row.dot_qk * row.over_page("max", (torch.abs(row.k)).sum(-1)).unsqueeze(2))'
    ),
    "sum((q - max(norm1(k) over page)) over dims)": (
        'row.over_group((row.q - row.over_page("max", (torch.abs(row.k)).sum(-1)).unsqueeze(2).unsqueeze(-1)).sum(-1))'
    ),
    "dot(q, k over sketch)": "row.over_group(row.dot_sketch)",
    "sum(abs(q) * k over sketch)": 'row.over_group(row.over_sketch("sum", torch.abs(row.q) * row.k.unsqueeze(2)))',
    "max(k over sketch)": 'row.over_sketch("max", row.k)',
}


@pytest.mark.parametrize("by", SELECTIONS)
def test_selections(by: str) -> None:
    statements = f"select top 8 by {by}\n"
    if "page" in by:
        statements += "pages 4\n"
    if "sketch" in by:
        statements += "sketch top 4 dims by abs(q) every 8 queries\n"
    plan = make_plan(checked(statements))
    assert plan.torch.select == (f"return {SELECTIONS[by]}",)


SKETCHES = {
    # `sketch ... by`: torch
    "abs(q)": "row.over_group(torch.abs(row.q))",
    "abs(q) * mean(abs(k) over slots)": (
        'row.over_group(torch.abs(row.q) * row.over_slots("mean", torch.abs(row.k.unsqueeze(2)), grouped=True, dims=True))'
    ),
    "std(k over slots)": 'row.over_slots("std", row.k, dims=True)',
    "abs(q) / n": 'row.over_group(torch.abs(row.q) / row.number("n").unsqueeze(2).unsqueeze(-1))',
    "mean(abs(k) * age over slots)": 'row.over_slots("mean", torch.abs(row.k) * row.age.unsqueeze(-1), dims=True)',
}


@pytest.mark.parametrize("by", SKETCHES)
def test_sketches(by: str) -> None:
    plan = make_plan(
        checked(f"param n = 3\nsketch top 4 dims by {by} every n queries\nselect top 8 by dot(q, k over sketch)")
    )
    assert plan.torch.sketch == (f"return {SKETCHES[by]}",)
    assert dict(plan.numbers)["sketch_every"] == "given.count(n, low=1)"


FORMS = {
    # `select ... by`: how C++ ranks the slots
    "dot(q, k)": ("dot", ""),
    "sum(k * q over dims)": ("dot", ""),
    "dot(q, k over sketch)": ("sketch_dot", ""),
    "sum(max(q * min(k over page), q * max(k over page)) over dims)": ("page_bound", ""),
    "sum(max(max(k over page) * q, min(k over page) * q) over dims)": ("page_bound", ""),
    "dot(q, k) - age": (
        "expression",
        "kvdsl::over_group<group>(row.group, [&](int g) { return kvdsl::sum_over(row.key_dim, [&](int d) { return "
        "row.q(g, d) * row.k(i, d); }) - static_cast<float>(row.age(i)); })",
    ),
    "max(k over sketch)": (
        "expression",
        "kvdsl::max_over(row.dims, [&](int j) { const int d = row.sketch[j]; return row.k(i, d); })",
    ),
    "random()": ("expression", "row.random(i)"),
}


@pytest.mark.parametrize("by", FORMS)
def test_selections_in_cpp(by: str) -> None:
    statements = f"select top 8 by {by}\nkeep first 2\n"
    if "page" in by:
        statements += "pages 4\n"
    if "sketch" in by:
        statements += "sketch top 4 dims by abs(q) every 8 queries\n"
    plan = make_plan(checked(statements)).cpp
    assert plan is not None and plan.select is not None
    assert (plan.select.by, plan.select.rank) == FORMS[by]
    assert plan.select.always == ("head.protect_first(2);", "head.protect_last(1);")
    assert (plan.select.page, plan.select.sketch) == ("page" in by, "sketch" in by)


CPP_SKETCHES = {
    # `sketch ... by`: what comes before the loop over dims, and in it
    "abs(q)": ((), "kvdsl::over_group<group>(row.group, [&](int g) { return std::fabs(row.q(g, d)); })"),
    "abs(q) * mean(abs(k) over slots)": (
        ("const auto mean_over_slots_1_of = row.mean_of_dims([&](int i, int d) { return std::fabs(row.k(i, d)); });",),
        "kvdsl::over_group<group>(row.group, [&](int g) { return std::fabs(row.q(g, d)) * mean_over_slots_1_of[d]; })",
    ),
    "std(k over slots) * max(age over slots)": (
        (
            "const auto std_over_slots_1_of = row.std_of_dims([&](int i, int d) { return row.k(i, d); });",
            "const float max_over_slots_2 = row.max([&](int i) { return static_cast<float>(row.age(i)); });",
        ),
        "std_over_slots_1_of[d] * max_over_slots_2",
    ),
}


@pytest.mark.parametrize("by", CPP_SKETCHES)
def test_sketches_in_cpp(by: str) -> None:
    plan = make_plan(checked(f"sketch top 4 dims by {by} every 3 queries\nselect top 8 by dot(q, k over sketch)")).cpp
    assert plan is not None and plan.select is not None
    assert (plan.select.sketch_before, plan.select.sketch_by) == CPP_SKETCHES[by]


@pytest.mark.parametrize(
    ("statements", "refusal"),
    [
        ("pages 4\nselect top 8 by sum(q * max(k over page) over dims)", "`over page` in anything but a bound of dot(q, k)"),
        ("pages 4\nselect top 8 by max(norm1(k) over page)", "`over page` in anything but a bound of dot(q, k)"),
        (
            "sketch top 4 dims by mean(v over slots) every 3 queries\nselect top 8 by dot(q, k over sketch)",
            "values over a sketch's dims",
        ),
        (
            "sketch top 4 dims by mean(abs(q * k) over slots) every 3 queries\nselect top 8 by dot(q, k over sketch)",
            "a sketch by anything but queries and reductions of keys over slots",
        ),
    ],
)
def test_selections_that_cpp_cannot_make(statements: str, refusal: str) -> None:
    plan = make_plan(checked(statements))
    assert (plan.cpp, plan.cpp_refusal) == (None, refusal)


@pytest.mark.parametrize("who", ["heads", "layers"])
def test_nobody_has_to_agree_in_cpp_once_the_prompt_is_over(who: str) -> None:
    plan = make_plan(evicting(f"score sum(attn)\nvictims shared by {who}\nwhen prefill"))
    assert plan.cpp is not None and not plan.cpp.settles


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_the_budget_is_a_number_of_its_own_where_it_is_read() -> None:
    plan = make_plan(evicting("score where(age < budget / 2, 1, sum(attn))\nkeep top budget / 4 by age\nlayers 2.."))
    assert dict(plan.numbers) == {"budget": "capacity", "capacity": "given.inside(capacity, low=2)"}
    assert 'slots.number("budget")' in plan.torch.score[-1]
    assert 'keep.top(slots.age, numbers["budget"] / 4)' in plan.torch.protect
    assert plan.cpp is not None
    assert "head.param(Number::budget)" in plan.cpp.settle[0]
    assert plan.cpp.overflow == "kvdsl::count(head.param(Number::capacity))"


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("2..", "low=2"),
        ("..9", "high=9"),
        ("a..layers - 2", "low=a, high=given.layers - 2"),
    ],
)
def test_layers(layers: str, expected: str) -> None:
    evicts = make_plan(evicting(f"score sum(attn)\nlayers {layers}"))
    assert dict(evicts.numbers)["capacity"] == f"given.inside(capacity, {expected})"
    assert evicts.resolve[-1] == (
        f'given.check_fits(given.largest(), given.largest(1), given.inside(capacity, {expected}), "keep last 1")'
    )
    selects = make_plan(checked(f"param a = 2\nselect top 16 by dot(q, k) in layers {layers}"))
    assert f"select = given.inside(given.count(16, low=1), {expected})" in selects.resolve
    assert dict(selects.numbers)["select"] == "select"
    assert selects.resolve[-1] == (
        'given.check_fits(given.largest(), given.largest(1), select, "keep last 1", selected=True)'
    )


def test_shared_budgets() -> None:
    plan = make_plan(checked("param a = 2\nbudget 8 across heads floor 1 / a\nwhen prefill\nscore sum(attn)"))
    assert dict(plan.numbers)["floor"] == "given.share(capacity, 1 / a)"
    assert dict(plan.flags) == {"when": '"prefill"', "across": "True"}


def test_blocks_of_the_prompt() -> None:
    plan = make_plan(evicting("score sum(attn)\nprefill blocks of 32 * a"))
    assert dict(plan.numbers)["prefill_block"] == "given.count(32 * a, low=1)"
    assert plan.cpp is not None


def test_params_are_not_taken_for_numbers() -> None:
    names = (
        "select",
        "page",
        "floor_",
        "capacity",
        "sketch_dims",
        "sketch_every",
        "prefill_block",
        "size_attn_ring",
        "Ring",
    )
    assert all(spelled(name) == f"{name}_" for name in names)
    assert spelled("budget") == "budget"


# -- what a policy is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "flags"),
    [
        ("when decode", {"when": '"decode"'}),
        ("victims shared by heads", {"victims": '"heads"'}),
        ("victims shared by layers", {"victims": '"layers"'}),
        ("cap hard", {"hard_cap": "True"}),
        ("positions compact", {"compact": "True"}),
        ("select top 4 by dot(q, k)", {"selects": "True"}),
        (
            "sketch top 2 dims by abs(q) every 2 queries\nselect top 4 by dot(q, k over sketch)",
            {"selects": "True", "sketches": "True"},
        ),
        ("layers 2..", {}),
        ("prefill blocks of 4", {}),
    ],
)
def test_the_runtime_is_told(statement: str, flags: dict[str, str]) -> None:
    assert dict(make_plan(evicting(f"score sum(attn)\n{statement}")).flags) == flags


@pytest.mark.parametrize(
    ("statement", "refusal"),
    [
        ("victims shared by heads", "`victims shared by heads`"),
        ("victims shared by layers", "`victims shared by layers`"),
        ("pages 4\nselect top 4 by dot(q, k)", "`pages` of what eviction leaves"),
    ],
)
def test_what_cpp_cannot_do(statement: str, refusal: str) -> None:
    plan = make_plan(evicting(f"score sum(attn)\n{statement}"))
    assert (plan.cpp, plan.cpp_refusal) == (None, refusal)


def test_a_prompt_is_no_matter_of_cpp() -> None:
    """Where nothing is evicted in decode, a score that C++ cannot say is never asked for, nor is who shares a budget."""
    body = "budget 8 across heads floor 0.2\nwhen prefill\nscore max_pool(sum(attn over last 4 queries), 7)"
    plan = make_plan(checked(body))
    assert plan.cpp is not None
    assert not plan.cpp.settles
    assert plan.cpp.observe


def test_selecting_needs_no_statistics() -> None:
    plain = make_plan(checked("select top 16 by dot(q, k)"))
    assert (plain.bounded, plain.reads_attention) == (False, False)
    assert (plain.torch.protects, plain.torch.protect, plain.torch.score) == (True, ("keep.last(1)",), ())


def test_without_a_budget_or_a_selection_nothing_is_protected() -> None:
    assert not make_plan(checked("")).torch.protects


# -- the same in Triton ------------------------------------------------------------------------------------------------


def test_a_sketch_in_triton() -> None:
    plan = make_plan(
        checked(
            "param n = 3\ngroup max\nsketch top 4 dims by max(abs(q), n) / 2 every 8 queries\n"
            "select top 8 by dot(q, k over sketch)\nkeep first n"
        )
    )
    assert plan.triton is not None and plan.triton.select is not None
    select = plan.triton.select
    assert select.sketch_by == (
        'ops.over_group(tl.div_rn(ops.maximum(tl.abs(q), number_n.to(tl.float32)), 2.0), g, G, "max")'
    )
    assert [name for name, _ in select.sketch_numbers] == ["n", "sketch_dims", "sketch_every"]
    assert [name for name, _ in select.choose_numbers] == ["n", "select"]
    assert (select.by, select.first, select.last, select.observed) == ("sketch_dot", True, True, False)
    assert select.protect == (
        "first = evicting.first_protected(position, slots, now, live, ops.count(number_n), BLOCK)",
        "last = evicting.last_protected(position, slots, now, live, 1, BLOCK)",
    )


def test_what_a_query_skips_got_nothing() -> None:
    """Where a policy selects, probabilities are 0 beside what was chosen."""
    plan = make_plan(evicting("score sum(attn)\nselect top 4 by dot(q, k)")).triton
    assert plan is not None and plan.select is not None and plan.select.observed
    lines = [line for loop in plan.observe for line in loop.body]
    assert 'attn = ops.attended(ops.attn(logits, lse, i, slots, G, G_PAD, "mean"), taken, i, inside, SELECTS)' in lines


@pytest.mark.parametrize(
    ("statement", "compact", "agrees"),
    [
        ("positions compact", True, False),
        ("victims shared by heads", False, True),
        ("victims shared by heads\nwhen prefill", False, False),  # no step evicts
        ("cap hard", False, False),
    ],
)
def test_what_a_step_in_triton_has_to_do(statement: str, compact: bool, agrees: bool) -> None:
    plan = make_plan(evicting(f"score sum(attn)\n{statement}")).triton
    assert plan is not None
    assert (plan.compact, plan.agrees) == (compact, agrees)


def test_a_condition_for_all_slots_joins_those_over_slots() -> None:
    plan = make_plan(evicting("score sum(attn)\nkeep where max(sum(attn) over slots) < 1\nkeep where age < 3")).triton
    assert plan is not None
    kept = plan.score[-1].body[-1]
    assert kept.startswith("tl.store(kept + i, (pos >= last) | (ops.truth(max_over_slots_1 < 1.0)) | (")


@pytest.mark.parametrize(
    ("statements", "refusal"),
    [
        ("select top 8 by dot(q, k) - age", "`select` by anything but dot(q, k)"),
        ("select top 8 by random()", "`select` by anything but dot(q, k)"),
        ("pages 4\nselect top 8 by dot(q, k)", "`pages` that rank by their tokens"),
        (
            "sketch top 4 dims by abs(q) * max(k over slots) every 3 queries\nselect top 8 by dot(q, k over sketch)",
            "a sketch by anything but the query, dim by dim",
        ),
        (
            "sketch top 4 dims by max(k over slots) every 3 queries\nselect top 8 by dot(q, k over sketch)",
            "a sketch by anything but the query, dim by dim",
        ),
        ("param budget = 8\nscore sum(attn)\nvictims shared by layers", "`victims shared by layers`"),
        ("param budget = 8\nscore max_pool(sum(attn), 3)", "`max_pool`"),
    ],
)
def test_what_triton_refuses(statements: str, refusal: str) -> None:
    plan = make_plan(checked(statements))
    assert plan.triton is None
    assert plan.triton_refusal.startswith(refusal)


def test_kernels_are_given_what_their_text_needs_whatever_names_are_in_it() -> None:
    """A param may be named as something that kernels have; a power somewhere is not the whole value."""
    plan = make_plan(
        checked("param budget = 8\nparam window = 3\nparam random_key = 2\nscore position * window + random_key")
    ).triton
    assert plan is not None
    assert plan.args == ("numbers", "work")
    plan = make_plan(evicting("score (age + 1) ** 0.5 - position")).triton
    assert plan is not None
    assert "ops.power((now - pos).to(tl.float32) + 1.0, 0.5).to(tl.float32) - pos.to(tl.float32)" in plan.score[-1].body[-2]
    plan = make_plan(evicting("score sum(attn > mean(attn over slots))")).triton
    assert plan is not None
    assert plan.args == ("columns", "numbers", "logits", "window", "work")
