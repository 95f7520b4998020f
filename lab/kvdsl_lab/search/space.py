"""Which policies are searched: a budget, a score, `keep` lines, a trigger and the group's reduction, within bounds.

Policies that mean the same shall be one: `canonical` folds constants, orders what commutes, draws positive factors out of
reductions, and drops what does not change an order from the outside of a score. Float32's rounding may tell two of them apart
where scores lie within a rounding error; the search does not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvdsl.ir.nodes import Axis, Call, Expr, Input, Keep, Number, Param, ParamRef, Policy, Reduce, call, is_call
from kvdsl.ir.ops import COMPARISONS, FUNCTIONS, LOGICAL, OPERATORS
from kvdsl.ir.printer import print_expression, print_keep, print_policy
from kvdsl.ir.visitors import axes_of, children, expressions, rewrite, walk, with_policy
from kvdsl.passes.fold import fold, fold_expression, value_of

BUDGET = Input(name="budget")
"""What a count may read."""
_PARAM = ParamRef(name="budget")
ZERO, ONE = Number(value=0), Number(value=1)
EVERY = (2, 2**20)
"""Two budgets that stand for all: counts, which are a share and some tokens, fit into any between them if they fit into both."""
SEARCHED = ("score", "keeps", "trigger", "group")
"""The fields of a policy that differ; all others have their defaults."""
Group = Literal["mean", "max", "sum"]
_COMMUTES = ("+", "*", "==", "!=", "and", "or", "max", "min")


@dataclass(frozen=True)
class Bounds:
    """How large a policy may become.

    Attributes:
        state_bytes: of a slot, beside its key, value and position.
        nodes: of all its expressions together.
        keeps: lines of `keep`; of `keep first` and `keep last` at most one each, for the larger is both.
        trigger: how many tokens over the budget it may hold before it evicts.
    """

    state_bytes: int = 16
    nodes: int = 24
    keeps: int = 3
    trigger: int = 1


def policy_of(score: Expr, keeps: tuple[Keep, ...] = (), *, trigger: Expr | None = None, group: Group = "mean") -> Policy:
    """A policy of the space, not yet canonical; its budget is a param."""
    changed: dict[str, Any] = {} if trigger is None else {"trigger": trigger}
    budget = Param(name="budget", default=Number(value=512))
    return Policy(
        name="Found", stem="found", params=(budget,), budget=_PARAM, score=score, keeps=keeps, group=group, **changed
    )


def seed_of(policy: Policy) -> Policy | None:
    """What of a shipped policy lies in the space, with its params' defaults in their places; None if it does not evict by a score.

    Positions, selections and what concerns the layout in memory are left out: they do not say who leaves.
    """
    beyond = (
        policy.heads_share
        or policy.across_layers is not None
        or policy.measured is not None
        or policy.when != "both"
        or policy.select is not None
        or policy.victims != "own"
    )
    if policy.score is None or policy.budget != _PARAM or beyond or policy.layers is not None or policy.tensors:
        return None
    values = {param.name: param.default for param in policy.params if param.name != "budget"}

    def number(expr: Expr) -> Expr | None:
        if expr == _PARAM:
            return BUDGET
        return rewrite(values[expr.name], number) if isinstance(expr, ParamRef) and expr.name in values else None

    assert policy.group != "each", "nothing is selected"
    keeps = tuple(
        keep.model_copy(
            update={name: rewrite(part, number) for name in ("count", "by") if (part := getattr(keep, name)) is not None}
        )
        for keep in policy.keeps
    )
    return canonical(
        policy_of(rewrite(policy.score, number), keeps, trigger=rewrite(policy.trigger, number), group=policy.group)
    )


# -- one form ----------------------------------------------------------------------------------------------------------


def canonical(policy: Policy, budgets: Sequence[int] = EVERY) -> Policy:
    """The form that stands for all policies which keep the same tokens as this one at these budgets, as far as algebra tells."""
    policy = fold(policy)
    assert policy.score is not None
    score = ranked(policy.score)
    group = "mean" if policy.group == "sum" and all(degree(one) is not None for one in expressions(policy)) else policy.group
    keeps = [
        keep.model_copy(
            update={
                "count": None if keep.count is None else _whole(ordered(keep.count)),
                "by": None if keep.by is None else ranked(keep.by),
            }
        )
        for keep in policy.keeps
    ]
    fit = all(_fit_together(keeps, budget) for budget in budgets)
    idle = [keep for keep in keeps if fit and keep.scope == "top" and keep.by == score]
    told = {_line(keep): keep for keep in keeps if keep.count != ZERO and keep not in idle}
    return with_policy(policy, score=score, group=group, keeps=tuple(told[line] for line in sorted(told)))


def at_budget(policy: Policy, budget: int) -> Policy:
    """What a policy of the space is at one budget, canonical: a share of the budget is a number there."""

    def number(expr: Expr) -> Expr | None:
        return Number(value=float(budget)) if expr == BUDGET else None

    keeps = tuple(
        keep.model_copy(update={"count": None if keep.count is None else rewrite(keep.count, number)})
        for keep in policy.keeps
    )
    return canonical(with_policy(policy, keeps=keeps), (budget,))


def _fit_together(keeps: Sequence[Keep], budget: int) -> bool:
    """Whether the budget holds all that is protected: then the highest scores stay, whether a `keep top` names them or not."""
    counts = [value_of(keep.count, {"@budget": budget}) for keep in keeps if keep.count is not None]
    return sum(math.inf if count is None else count for count in counts) <= budget


def _whole(count: Expr) -> Expr:
    """A count that is a number is rounded down by what reads it."""
    return Number(value=float(math.floor(count.value))) if isinstance(count, Number) else count


def _line(keep: Keep) -> str:
    count = "" if keep.count is None else print_expression(keep.count)
    return f"{keep.scope} {'' if keep.by is None else print_expression(keep.by)} {count}"


def ranked(expr: Expr) -> Expr:
    """An expression that orders slots as this one does."""
    expr = ordered(fold_expression(expr))
    while (inner := _inside(expr)) is not None:
        expr = ordered(inner)
    return expr


def _inside(expr: Expr) -> Expr | None:
    """What a rising function of one value is of; None if the expression is none."""
    if is_call(expr, "exp") or (is_call(expr, "sqrt", "log") and nonnegative(expr.args[0])):
        return expr.args[0]
    if is_call(expr, *OPERATORS):
        left, right = expr.args
        if expr.op == "**" and isinstance(right, Number) and right.value > 0 and nonnegative(left):
            return left
        plain = _without_numbers(expr, ("+", "-")) if expr.op in ("+", "-") else _without_numbers(expr, ("*", "/"))
        return None if plain == expr else plain
    return None


def _without_numbers(expr: Expr, ops: tuple[str, str]) -> Expr:
    """A sum without its numbers, or a product without those above 0: it orders as before."""
    if not is_call(expr, *ops):
        return expr
    left, right = (_without_numbers(side, ops) for side in expr.args)
    sums, inverse = ops[0] == "+", expr.op == ops[1]
    if isinstance(right, Number) and (sums or right.value > 0):
        return left
    if isinstance(left, Number) and not inverse and (sums or left.value > 0):
        return right
    return call(expr.op, left, right)


def ordered(expr: Expr) -> Expr:
    """The expression with commuting operands in one order, without what changes nothing, and with factors outside of reductions."""
    if is_call(expr, *OPERATORS):
        return fold_expression(_ordered_binary(expr.op, *map(ordered, expr.args)))
    if isinstance(expr, Call):
        args = [ordered(arg) for arg in expr.args]
        if expr.op in _COMMUTES:
            args.sort(key=_order)
        return fold_expression(call(expr.op, *args))
    if isinstance(expr, Reduce):
        body = ordered(expr.body)
        if is_call(body, "*") and expr.op != "var":
            factor, rest = body.args
            if isinstance(factor, Number) and factor.value > 0:
                return call("*", factor, expr.model_copy(update={"body": rest}))
        return expr.model_copy(update={"body": body})
    return expr


def _ordered_binary(op: str, left: Expr, right: Expr) -> Expr:
    """An operation on operands that are ordered."""
    if (
        op == "/"
        and right == Input(name="observed")
        and isinstance(left, Reduce)
        and left.op == "sum"
        and _of_all_queries(left)
    ):
        return left.model_copy(update={"op": "mean"})
    if op == "/" and isinstance(right, Number) and right.value != 0:
        op, right = "*", Number(value=1 / right.value)
    if op in _COMMUTES and _order(right) < _order(left):
        left, right = right, left
    if (op == "*" and left == ONE) or (op == "+" and left == ZERO):
        return right
    return left if (op == "**" and right == ONE) or (op == "-" and right == ZERO) else call(op, left, right)


def degree(expr: Expr) -> float | None:
    """With which power of c the value grows if all attention is c times as large, for every c above 0; None where it does otherwise.

    The mean and the sum over a group are such attentions, so that both give the same order.
    """
    if isinstance(expr, Input):
        return None if expr.name in ("q", "logit") else float(expr.name == "attn")
    if isinstance(expr, Reduce):
        inner = degree(expr.body)
        return 2 * inner if inner is not None and expr.op == "var" else inner
    if is_call(expr, *OPERATORS):
        left, right = map(degree, expr.args)
        if left is None or right is None:
            return None
        if expr.op == "**":
            return left * expr.args[1].value if isinstance(expr.args[1], Number) else None
        if expr.op in ("*", "/"):
            return left + right if expr.op == "*" else left - right
        if left != right:
            return None
        return 0.0 if expr.op in COMPARISONS or expr.op in LOGICAL else left
    if is_call(expr, *FUNCTIONS):
        found = {degree(arg) for arg in expr.args}
        linear = expr.op in ("max", "min", "abs", "neg") and len(found) == 1
        return found.pop() if linear else 0.0 if found == {0.0} else None
    return 0.0 if isinstance(expr, (Number, ParamRef)) or is_call(expr, "random") else None


def _of_all_queries(expr: Reduce) -> bool:
    return expr.axis is Axis.QUERY and expr.last is None


def _order(expr: Expr) -> tuple[bool, str]:
    """Numbers first, then by the text."""
    return not isinstance(expr, Number), print_expression(expr)


def nonnegative(expr: Expr) -> bool:
    """Whether the value is known to be no less than 0."""
    if isinstance(expr, Number):
        return expr.value >= 0
    if isinstance(expr, Input):
        return expr.name in ("attn", "age", "position", "observed", "live", "budget", "prompt")
    if is_call(expr, *FUNCTIONS):
        return expr.op in ("abs", "exp", "sqrt", "not") or (expr.op in ("max", "min") and all(map(nonnegative, expr.args)))
    if isinstance(expr, Reduce):
        return expr.op in ("std", "var") or nonnegative(expr.body)
    if is_call(expr, *OPERATORS):
        if expr.op == "*" and expr.args[0] == expr.args[1]:
            return True
        return expr.op not in ("-", "**", "%") and all(map(nonnegative, expr.args))
    return False


def without_parts(policy: Policy, budgets: Sequence[int] = EVERY) -> dict[str, Policy]:
    """The policy without each of its `keep` lines, with the plain group, and with each operand of its score in the score's place.

    Each is canonical at these budgets.
    """
    found = {
        f"without `{print_keep(keep)}`": with_policy(policy, keeps=tuple(one for one in policy.keeps if one is not keep))
        for keep in policy.keeps
    }
    if policy.group != "mean":
        found["with `group mean`"] = with_policy(policy, group="mean")
    assert policy.score is not None
    for part in (part for part in children(policy.score) if axes_of(part) == {Axis.SLOT}):
        found[f"with `score {print_expression(part)}`"] = with_policy(policy, score=part)
    return {what: canonical(one, budgets) for what, one in found.items()}


def key(policy: Policy) -> str:
    """What a canonical policy is known by: a digest of its text."""
    return hashlib.sha256(print_policy(policy).encode()).hexdigest()[:16]


# -- what is let in ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """What a policy costs: bytes of state a slot, and how many operations its expressions have."""

    state_bytes: int
    nodes: int


def size_of(policy: Policy, bounds: Bounds) -> Size | None:
    """What it costs; None for what the checker refuses, what has no kernels on some backend, and what exceeds the bounds."""
    from kvdsl.compiler import analyse
    from kvdsl.explain.facts import facts
    from kvdsl.source import SourceFile

    nodes = sum(1 for expr in expressions(policy) for _ in walk(expr))
    scopes = [keep.scope for keep in policy.keeps]
    twice = scopes.count("first") > 1 or scopes.count("last") > 1
    if nodes > bounds.nodes or len(scopes) > bounds.keeps or twice or _beyond(policy.trigger, bounds.trigger):
        return None
    analysis = analyse(SourceFile("found.kv", print_policy(policy)))
    if not analysis.ok:
        return None
    told = facts(analysis.policy)
    if any(column.numbers is None for column in told.state) or told.state_bytes > bounds.state_bytes:
        return None
    return Size(told.state_bytes, nodes) if all(one["ok"] for one in told.backends) else None


def _beyond(trigger: Expr, most: int) -> bool:
    return not isinstance(trigger, Number) or not 1 <= trigger.value <= most
