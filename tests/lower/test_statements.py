"""What statements become: numbers, flags, forms and refusals. What the printed lines do is compared in `tests/differential`."""

from __future__ import annotations

import ast
import dataclasses
import importlib
from pathlib import Path

import pytest

from kvdsl.compiler import package
from kvdsl.ir.nodes import Policy
from kvdsl.lower.plan import make_plan
from kvdsl.lower.triton_hooks import ARGUMENTS
from tests.lower.policies import checked, evicting

ROOT = Path(__file__).parents[2]

# -- one query's own ---------------------------------------------------------------------------------------------------

FORMS = {
    # `select ... by`: how C++ ranks the slots
    "dot(q, k)": "dot",
    "sum(k * q over dims)": "dot",
    "dot(q, k over sketch)": "sketch_dot",
    "sum(max(q * min(k over page), q * max(k over page)) over dims)": "page_bound",
    "sum(max(max(k over page) * q, min(k over page) * q) over dims)": "page_bound",
    "dot(q, k) - age": "expression",
    "max(k over sketch)": "expression",
    "sum(q * max(k over page) over dims)": "expression",
    "max(norm1(k) over page)": "expression",
    "rank(dot(q, k))": "expression",
    "mean(dot(q, k) over heads)": "expression",
    "random()": "expression",
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
    assert plan.select.by == FORMS[by]
    assert (plan.select.page, plan.select.sketch is not None) == ("page" in by, "sketch" in by)


@pytest.mark.parametrize(
    ("statements", "refusal"),
    [
        ("select top 8 by max(dot(q, k) over heads) - min(dot(q, k) over heads)", "several reductions over heads"),
        (
            "select top 8 by max(dot(q, k) over heads) - rank(dot(q, k))",
            "a reduction over slots of a value per query head, together with `over heads`",
        ),
    ],
)
def test_selections_that_cpp_cannot_make(statements: str, refusal: str) -> None:
    plan = make_plan(checked(statements))
    assert (plan.cpp, plan.refusals["cpu"]) == (None, refusal)


@pytest.mark.parametrize(
    ("statements", "alone", "vote", "voted"),
    [
        ("select top 8 by dot(q, k) - age", False, "", ""),
        ("select top 8 by rank(dot(q, k))", True, "", ""),
        ("select top 8 by rank(age) * dot(q, k)", False, "", ""),
        ("select top 8 by max(dot(q, k) over heads)", False, "max", ""),
        ("select top 8 by sum(rank(dot(q, k)) over heads) + age", True, "sum", "voted[i] + static_cast<float>(row.age(i))"),
    ],
)
def test_how_cpp_asks_query_heads_and_kv_heads(statements: str, alone: bool, vote: str, voted: str) -> None:
    plan = make_plan(checked(statements)).cpp
    assert plan is not None and plan.select is not None
    expression, made = plan.select.expression, plan.select.voted
    assert (expression is not None and expression.alone, plan.select.vote) == (alone, vote)
    assert (made.value if made else "") == voted


@pytest.mark.parametrize(
    ("count", "asks"),
    [
        ("max(16, min(seen, 64))", False),
        ("sum(age < 9 over slots)", False),
        ("sum(max(k over dims) > 0 over slots)", True),
        ("enough(exp(dot(q, k)), 0.5)", True),
    ],
)
def test_how_many_a_query_selects(count: str, asks: bool) -> None:
    """In the layers of the range; that there is none elsewhere, the number `select` says, which is infinite there."""
    policy = checked(f"select top {count} by dot(q, k) in layers 2..")
    plan = make_plan(policy).cpp
    assert plan is not None and plan.select is not None and plan.select.count is not None
    assert plan.select.count.asks == asks
    assert "Number::select" not in plan.select.count.value
    assert "isinf(row.param(Number::select))" in package(policy, "")["kernels_cpu.cpp"]


@pytest.mark.parametrize("target", ["cpp", "triton"])
def test_a_form_of_keep_that_a_target_does_not_name_is_refused(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    can = importlib.import_module(f"kvdsl.lower.{target}_expressions").CAN
    monkeypatch.setattr(f"kvdsl.lower.{target}.CAN", dataclasses.replace(can, keeps=("last",)))
    refusals = make_plan(evicting("score age\nkeep first 2\nkeep last 2")).refusals
    assert refusals == {{"cpp": "cpu"}.get(target, target): "`keep first`"}


@pytest.mark.parametrize("who", ["heads", "layers"])
def test_nobody_has_to_agree_in_cpp_once_the_prompt_is_over(who: str) -> None:
    plan = make_plan(evicting(f"score sum(attn)\nvictims shared by {who}\nwhen prefill"))
    assert plan.cpp is not None and plan.cpp.settle is None


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_budgets_that_layers_share() -> None:
    shared = "param a = 2\nwhen prefill\nscore sum(attn)\nkeep first 3\nbudget 8 across "
    pool = make_plan(checked(f"{shared}layers floor 1 / a"))
    assert dict(pool.numbers)["floor"] == "given.share(capacity, 1 / a)"
    assert dict(pool.flags) == {"across_layers": '"pool"', "when": '"prefill"', "across": "True"}
    both = make_plan(checked(f"{shared}heads floor 1 / a across layers by layer floor 0.5"))
    assert dict(both.numbers)["head_floor"] == "given.rate(1 / a)"
    assert (
        dict(both.numbers)["layer_floor"] == "given.largest(given.share(capacity, 0.5), given.largest(3) + given.largest(1))"
    )
    assert dict(both.flags)["across_layers"] == '"shares"'
    assert both.torch.weigh == ('return slots.number("layer")',)
    assert both.cpp is not None and both.triton is not None, "decoded tokens know nothing of it"


def test_blocks_of_the_prompt() -> None:
    plan = make_plan(evicting("score sum(attn)\nprefill blocks of 32 * a"))
    assert dict(plan.numbers)["prefill_block"] == "given.count(32 * a, low=1)"
    assert plan.cpp is not None


# -- what a policy is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "flags"),
    [
        ("when decode", {"when": '"decode"'}),
        ("victims shared by heads", {"victims": '"heads"', "torch_evicts": "True"}),
        ("victims shared by layers", {"victims": '"layers"', "torch_evicts": "True"}),
        ("cap hard", {"hard_cap": "True"}),
        ("positions compact", {"compact": "True"}),
        ("select top 4 by dot(q, k)", {"selects": "True"}),
        (
            "sketch top 2 dims by abs(q) every 2 queries\nselect top 4 by dot(q, k over sketch)",
            {"selects": "True", "sketches": "True"},
        ),
        ("layers 2..", {}),
        ("prefill blocks of 4", {}),
        ("keep top 2 by sum(norm1(max(attn * v over slots)))", {"vectors": "True", "overprotects": "True"}),
        ("keep top 2 by sum(norm1(sum(attn * v over slots)) + dot(q, k))", {"overprotects": "True"}),
        ("keep top 2 by sum(norm1(q - k))", {"vectors": "True", "overprotects": "True"}),
    ],
)
def test_the_runtime_is_told(statement: str, flags: dict[str, str]) -> None:
    assert dict(make_plan(evicting(f"score sum(attn)\n{statement}")).flags) == flags


BOUND = "sum(max(q * min(k over page), q * max(k over page)) over dims)"


@pytest.mark.parametrize(
    ("statements", "kept"),
    [
        ("", True),
        ("\nkeep first 4", True),
        ("\nparam budget = 8\nscore age", False),
        ("\nparam budget = 8\nscore age\nwhen prefill", False),
    ],
)
def test_bounds_of_pages_are_kept_where_no_token_leaves(statements: str, kept: bool) -> None:
    plan = make_plan(checked(f"pages 4\nselect top 8 by {BOUND}{statements}"))
    assert plan.cpp is not None and plan.cpp.select is not None
    assert plan.cpp.select.by == ("page_bound" if kept else "expression")
    assert ("bounds_pages" in dict(plan.flags)) == kept
    apart = make_plan(checked(f"pages 4 after 2\nselect top 8 by {BOUND}{statements}"))
    assert apart.cpp is not None and apart.cpp.select is not None and apart.cpp.select.by == "expression"


def test_pools_come_behind_what_may_not_leave_in_cpp() -> None:
    plan = make_plan(evicting("score max_pool(sum(attn), 7) - mean_pool(age, a)\nkeep top 2 by age")).cpp
    assert plan is not None and plan.settle is not None
    assert plan.settle.loop == ("top_1[i] = static_cast<float>(head.age(i));",)
    protected, kept, *pools = plan.settle.protect
    assert (protected, kept) == ("head.protect_top(top_1, 2);", "head.protect_last(1);")
    assert ["max_pool_" in pools[0], "mean_pool_" in pools[1]] == [True, True]
    assert plan.settle.last == ("score[i] = max_pool_1[i] - mean_pool_2[i];",)


@pytest.mark.parametrize("budget", ["0.5 * seen", "sum(age < 5 over slots) + live"])
def test_a_budget_that_reads_the_data_is_found_at_a_settle(budget: str) -> None:
    plan = make_plan(checked(f"score sum(attn)\nbudget {budget} at most 9\nlayers 2..")).cpp
    assert plan is not None and plan.settle is not None and plan.settle.budget is not None
    assert plan.settle.overflow == "kvdsl::count(kvdsl::minimum(head.param(Number::capacity), budget(head)))"
    assert plan.settle.budget.value.startswith("(head.param(Number::layer) < 2.0 ? INFINITY : ")


def test_a_prompt_is_no_matter_of_cpp() -> None:
    """Where nothing is evicted in decode, a score that C++ cannot say is never asked for, nor is who shares a budget."""
    body = "budget 8 across heads floor 0.2\nwhen prefill\nscore max_pool(sum(attn over last 4 queries), 7)"
    plan = make_plan(checked(body))
    assert plan.cpp is not None
    assert plan.cpp.settle is None
    assert plan.cpp.observe


def test_selecting_needs_no_statistics() -> None:
    plain = make_plan(checked("select top 16 by dot(q, k)"))
    assert (plain.bounded, plain.reads_attention) == (False, False)
    assert (plain.torch.protects, plain.torch.protect, plain.torch.score) == (True, ("keep.last(1)",), ())


# -- the same in Triton ------------------------------------------------------------------------------------------------


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
    told = dict(plan.constants)
    assert (told["COMPACT"], told["AGREES"], "agree" in plan.kernels) == (str(compact), str(agrees), agrees)


@pytest.mark.parametrize(
    ("statements", "refusal"),
    [
        ("select top 8 by dot(q, k) - age", "`select` by anything but dot(q, k)"),
        ("select top 8 by random()", "`select` by anything but dot(q, k)"),
        ("pages 4\nselect top 8 by dot(q, k)", "`pages` that rank by their tokens"),
        ("sketch top 4 dims by abs(q) * max(k over slots) every 3 queries\nselect top 8 by dot(q, k over sketch)",
         "a sketch by anything but the query, dim by dim"),
        ("sketch top 4 dims by max(k over slots) every 3 queries\nselect top 8 by dot(q, k over sketch)",
         "a sketch by anything but the query, dim by dim"),
        ("param budget = 8\nscore sum(attn)\nvictims shared by layers", "`victims shared by layers`"),
        ("param budget = 8\nscore max_pool(sum(attn), 3)\nvictims shared by heads", "a pool of heads that agree on their victims"),
        ("param budget = 8\nscore norm2(k - mean(other(k) over others))", "what slots have of each other dim by dim"),
        ("param budget = 8\nscore max(sum(other(k) * v over dims) over others)", "what slots have of each other dim by dim"),
        ("param budget = 8\nscore sum(rank(attn))", "`rank`"),
        *(
            (f"param budget = 8\nscore mean(dot(q, k) over last 4 queries)\nwhen {phase}", "what a query gives every slot")
            for phase in ("both", "prefill")
        ),
        ("param budget = 8\nscore sum(attn)\npages 4\nselect top 8 by dot(q, mean(k over page))", "`select` by `pages` of what eviction"),
        ("pages 4 after 1\nselect top 8 by dot(q, mean(k over page))", "`select` by `pages` that do not begin with the text"),
        ("group max\npages 4\nselect top 8 by dot(q, mean(k over page))", "`select` by the mean key of a page, where the largest"),
        ("select top 8 by max(dot(q, k) over heads) - age", "`select` by anything but dot(q, k)"),
    ],
)  # fmt: skip
def test_what_triton_refuses(statements: str, refusal: str) -> None:
    plan = make_plan(checked(statements))
    assert plan.triton is None
    assert plan.refusals["triton"].startswith(refusal)


def test_a_policy_s_functions_take_what_kernels_give_them() -> None:
    """The compiler runs where `kvdsl.runtime` is absent, so the arguments are written in both."""
    kernels = ast.parse((ROOT / "kvdsl" / "runtime" / "gpu" / "kernels" / "hooks.py").read_text(encoding="utf-8"))
    functions = [node for node in kernels.body if isinstance(node, ast.FunctionDef)]
    assert {function.name: ast.unparse(function.args) for function in functions} == ARGUMENTS


def hook(policy: Policy, name: str) -> list[str]:
    """The lines of a function of a policy's Triton kernels; none if it has no such function."""
    plan = make_plan(policy).triton
    assert plan is not None
    return [line.strip() for hook in plan.hooks if hook.name == name for line in hook.body]


def test_triton_reads_what_a_policy_reads_whatever_names_are_in_it() -> None:
    """A param may be named as something that kernels have; a power somewhere is not the whole value."""
    named = checked("param budget = 8\nparam window = 3\nparam random_key = 2\nscore position * window + random_key")
    value = "score = pos.to(tl.float32) * number_window.to(tl.float32) + number_random_key.to(tl.float32)"
    assert value in hook(named, "rank_slots") and not hook(named, "update") and not hook(named, "find_columns")
    value = "score = ops.power((now - pos).to(tl.float32) + 1.0, 0.3).to(tl.float32) - pos.to(tl.float32)"
    assert value in hook(evicting("score (age + 1) ** 0.3 - position"), "rank_slots")
    attention = evicting("score sum(attn > mean(attn over slots))")
    assert any("logits" in line for line in hook(attention, "update")) and hook(attention, "find_columns")


# -- params ------------------------------------------------------------------------------------------------------------


def test_params_that_read_the_budget_stand_behind_it_wherever_they_are_declared() -> None:
    body = "param recent = budget / 4\nparam half = recent + 1\nparam extra = 3\nparam budget = 64 + extra\nscore position\nkeep last half"
    lines = [line.partition(" = ")[0] for line in make_plan(checked(body)).resolve]
    assert lines[:5] == ["extra", "budget", "capacity", "recent", "half"]


@pytest.mark.parametrize(
    ("statement", "refusal"),
    [
        ("victims shared by heads", "`victims shared by heads`"),
        ("victims shared by layers", "`victims shared by layers`"),
    ],
)
def test_what_cpp_leaves_to_torch(statement: str, refusal: str) -> None:
    plan = make_plan(evicting(f"score sum(attn)\n{statement}"))
    assert plan.cpp is not None and plan.cpp.settle is None and plan.cpp.beyond == refusal
