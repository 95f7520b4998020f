"""The contract of the table of operations: for every operation, at every place where the checker takes it, a target has code that does
what the interpreter does, or refuses it with a reason that `kvdsl explain` shows. Triton's agreement is in tests/triton.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from kvdsl.compiler import package, plan_of
from kvdsl.explain.facts import facts
from kvdsl.interp import evaluate as evaluate_module
from kvdsl.interp.evaluate import Scope, evaluate, fold, per_slot
from kvdsl.interp.memory import over_queries
from kvdsl.ir import ops
from kvdsl.ir.nodes import Axis, ColumnRef, Input, Reduce, call
from kvdsl.ir.printer import print_policy
from kvdsl.lower import cpp_expressions, torch_expressions, triton_expressions
from kvdsl.lower.expression import NotLowerable
from kvdsl.passes.normal import from_formula
from kvdsl.runtime.state import order
from kvdsl.runtime.torch import columns, numerics, statistics, view
from kvdsl.runtime.torch.backend import TorchBackend
from tests.diagnostics.expect import expect_in

from .operations import EVICTED_BY_TORCH, TRACE, WITHOUT_KERNELS, all_operations, reduction, trace_of
from .operations import policy as checked
from .traces import run_policy, spec_of
from .units import build

OPERATIONS = dict(all_operations())
PRINTERS = {
    "cpu": cpp_expressions.SlotPrinter("head", {}),
    "torch": torch_expressions.TensorPrinter("slots"),
    "triton": triton_expressions.BlockPrinter({}),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_target_has_code_or_says_what_it_lacks(name: str) -> None:
    served = {one["name"]: one for one in facts(OPERATIONS[name]).backends}
    assert served["torch"]["ok"], "torch serves what nothing else does"
    for backend in ("cpu", "triton"):
        assert served[backend]["ok"] == (name not in WITHOUT_KERNELS[backend]), served[backend]["why_not"]
        assert served[backend]["ok"] == (served[backend]["why_not"] is None)
        assert served[backend]["ok"] or served[backend]["why_not"]
    assert name not in EVICTED_BY_TORCH or served["cpu"]["torch_evicts"]


@pytest.mark.parametrize("name", OPERATIONS)
def test_torch_does_what_the_interpreter_does(name: str) -> None:
    one = run_policy(OPERATIONS[name], TorchBackend(), trace_of(OPERATIONS[name]))
    assert one.steps
    assert not one.failures, f"{print_policy(OPERATIONS[name])}\n{one.failures[0]}"


def test_cpp_does_what_the_interpreter_does() -> None:
    """All in one translation unit; over all that it has code for."""
    named = {
        f"p{n}": policy.model_copy(update={"stem": f"p{n}", "name": f"P{n}"}) for n, policy in enumerate(OPERATIONS.values())
    }
    files = {stem: package(policy, print_policy(policy)) for stem, policy in named.items()}
    fused = {stem: named[stem] for stem in named if "kernels_cpu.cpp" in files[stem]}
    assert len(fused) == len(OPERATIONS) - len(WITHOUT_KERNELS["cpu"])
    specs = {stem: spec_of(policy, files[stem]) for stem, policy in fused.items()}
    backends = build({stem: (files[stem]["kernels_cpu.cpp"], specs[stem], TRACE.dtype) for stem in fused}, "-O0")
    for stem, policy in fused.items():
        one = run_policy(policy, backends[stem], trace_of(policy), spec=specs[stem])
        assert one.steps
        assert not one.failures, f"{print_policy(policy)}\n{one.failures[0]}"


# -- no row without a meaning, no meaning without a row ----------------------------------------------------------------


@pytest.mark.parametrize("op", ops.REDUCTIONS)
def test_the_interpreter_has_a_meaning_for_every_reduction(op: str) -> None:
    values = [0.25, -1.5, 4.0]
    assert math.isfinite(over_queries(op, values, 0.5))
    nothing = over_queries(op, [], 0.5)
    assert nothing == ops.REDUCTIONS[op].of_nothing or (math.isnan(nothing) and math.isnan(ops.REDUCTIONS[op].of_nothing))
    if set(ops.REDUCTIONS[op].over) - {"queries", "history"}:
        assert fold(op, np.array([values]), 1).shape == (1, 1)


@pytest.mark.parametrize("op", [op for op, row in ops.REDUCTIONS.items() if row.parts is not None])
def test_the_parts_of_a_reduction_are_what_it_means(op: str) -> None:
    formula, x = ops.REDUCTIONS[op].parts, Input(name="position")
    made = from_formula(formula, x, lambda inner, body: Reduce(op=inner, axis=Axis.SLOT, body=body))
    scope = Scope(4, 1, {"position": per_slot([0.25, -1.5, 4.0, 1e3])}, {})
    assert made != Reduce(op=op, axis=Axis.SLOT, body=x)
    np.testing.assert_allclose(evaluate(made, scope), evaluate(Reduce(op=op, axis=Axis.SLOT, body=x), scope), rtol=1e-12)


def test_the_torch_backend_has_what_lowering_says() -> None:
    can = torch_expressions.CAN.reduces
    assert {*can["history"], *can["slots"], *can["sketch"]} == numerics.MASKED.keys() | numerics.WITH_ARGUMENT.keys()
    assert set(can["queries"]) == columns.INITIAL.keys() | {"ring"}
    assert (
        pytest.approx({name: row.fresh for name, row in ops.RULES.items() if name != "ring"}, nan_ok=True) == columns.INITIAL
    )


# -- a reduction that is made of others --------------------------------------------------------------------------------


def test_a_row_and_its_meaning_are_enough_for_a_reduction_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spread of values, which is nowhere known but in its row: all targets serve it, over queries, slots and dims."""
    formula = ("-", ("max", "x"), ("min", "x"))
    over = ("queries", "slots", "dims")
    row = ops.ReductionRow("spread", "the largest less the smallest", over, rises=False, columns=formula, parts=formula)
    monkeypatch.setitem(ops.REDUCTIONS, "spread", row)
    monkeypatch.setitem(evaluate_module._REDUCTIONS, "spread", np.ptp)
    policies = {f"p{n}": reduction("spread", where) for n, where in enumerate(over)}
    assert all(one["ok"] for policy in policies.values() for one in facts(policy).backends if one["name"] != "triton")
    assert facts(policies["p1"]).backends[-1]["ok"]
    for policy in policies.values():
        assert not run_policy(policy, TorchBackend(), trace_of(policy)).failures


# -- nothing falls through ---------------------------------------------------------------------------------------------


def test_an_operation_without_a_row_is_an_error() -> None:
    with pytest.raises(ValidationError, match="there is no `mode`"):
        Reduce(op="mode", axis=Axis.SLOT, body=Input(name="age"))
    x, visible = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(KeyError):
        numerics.masked_reduce("mode", x, visible, -1)
    with pytest.raises(KeyError):
        order.pool("mode", torch.zeros(1, 1, 3), torch.arange(3).view(1, 1, 3), ~visible.unsqueeze(1), torch.tensor(3))


@pytest.mark.parametrize("target", PRINTERS)
def test_a_target_refuses_what_it_does_not_name(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops.REDUCTIONS, "mode", ops.ReductionRow("mode", "", ("slots", "history")))
    monkeypatch.setitem(ops.OPERATIONS, "tanh", lambda axes: axes)
    age, printer = Input(name="age"), PRINTERS[target]
    for expr, name in (
        (Reduce(op="mode", axis=Axis.SLOT, body=age), "mode over slots"),
        (ColumnRef(name="age_ring", op="mode"), "mode over the last N queries"),
        (call("tanh", age), "tanh"),
    ):
        with pytest.raises(NotLowerable, match=f"`{name}`"):
            printer(expr)


# -- median: what only torch has code for ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "visible", "expected"),
    [
        ([3.0, 1.0, 2.0], [1, 1, 1], 2.0),
        ([3.0, 1.0, 9.0, 2.0], [1, 1, 0, 1], 2.0),
        ([4.0, 1.0, 2.0, 8.0], [1, 1, 1, 1], 3.0),
        ([math.inf, math.inf, -math.inf], [1, 1, 1], math.inf),
        ([math.inf, -math.inf], [1, 1], math.nan),
        ([1.0, math.nan, 2.0], [1, 1, 1], math.nan),
        ([1.0, math.nan, 2.0], [1, 0, 1], 1.5),
        ([3e38, 3.2e38], [1, 1], 3.1e38),
        ([1.0], [0], math.nan),
    ],
)
def test_a_median_is_the_middle_one_of_what_is_visible(values: list[float], visible: list[int], expected: float) -> None:
    x, mask = torch.tensor([values]), torch.tensor([visible], dtype=torch.bool)
    assert float(numerics.masked_reduce("median", x, mask, -1)) == pytest.approx(expected, nan_ok=True)
    with np.errstate(invalid="ignore"):
        seen = [value for value, counts in zip(values, visible, strict=True) if counts]
        assert over_queries("median", seen) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("values", [[3.0, 1.0, 2.0, 9.0, 4.0], [1.0], [2.0, -1.0]])
def test_a_quantile_lies_between_two_values_as_numpy_has_it(values: list[float], share: float) -> None:
    x = torch.tensor([[*values, 100.0]])
    mask = torch.tensor([[True] * len(values) + [False]])
    expected = float(np.quantile(values, share))
    assert float(numerics.masked_reduce("quantile", x, mask, -1, share)) == pytest.approx(expected)
    assert over_queries("quantile", values, share) == pytest.approx(expected)


def test_a_quantile_of_nothing_or_with_a_nan_is_none() -> None:
    x, seen = torch.tensor([[1.0, math.nan]]), [[1, 1], [0, 0], [0, 1], [1, 0]]
    found = [float(numerics.masked_reduce("quantile", x, torch.tensor([mask]) > 0, -1, 0.5)) for mask in seen]
    assert found == pytest.approx([math.nan, math.nan, math.nan, 1.0], nan_ok=True)
    assert math.isnan(over_queries("quantile", [1.0, math.nan], 0.5))
    assert math.isnan(over_queries("quantile", [], 0.5))


def test_backends_without_a_median_say_so() -> None:
    found = facts(reduction("median", "slots"))
    assert [one["why_not"] for one in found.backends] == ["`median over slots`", None, "`median over slots`"]
    cpu, _, triton = facts(reduction("median", "history")).backends
    assert cpu["ok"] and cpu["torch_evicts"] == triton["why_not"] == "`median over the last N queries`"


def test_no_column_holds_a_median() -> None:
    message = "`median` over all queries cannot be updated with one number per token"
    expect_in("score median(attn)", "KV0306", message, "median(attn)", "write `median(attn over last 32 queries)`, say")
    message = "`median` reduces over slots and the last N queries only"
    expect_in("score median(v over dims)", "KV0306", message, "median(v over dims)", "write `median(v over slots)`")


def test_random_numbers_do_not_depend_on_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt is observed query by query and head by head."""
    monkeypatch.setitem(statistics._BLOCK_BYTES, "cpu", 4)
    one = run_policy(checked("param budget = 7\nscore sum(attn * random())"), TorchBackend(), TRACE)
    assert not one.failures, one.failures[0]


# -- vectors, weighted -------------------------------------------------------------------------------------------------

WEIGHTED = {
    "mean(norm2(sum(attn * v over slots)))": "row.visible.weighted(row.attn, row.value)",
    "sum(norm1(sum(k * (logit > 0) over slots)))": "row.visible.weighted((row.logit > 0).float(), row.key)",
    "max(sum(sum(dot(q, k) * k over slots) * q over dims))": "row.visible.weighted(row.dot_qk, row.key, grouped=True)",
}


@pytest.mark.parametrize("inputs", ["normal", "nan", "inf"])
@pytest.mark.parametrize("score", WEIGHTED)
def test_a_weighted_sum_of_vectors_is_a_product_of_matrices(score: str, inputs: str) -> None:
    """A value per query, slot and dim took minutes of a long prompt; but what no query sees may be infinite."""
    weighted = checked(f"param budget = 7\nscore {score}")
    assert any(WEIGHTED[score] in line for line in plan_of(weighted).torch.observe)
    one = run_policy(weighted, TorchBackend(), replace(TRACE, inputs=inputs))
    assert not one.failures, one.failures[0]


def test_what_has_dims_takes_fewer_queries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of values for every query, slot and dim is no larger than one of probabilities elsewhere."""
    vectors = checked("param budget = 7\nscore mean(norm2(max(attn * v over slots)))")
    spec, sizes = spec_of(vectors), []
    observe = spec.torch_kernels.observe

    def noted(row: view.View, folded: columns.Columns) -> None:
        sizes.append(row.visible.mask.expand(-1, row.position.shape[1], -1, -1).numel() * row.key.shape[-1])
        observe(row, folded)

    monkeypatch.setattr(spec.torch_kernels, "observe", noted)
    monkeypatch.setitem(statistics._BLOCK_BYTES, "cpu", 4 * 1_000)
    assert not run_policy(vectors, TorchBackend(), TRACE, spec=spec).failures
    assert max(sizes) <= 1_000
