"""Rewrite each meaning into one spelling.

`normal` rewrites equivalent spellings into the one for which targets have code, so kernels do not depend on a policy's spelling.
`plain` goes further: it merges filters (`where`) and keys (`by`) into the body of a reduction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvdsl.ir.nodes import Axis, Call, Expr, Input, Keep, Node, Number, Other, Policy, Rank, Reduce, Within, call, is_call
from kvdsl.ir.ops import CONDITIONS, FUNCTIONS, OPERATORS, REDUCTIONS, Formula
from kvdsl.ir.visitors import axes_of, bottom_up, mapped, parts_of, rewrite, with_children, with_policy
from kvdsl.passes.fold import fold_expression
from kvdsl.passes.known import ONE, ZERO, is_fixed, known

POSITION, AGE, LIVE = Input(name="position"), Input(name="age"), Input(name="live")
QUERY_POSITION = Input(name="query_position")

Pages = tuple[Expr, Expr | None]
"""The length of a page, and the number of tokens before the first; None for none."""


# -- ranges, as the checker makes them -----------------------------------------------------------------------------------


def page_of_key(key: Expr) -> Pages | None:
    """Return the pages that a key counts, as in `page(16)` and `floor((position - 4) / 16)`; None for other keys."""
    folded = fold_expression(key)
    quotient = folded.args[0] if is_call(folded, "floor") else None
    if not is_call(quotient, "/"):
        return None
    place, divisor = quotient.args
    size, after = _whole(divisor, 1), None
    if is_call(place, "-") and place.args[0] == POSITION:
        after = _whole(place.args[1], 0)
        if after is None:
            return None
    elif place != POSITION:
        return None
    return None if size is None else (size, None if after == ZERO else after)


def _whole(count: Expr, least: int) -> Expr | None:
    """Return the number inside a count that is rounded down and at least `least`, as page sizes are; None for other counts."""
    if count.kind == "number":
        return count if count.value == math.floor(count.value) and count.value >= least else None
    if least and is_call(count, "max") and count.args[1:] == (ONE,):
        return _whole(count.args[0], 0)
    if is_call(count, "floor") and is_fixed(count):
        return count.args[0]
    return None


def conditions(where: Expr | None) -> list[Expr]:
    """Split a condition at its `and`s."""
    if is_call(where, "and"):
        return [part for side in where.args for part in conditions(side)]
    return [] if where is None else [where]


def together(parts: list[Expr]) -> Expr | None:
    """Join conditions by `and`."""
    found: Expr | None = None
    for part in parts:
        found = part if found is None else call("and", found, part)
    return found


def is_another(condition: Expr) -> bool:
    """Return whether a condition means that the other slot is not the slot itself."""
    return is_call(condition, "!=") and {*condition.args} == {Other(body=POSITION), POSITION}


def same_key(condition: Expr) -> tuple[Expr, float] | None:
    """Return the key, and the number d, of a condition that the other slot's key is the slot's own plus d; None for others."""
    if not is_call(condition, "=="):
        return None
    for other, own in (condition.args, condition.args[::-1]):
        if other.kind == "other" and Axis.OTHER not in axes_of(own):
            key = fold_expression(other.body)
            match fold_expression(own):
                case same if same == key:
                    return other.body, 0
                case Call(op="+", args=(same, Number(value=ahead))) if same == key:
                    return other.body, ahead
    return None


def of_the_other(body: Expr) -> Expr | None:
    """Return a body that reads only the other slot, as one of the slot itself; None if it also reads the slot."""
    if Axis.SLOT in axes_of(body) or any(Axis.OTHER in axes_of(part) for part in parts_of(body, Reduce)):
        return None
    # What replaces an `Other` is not entered: others inside it belong to inner reductions.
    return rewrite(body, lambda part: part.body if part.kind == "other" else None)


# -- one spelling --------------------------------------------------------------------------------------------------------


def normal(policy: Policy) -> Policy:
    """Return the policy in the spelling for which targets have code."""
    policy = mapped(policy, lambda expr: _spelled(expr, in_text=False))
    keeps = _keeps(policy)
    return with_policy(policy, keeps=keeps, ends_last=policy.ends_last and is_mixed(keeps))


def _spelled(expr: Expr, *, in_text: bool) -> Expr:
    inside = in_text or (expr.kind == "reduce" and expr.within == "text")
    match known(with_children(expr, lambda part: _spelled(part, in_text=inside))):
        case Call(op="neg", args=(Call(op="neg", args=(inner,)),)):
            return inner
        case Call(op="not", args=(condition,)) as found:
            return _negated(condition) or found
        case Reduce() as found:
            return _filtered(_after(found))
        case found:
            return _query_position(found, in_text)


def _query_position(expr: Expr, in_text: bool) -> Expr:
    """Rewrite the query's position as the token's position plus age, except for the text's queries, which have no token."""
    sums = [call("+", left, right) for left, right in ((POSITION, AGE), (AGE, POSITION))]
    if expr not in (*sums, QUERY_POSITION):
        return expr
    return QUERY_POSITION if in_text else sums[0]


def _negated(condition: Expr) -> Expr | None:
    """Return the opposite of a condition; None for an order, which has none: with a NaN neither holds."""
    opposite = {"==": "!=", "!=": "=="}
    if is_call(condition, "not") and _holds_or_not(condition.args[0]):
        return condition.args[0]
    if is_call(condition, *opposite):
        return call(opposite[condition.op], *condition.args)
    return None


def _holds_or_not(expr: Expr) -> bool:
    """Return whether a value is 0 or 1."""
    return is_call(expr, *CONDITIONS)


def _after(expr: Reduce) -> Reduce:
    """`over text where query_position >= n` is `over text after n`."""
    if expr.within != "text" or expr.after is not None:
        return expr
    parts = conditions(expr.where)
    for part in parts:
        if is_call(part, ">=") and part.args[0] == QUERY_POSITION and is_fixed(part.args[1]):
            rest = together([other for other in parts if other is not part])
            return expr.model_copy(update={"after": part.args[1], "where": rest})
    return expr


def _filtered(expr: Reduce) -> Reduce:
    """`sum(where(c, x, 0))` is `sum(x where c)`."""
    body = expr.body
    if expr.op != "sum" or not (is_call(body, "where") and body.args[2] == ZERO):
        return expr
    where = together([*conditions(expr.where), *conditions(body.args[0])])
    return expr.model_copy(update={"body": body.args[1], "where": where})


# -- statements ----------------------------------------------------------------------------------------------------------


def _keeps(policy: Policy) -> tuple[Keep, ...]:
    """Rewrite `keep where` by a place in an order as `keep first`, `last` or `top`.

    Not in a policy that selects, since a selection always includes what `keep first` and `keep last` protect, and nothing else. Not
    as `keep top` if heads agree on victims, since they average its values but not conditions. If the ends yield last, conditions
    become `first` or `last` only if all keeps do; then they fit into the budget.
    """
    if policy.select is not None:
        return policy.keeps
    lines = [line for keep in policy.keeps for line in _alternatives(keep)]
    placed = [_placed(line, own=policy.victims == "own") for line in lines]
    if policy.ends_last and (policy.measured is not None or is_mixed(placed)):
        placed = [line if new.row.place else new for line, new in zip(lines, placed, strict=True)]
    return tuple(placed)


def is_mixed(keeps: Sequence[Keep]) -> bool:
    """Return whether some keeps protect tokens by position at either end, and others by value."""
    return len({bool(keep.row.place) for keep in keeps}) == 2


def _alternatives(keep: Keep) -> list[Keep]:
    """Split `keep where a or b` into two keeps."""
    if keep.scope != "where" or not is_call(keep.by, "or"):
        return [keep]
    sides = [Keep(scope="where", by=side) for side in keep.by.args]
    return [line for side in sides for line in _alternatives(side)]


def _placed(keep: Keep, *, own: bool) -> Keep:
    match keep:
        case Keep(scope="where", by=Call(op=op, args=(Rank(within="all", by=None, body=ranked), bound))):
            by_position = ranked == POSITION
        case _:
            return keep
    if op == "<" and by_position and is_fixed(bound):
        return Keep(scope="first", count=bound)
    count = bound.args[1] if is_call(bound, "-") and bound.args[0] == LIVE else None
    if op == ">=" and count is not None and is_fixed(count) and (own or by_position):
        return Keep(scope="last", count=count) if by_position else Keep(scope="top", count=count, by=ranked)
    return keep


# -- what targets know ---------------------------------------------------------------------------------------------------


def plain(expr: Expr) -> Expr:
    """Return the expression without filters and keys."""
    return bottom_up(expr, _plain)


def compared(expr: Expr, page: Expr) -> Expr:
    """Rewrite ranks and reductions by page as reductions over others, for a target that has code only for those.

    Args:
        page: the target's expression for the number of a slot's page.
    """

    def rule(part: Expr) -> Expr:
        match part:
            case Rank(within="all"):
                return _rank_by(part.body, None)
            case Rank(within="page"):
                return _rank_by(part.body, page)
            case Reduce(within="page"):
                return _plain(_compared(part, page, page))
            case Reduce(within="next"):
                return _plain(_compared(part, page, call("+", page, ONE)))
        return part

    return bottom_up(expr, rule)


def _plain(expr: Expr) -> Expr:
    match expr:
        case Rank() if expr.by is not None:
            return _rank_by(expr.body, expr.by)
        case Reduce():
            expr = expr if expr.by is None else _compared(expr, expr.by, expr.by)
            return expr if expr.where is None else _of_what_holds(expr, expr.where)
    return expr


def _compared(expr: Reduce, key: Expr, own: Expr) -> Reduce:
    """Rewrite a reduction by key as one over the other slots with the key `own`."""
    same = call("==", Other(body=key), own)
    where = same if expr.where is None else call("and", same, Other(body=expr.where))
    body = Other(body=expr.body) if axes_of(expr.body) else expr.body
    return Reduce(op=expr.op, axis=Axis.OTHER, within="self", body=body, where=where)


def _rank_by(body: Expr, key: Expr | None) -> Expr:
    """Count the slots, all or those with the same key, that rank lower: NaN lowest, among equals the older first."""
    mine, other, older = body, Other(body=body), call("<", Other(body=POSITION), POSITION)
    is_nan, other_is_nan = (call("!=", x, x) for x in (mine, other))
    equal = call("or", call("==", other, mine), call("and", is_nan, other_is_nan))
    lower = call("or", call("<", other, mine), call("and", other_is_nan, call("not", is_nan)))
    before = call("or", lower, call("and", equal, older))
    counted = before if key is None else call("and", call("==", Other(body=key), key), before)
    return _of_what_holds(Reduce(op="sum", axis=Axis.OTHER, within="self", body=ONE), counted)


def _of_what_holds(expr: Reduce, where: Expr) -> Expr:
    """Rewrite a filtered reduction as unfiltered ones."""
    bare = expr.model_copy(update={"where": None})
    if expr.axis not in axes_of(where) | {Axis.QUERY, Axis.HEAD}:
        return call("where", where, bare, Number(value=REDUCTIONS[expr.op].of_nothing))

    def reduced(op: str, body: Expr, otherwise: Expr, within: Within = expr.within) -> Expr:
        return bare.model_copy(update={"op": op, "body": call("where", where, body, otherwise), "within": within})

    def mean_within(within: Within) -> Expr:
        return call("/", reduced("sum", expr.body, ZERO, within), reduced("sum", ONE, ZERO, within))

    if expr.op in ("max", "min"):
        return reduced(expr.op, expr.body, Number(value=REDUCTIONS[expr.op].of_nothing))
    if expr.op == "sum":
        return reduced("sum", expr.body, ZERO)
    mean, count = mean_within(expr.within), reduced("sum", ONE, ZERO)
    if expr.op == "mean":
        return mean
    if expr.axis is Axis.QUERY:  # one query at a time, like the columns of `var`
        square = call("/", reduced("sum", call("*", expr.body, expr.body), ZERO), count)
        less = call("-", square, call("**", mean, Number(value=2)))
        variance = call("max", less, ZERO)  # rounding can make it negative
    else:
        own = mean_within("page") if expr.within == "next" else mean  # the mean of the next page's own slots
        squared = call("**", call("-", expr.body, own), Number(value=2))
        variance = call("/", reduced("sum", squared, ZERO), count)
    return variance if expr.op == "var" else call("sqrt", variance)


Part = TypeVar("Part", bound=Node)


def from_formula(formula: Formula | object, body: Expr, reduced: Callable[[str, Expr], Expr]) -> Expr:
    """Apply a formula to a body; `reduced` builds the reductions in it by name."""
    match formula:
        case int() | float():
            return Number(value=formula)
        case (str(name), *rest):
            args = tuple(from_formula(part, body, reduced) for part in rest)
            # `max` of one operand is the reduction, of two the function.
            if name in OPERATORS or (name in FUNCTIONS and (name not in REDUCTIONS or len(args) > 1)):
                return call(name, *args)
            return reduced(name, args[0])
    return {"x": body, "count": Input(name="observed")}[str(formula)]


def in_parts(node: Part, knows: Callable[[Reduce], bool]) -> Part:
    """Rewrite each reduction that a target lacks through others that it has, in a policy or a part of one, where that is possible."""
    return mapped(node, lambda expr: _in_parts(expr, knows))


def _in_parts(expr: Expr, knows: Callable[[Reduce], bool]) -> Expr:

    def rule(node: Expr) -> Expr | None:
        if node.kind != "reduce" or knows(node):
            return None
        formula = REDUCTIONS[node.op].parts
        if formula is None or node.last is not None or node.within == "next":  # the mean inside would be of another page
            return None
        made = from_formula(formula, node.body, lambda op, body: node.model_copy(update={"op": op, "body": body}))
        return _in_parts(made, knows)

    return rewrite(expr, rule)
