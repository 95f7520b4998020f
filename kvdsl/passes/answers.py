"""Policies that keep a prompt whole and rank the generated tokens alone.

A server shares a prompt's keys and values between requests only if no policy evicts any of them. Consider a policy with the budget
`prompt + N` under which every prompt token stays and no later token is ranked by the prompt's slots. `of_answers` proves this and
returns the policy of the slots behind the prompt, with the budget N and `position < prompt` false. Both keep the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvdsl.ir.nodes import Axis, Call, Expr, Input, Keep, Number, Other, Policy, Rank, Reduce, call, is_call
from kvdsl.ir.printer import print_expression, print_keep
from kvdsl.ir.visitors import parts_of, walk, with_children, with_policy
from kvdsl.passes.fold import fold, value_of
from kvdsl.passes.normal import conditions, together

PROMPT, BUDGET, POSITION = Input(name="prompt"), Input(name="budget"), Input(name="position")


class NotByItselfError(Exception):
    """The proof fails.

    Attributes:
        what: the part of the policy at which it fails, and why. The policy's words are in backticks, the statement's first.
        mend: what to write instead.
    """

    def __init__(self, what: str, mend: str) -> None:
        super().__init__(f"{what}: {mend}")
        self.what, self.mend = what, mend


@dataclass(frozen=True)
class Answers:
    """The policy of the slots behind a prompt.

    Attributes:
        policy: with a budget that does not read the prompt.
        keeps: what it protects, as text.
        protected: the number of protected tokens, if protecting more than the budget would evict prompt tokens; None if those
            yield last.
    """

    policy: Policy
    protected: Expr | None
    keeps: str

    def check_room(self, given: Mapping[str, float], layer: int, layers: int) -> None:
        """Raise NotByItselfError if params protect more of an answer than the budget keeps.

        Args:
            given: params that the user sets.
        """
        if self.protected is None or self.policy.budget is None:
            return
        names = {"@layer": float(layer), "@layers": float(layers)}
        budget = None
        for _ in range(2):  # the budget may read params, and params the budget
            for param in self.policy.params:
                value = given.get(param.name, value_of(param.default, names))
                names |= {} if value is None else {param.name: value}
            budget = value_of(self.policy.budget, names)
            names |= {} if budget is None else {"@budget": math.floor(budget)}
        protected = value_of(self.protected, names)
        if protected is None or budget is None or protected > math.floor(budget):
            raise NotByItselfError(
                f"`{self.keeps}` may protect more of an answer than the budget keeps, which would evict prompt tokens",
                "set a larger budget, protect fewer tokens, or write `keep first prompt`, which yields last",
            )


def counts_from_the_prompt(policy: Policy) -> bool:
    """Return whether the budget is the prompt's tokens plus some, so that the policy is meant to keep the prompt."""
    return policy.budget is not None and _behind(fold(policy).budget)[0] == 1


def of_answers(policy: Policy) -> Answers:
    """Return the policy of what is generated behind a prompt.

    Raises:
        NotByItselfError: if it cannot be proved that the prompt stays and does not influence evictions.
    """
    policy = fold(policy)
    count, budget = _behind(policy.budget)
    if count != 1 or budget is None:
        raise NotByItselfError("`budget` is not `prompt` plus a number of tokens", "write `budget prompt + n`")
    _check_statements(policy)
    _check_fixed(budget, f"`budget` adds `{print_expression(budget)}` to the prompt")
    yields_last = _kept_first(policy)
    if not yields_last and not any(_is_the_prompt(keep.by) for keep in policy.keeps if keep.scope == "where"):
        raise NotByItselfError("`budget` counts the prompt, and no `keep` protects all of it", "write `keep first prompt`")
    keeps = [kept for keep in policy.keeps if (kept := _kept(keep, yields_last=yields_last)) is not None]
    made = with_policy(
        policy,
        budget=budget,
        score=None if policy.score is None else _of_slot(policy.score, f"`score {print_expression(policy.score)}`"),
        keeps=tuple(keeps),
        params=tuple(
            one.model_copy(update={"default": _of_slot(one.default, f"`param {one.name}`")}) for one in policy.params
        ),
        when="both",
        prefill="whole",
        prefill_block=None,
    )
    for name in ("trigger", "slack", "max_drop"):
        _check_fixed(getattr(made, name), f"`{name} {print_expression(getattr(made, name))}`")
    counts = [keep.count for keep in keeps if keep.count is not None]
    return Answers(fold(made), None if yields_last else _sum(counts), ", ".join(map(print_keep, keeps)))


# -- the statements ------------------------------------------------------------------------------------------------------


def _check_statements(policy: Policy) -> None:
    """Raise NotByItselfError for statements under which more than the answer's slots matters."""
    reasons = {
        "`budget` depends on cached tokens, including the prompt's": policy.measured is not None,
        "`budget … across heads` shares one budget among heads": policy.across is not None,
        "`budget … across layers` shares one budget among layers": policy.across_layers is not None,
        "`when prefill` evicts nothing of an answer": policy.when == "prefill",
        "`select` chooses among the prompt's tokens as well": policy.select is not None,
        "`sketch` looks at the prompt's keys as well": policy.sketch is not None,
        "`positions compact` counts the prompt's tokens": policy.positions == "compact",
        "`score` is reduced over heads, which then evict the same tokens": policy.victims != "own",
        "`layers` without eviction grow with the answer": policy.layers is not None,
        "`group each` is for selections": policy.group == "each",
        "`cap hard` makes room before a token is placed": policy.cap == "hard",
        "`storage blocks` has its own blocks of slots": policy.storage == "blocks",
    }
    for what, holds in reasons.items():
        if holds:
            raise NotByItselfError(what, "leave it out")


def _behind(budget: Expr | None) -> tuple[int | None, Expr | None]:
    """Split a budget into the multiple of the prompt in its sum and the rest; None for the multiple if it is not such a sum."""
    if budget is None:
        return None, None
    if budget == PROMPT:
        return 1, Number(value=0)
    if is_call(budget, "+", "-"):
        (times, left), (more, right) = map(_behind, budget.args)
        if times is None or more is None or left is None or right is None:
            return None, None
        total = times + more if budget.op == "+" else times - more
        return total, _plain_sum(budget.op, left, right)
    if is_call(budget, "where") and not _reads_prompt(budget.args[0]):
        (times, left), (more, right) = map(_behind, budget.args[1:])
        if times != more or left is None or right is None:
            return None, None
        return times, call("where", budget.args[0], left, right)
    return (None, None) if _reads_prompt(budget) else (0, budget)


def _plain_sum(op: str, left: Expr, right: Expr) -> Expr:
    zero = Number(value=0)
    if right == zero:
        return left
    return right if left == zero and op == "+" else call(op, left, right)


def _kept_first(policy: Policy) -> bool:
    """Return whether `keep first` covers the whole prompt, and yields last."""
    first = any(keep.scope == "first" and keep.count == PROMPT for keep in policy.keeps)
    return first and (policy.ends_last or all(keep.row.place for keep in policy.keeps))


def _kept(keep: Keep, *, yields_last: bool) -> Keep | None:
    """Return what a `keep` protects behind the prompt; None if it protects the prompt alone."""
    where = f"`{print_keep(keep)}`"
    if (keep.scope == "first" and keep.count == PROMPT) or (keep.scope == "where" and _is_the_prompt(keep.by)):
        return None
    if keep.scope not in ("last", "top", "where"):
        raise NotByItselfError(f"{where} counts tokens of the prompt", "write `keep first prompt`")
    count = None if keep.count is None else _of_slot(keep.count, where)
    by = None if keep.by is None else _of_slot(keep.by, where)
    if keep.scope == "top":
        _check_prompt_is_lowest(keep, where)
    if keep.scope == "where" and not yields_last:
        raise NotByItselfError(
            f"{where} may protect more tokens than the budget keeps, which would evict prompt tokens",
            "write `keep first prompt`, which yields last, or `keep top n by …`",
        )
    return Keep(scope=keep.scope, count=count, by=by)


def _check_prompt_is_lowest(keep: Keep, where: str) -> None:
    """Raise NotByItselfError unless every prompt token ranks lowest, or ties, in what `keep top` ranks by.

    Among equals the newer token is higher, which is never a prompt token.
    """
    by = keep.by
    if is_call(by, "where") and (side := _of_the_prompt(by.args[0])) is not None:
        lowest, others = by.args[1:] if side else by.args[:0:-1]
        bound = least(others)
        if lowest.kind == "number" and bound is not None and bound >= lowest.value:
            return
    raise NotByItselfError(
        f"{where} may protect prompt tokens instead of others",
        "write `by where(position < prompt, -1, …)` with a value that is never lower",
    )


def _check_fixed(expr: Expr, where: str) -> None:
    for part in parts_of(expr, Input):
        if part.name not in ("layer", "layers", "everything", "budget"):
            raise NotByItselfError(
                f"{where}, which reads `{part.name}`", "write a number that does not depend on the prompt"
            )


# -- expressions ---------------------------------------------------------------------------------------------------------


def _of_slot(expr: Expr, where: str) -> Expr:
    """Return an expression for a slot behind the prompt, reading only such slots.

    Raises:
        NotByItselfError: if it reads anything of the prompt's slots, including their number.
    """
    side = _of_the_prompt(expr)
    if side is not None:
        return Number(value=0 if side else 1)
    if is_call(expr, "-") and expr.args == (BUDGET, PROMPT):  # the answer's own policy has this as its budget
        return BUDGET
    match expr:
        case Input():
            return _of_input(expr, where)
        case Reduce():
            return _of_reduction(expr, where)
        case Rank(within="all") if _of_the_prompt(expr.by) is not None:
            return Rank(body=_of_slot(expr.body, where))
        case Rank():
            what = f"{where} ranks tokens together with those of the prompt, by `{print_expression(expr)}`"
            raise _reads_slots(what, "rank(x by position < prompt)")
        case Call(op="leverage" | "enough"):
            raise _reads_slots(f"{where} compares tokens with those of the prompt, by `{print_expression(expr)}`", None)
    return _decided(with_children(expr, lambda part: _of_slot(part, where)))


def _of_input(expr: Input, where: str) -> Expr:
    if expr.name == "budget":
        raise NotByItselfError(f"{where} reads `budget`, which counts the prompt's tokens", "write `budget - prompt`")
    if expr.name in ("prompt", "live", "seen"):
        raise NotByItselfError(
            f"{where} reads `{expr.name}`, which counts the prompt's tokens",
            "leave it out; the prompt can only be read as in `position < prompt`",
        )
    return expr


def _of_reduction(expr: Reduce, where: str) -> Expr:
    if expr.axis is Axis.HEAD:
        raise NotByItselfError(f"{where} compares heads, by `{print_expression(expr)}`", "leave `over heads` out")
    if expr.within in ("text", "sketch", "page", "next"):
        example = "max(x over slots where position >= prompt by …)" if expr.within in ("page", "next") else None
        raise _reads_slots(f"{where} reads more than the answer, by `{print_expression(expr)}`", example)
    changed: dict[str, Expr | None] = {}
    if expr.axis in (Axis.SLOT, Axis.OTHER):
        changed = _behind_the_prompt(expr, where)
    match with_children(expr.model_copy(update=changed), lambda part: _of_slot(part, where)):
        case Reduce(where=Number(value=holds)) as found if holds != 0:
            return found.model_copy(update={"where": None})
        case found:
            return found


def _behind_the_prompt(expr: Reduce, where: str) -> dict[str, Expr | None]:
    """Return the filter and key of a reduction over slots, without the part that excludes the prompt."""
    parts = conditions(expr.where)
    left = [part for part in parts if not _is_behind(part, other=expr.axis is Axis.OTHER)]
    if len(left) < len(parts):
        return {"where": together(left)}
    if expr.axis is Axis.SLOT and expr.by is not None and _of_the_prompt(expr.by) is not None:
        return {"by": None}
    name = "j." if expr.axis is Axis.OTHER else ""
    raise _reads_slots(
        f"{where} reads the prompt's slots, by `{print_expression(expr)}`",
        f"over slots{' as j' * bool(name)} where {name}position >= prompt",
    )


def _reads_slots(what: str, example: str | None) -> NotByItselfError:
    mend = "leave it out" if example is None else f"write `{example}`, so that only generated tokens are compared"
    return NotByItselfError(what, mend)


def _is_behind(condition: Expr, *, other: bool) -> bool:
    """Return whether a condition holds exactly for slots behind the prompt; `other` refers to the other slot of a comparison."""
    return _of_the_prompt(_without_other(condition) if other else condition) is False


def _without_other(condition: Expr) -> Expr:
    """Return a condition on the other slot's position as one of the slot's own."""
    match condition:
        case Other(body=body):
            return body
        case Call() if Other(body=POSITION) in condition.args:
            return with_children(condition, lambda part: part.body if part.kind == "other" else part)
    return condition


def _is_the_prompt(expr: Expr | None) -> bool:
    return _of_the_prompt(expr) is True


def _of_the_prompt(expr: Expr | None) -> bool | None:
    """Return True if a condition holds exactly for the prompt's tokens, False if exactly for all others, else None."""
    match expr:
        case Call(op="not", args=(condition,)):
            inner = _of_the_prompt(condition)
            return None if inner is None else not inner
        case Call() if expr.args == (POSITION, PROMPT):
            return {"<": True, ">=": False}.get(expr.op)
        case Call() if expr.args == (PROMPT, POSITION):
            return {">": True, "<=": False}.get(expr.op)
    return None


def _decided(expr: Expr) -> Expr:
    """Simplify a `where`, `and` or `or` whose condition is constant."""
    match expr:
        case Call(op="where", args=(Number(value=holds), yes, no)):
            return yes if holds != 0 else no
        case Call(op="and" | "or", args=(Number(value=holds), rest) | (rest, Number(value=holds))):
            decides = (holds != 0) == (expr.op == "or")
            return Number(value=float(expr.op == "or")) if decides else rest
    return expr


def _reads_prompt(expr: Expr) -> bool:
    return any(part == PROMPT for part in walk(expr))


def _sum(counts: Sequence[Expr]) -> Expr:
    total: Expr = Number(value=0)
    for count in counts:
        total = call("+", total, call("floor", count))
    return total


# -- bounds --------------------------------------------------------------------------------------------------------------

_LOW = {"attn": 0.0, "age": 0.0, "position": 0.0, "observed": 1.0}
_AT_LEAST_ZERO = frozenset({"exp", "<", "<=", ">", ">=", "==", "!=", "and", "or", "not", "random"})


def least(expr: Expr) -> float | None:
    """Return a lower bound of an expression that is never NaN; None if it is unknown."""
    match expr:
        case Number(value=value):
            return value
        case Input(name=name):
            return _LOW.get(name)
        case Reduce():
            return _least_reduced(expr)
        case Call():
            return _least_called(expr)
    return None


def _least_reduced(expr: Reduce) -> float | None:
    """Return a lower bound of a reduction over queries. The slot's own query is always one, so only a filter can leave none."""
    low = least(expr.body)
    if expr.axis is not Axis.QUERY or expr.within != "all" or expr.where is not None or low is None:
        return None
    if expr.op in ("std", "var"):
        return 0.0
    if expr.op == "sum":
        return 0.0 if low >= 0 else None
    return low if expr.op in ("mean", "max", "min", "last", "ema") else None


def _least_called(expr: Call) -> float | None:
    if expr.op in _AT_LEAST_ZERO:
        return 0.0
    lows = [low for low in map(least, expr.args) if low is not None]
    if expr.op == "where":
        lows = [low for low in map(least, expr.args[1:]) if low is not None]
        return min(lows) if len(lows) == 2 else None
    if len(lows) < len(expr.args):
        return None
    if expr.op in ("max", "min"):
        return max(lows) if expr.op == "max" else min(lows)
    if expr.op == "+":
        return math.fsum(lows)
    if expr.op in ("*", "sqrt", "abs") and min(lows) >= 0:
        return math.prod(lows) if expr.op == "*" else 0.0
    return None
