"""One spelling for each meaning.

`normal` rewrites what can be said in several ways into the way for which targets have code, so that a kernel does not depend on how a
policy was spelled. `plain` goes one step further, to what targets know: it makes filters (`where`) and keys (`by`) of a reduction part
of what is reduced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvdsl.ir.axes import axes_of
from kvdsl.ir.nodes import Axis, Expr, Input, Keep, Node, Number, Other, Policy, Rank, Reduce, Within, call, is_call
from kvdsl.ir.ops import CONDITIONS, FUNCTIONS, OPERATORS, REDUCTIONS, Formula
from kvdsl.ir.visitors import bottom_up, mapped, parts_of, rewrite, with_children, with_policy
from kvdsl.passes.fold import fold_expression
from kvdsl.passes.known import ONE, ZERO, is_fixed, known

POSITION, AGE, LIVE = Input(name="position"), Input(name="age"), Input(name="live")
QUERY_POSITION = Input(name="query_position")

ENDS = ("first", "last")
"""The scopes of `keep` that go by a token's place alone."""

Pages = tuple[Expr, Expr | None]
"""How long a page is, and how many tokens lie before the first; None: none."""


# -- ranges, as the checker makes them -----------------------------------------------------------------------------------


def page_of_key(key: Expr) -> Pages | None:
    """The pages that a key counts, as `page(16)` and `floor((position - 4) / 16)` do; None if it is another key."""
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
    """What a count is made of that is floored, and at least 0 or 1: what pages are counted by."""
    if isinstance(count, Number):
        return count if count.value == math.floor(count.value) and count.value >= least else None
    if least and is_call(count, "max") and count.args[1:] == (ONE,):
        return _whole(count.args[0], 0)
    if is_call(count, "floor") and is_fixed(count):
        return count.args[0]
    return None


def conditions(where: Expr | None) -> list[Expr]:
    """What has to hold together."""
    if is_call(where, "and"):
        return [part for side in where.args for part in conditions(side)]
    return [] if where is None else [where]


def together(parts: list[Expr]) -> Expr | None:
    """The condition that all of these hold."""
    found: Expr | None = None
    for part in parts:
        found = part if found is None else call("and", found, part)
    return found


def is_another(condition: Expr) -> bool:
    """Whether a condition says that the other slot is not the slot itself."""
    return is_call(condition, "!=") and {*condition.args} == {Other(body=POSITION), POSITION}


def same_key(condition: Expr) -> tuple[Expr, float] | None:
    """The key of which a condition says that the other slot's is the slot's own plus a number."""
    if not is_call(condition, "=="):
        return None
    for other, own in (condition.args, condition.args[::-1]):
        if isinstance(other, Other) and Axis.OTHER not in axes_of(own):
            key, ahead = fold_expression(other.body), fold_expression(own)
            if key == ahead:
                return other.body, 0
            if is_call(ahead, "+") and ahead.args[0] == key and isinstance(ahead.args[1], Number):
                return other.body, ahead.args[1].value
    return None


def of_the_other(body: Expr) -> Expr | None:
    """What a body says of the other slot alone, as of the slot itself; None if it reads the slot's own, too."""
    if Axis.SLOT in axes_of(body) or any(Axis.OTHER in axes_of(part) for part in parts_of(body, Reduce)):
        return None
    return rewrite(body, lambda part: part.body if isinstance(part, Other) else None)  # whose own others are its own


# -- one spelling --------------------------------------------------------------------------------------------------------


def normal(policy: Policy) -> Policy:
    """The policy in the spelling for which targets have code."""
    policy = mapped(policy, lambda expr: _spelled(expr, in_text=False))
    keeps = _keeps(policy)
    return with_policy(policy, keeps=keeps, ends_last=policy.ends_last and is_mixed(keeps))


def _spelled(expr: Expr, *, in_text: bool) -> Expr:
    inside = isinstance(expr, Reduce) and expr.within == "text"
    expr = known(with_children(expr, lambda part: _spelled(part, in_text=in_text or inside)))
    if is_call(expr, "neg"):
        (inner,) = expr.args
        return inner.args[0] if is_call(inner, "neg") else expr
    if is_call(expr, "not"):
        return _negated(expr.args[0]) or expr
    if isinstance(expr, Reduce):
        return _filtered(_after(expr))
    return _query_position(expr, in_text)


def _query_position(expr: Expr, in_text: bool) -> Expr:
    """The query's place, which is the token's and how many came after it; of the text's queries it has nothing to do with a token."""
    sums = [call("+", left, right) for left, right in ((POSITION, AGE), (AGE, POSITION))]
    if expr not in (*sums, QUERY_POSITION):
        return expr
    return QUERY_POSITION if in_text else sums[0]


def _negated(condition: Expr) -> Expr | None:
    """The opposite of a condition, which of an order there is not: with a NaN neither holds."""
    opposite = {"==": "!=", "!=": "=="}
    if is_call(condition, "not") and _holds_or_not(condition.args[0]):
        return condition.args[0]
    if is_call(condition, *opposite):
        return call(opposite[condition.op], *condition.args)
    return None


def _holds_or_not(expr: Expr) -> bool:
    """Whether a value is 0 or 1."""
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
    """`keep` by a place in an order, as `first`, `last` or `top`.

    A selection always takes what `keep first` and `keep last` protect, and nothing else, so there the words stay as they are. Heads that
    agree on their victims average what `keep top` ranks by, which a condition is not. Where the ends leave last, a condition does not
    become one of them, unless all become: then they fit into the budget.
    """
    if policy.select is not None:
        return policy.keeps
    lines = [line for keep in policy.keeps for line in _alternatives(keep)]
    placed = [_placed(line, own=policy.victims == "own") for line in lines]
    if policy.ends_last and (policy.measured is not None or is_mixed(placed)):
        placed = [line if new.scope in ENDS else new for line, new in zip(lines, placed, strict=True)]
    return tuple(placed)


def is_mixed(keeps: Sequence[Keep]) -> bool:
    """Whether some protect tokens by their place at either end, and others by what they are worth."""
    return len({keep.scope in ENDS for keep in keeps}) == 2


def _alternatives(keep: Keep) -> list[Keep]:
    """`keep where a or b` as two lines."""
    if keep.scope != "where" or not is_call(keep.by, "or"):
        return [keep]
    sides = [Keep(scope="where", by=side) for side in keep.by.args]
    return [line for side in sides for line in _alternatives(side)]


def _placed(keep: Keep, *, own: bool) -> Keep:
    if keep.scope != "where" or not is_call(keep.by, "<", ">="):
        return keep
    rank, bound = keep.by.args
    if not isinstance(rank, Rank) or rank.within != "all" or rank.by is not None:
        return keep
    ranked = rank.body
    if keep.by.op == "<" and ranked == POSITION and is_fixed(bound):
        return Keep(scope="first", count=bound)
    count = bound.args[1] if is_call(bound, "-") and bound.args[0] == LIVE else None
    if keep.by.op == ">=" and count is not None and is_fixed(count) and (own or ranked == POSITION):
        return Keep(scope="last", count=count) if ranked == POSITION else Keep(scope="top", count=count, by=ranked)
    return keep


# -- what targets know ---------------------------------------------------------------------------------------------------


def plain(expr: Expr) -> Expr:
    """The expression without filters and keys."""
    return bottom_up(expr, _plain)


def compared(expr: Expr, page: Expr) -> Expr:
    """The expression with ranks and reductions by page as reductions of the other slots, for a target that has code for these alone.

    Args:
        page: the number of a slot's page, as the target has it.
    """

    def rule(part: Expr) -> Expr:
        if isinstance(part, Rank) and part.within != "heads":
            return _rank_by(part.body, page if part.within == "page" else None)
        if isinstance(part, Reduce) and part.within in ("page", "next"):
            return _plain(_compared(part, page, page if part.within == "page" else call("+", page, ONE)))
        return part

    return bottom_up(expr, rule)


def _plain(expr: Expr) -> Expr:
    if isinstance(expr, Rank) and expr.by is not None:
        return _rank_by(expr.body, expr.by)
    if not isinstance(expr, Reduce):
        return expr
    if expr.by is not None:
        expr = _compared(expr, expr.by, expr.by)
    return expr if expr.where is None else _of_what_holds(expr, expr.where)


def _compared(expr: Reduce, key: Expr, own: Expr) -> Reduce:
    """A reduction by a key as one of the other slots: those whose key is what the slot says, mostly its own."""
    same = call("==", Other(body=key), own)
    where = same if expr.where is None else call("and", same, Other(body=expr.where))
    body = Other(body=expr.body) if axes_of(expr.body) else expr.body
    return Reduce(op=expr.op, axis=Axis.OTHER, within="self", body=body, where=where)


def _rank_by(body: Expr, key: Expr | None) -> Expr:
    """How many slots, of all or of those with the same key, rank lower: a NaN below every number, of equals the older."""
    mine, other, older = body, Other(body=body), call("<", Other(body=POSITION), POSITION)
    is_nan, other_is_nan = (call("!=", x, x) for x in (mine, other))
    equal = call("or", call("==", other, mine), call("and", is_nan, other_is_nan))
    lower = call("or", call("<", other, mine), call("and", other_is_nan, call("not", is_nan)))
    before = call("or", lower, call("and", equal, older))
    counted = before if key is None else call("and", call("==", Other(body=key), key), before)
    return _of_what_holds(Reduce(op="sum", axis=Axis.OTHER, within="self", body=ONE), counted)


def _of_what_holds(expr: Reduce, where: Expr) -> Expr:
    """A filtered reduction as others of what is filtered."""
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
    if expr.axis is Axis.QUERY:  # one query at a time, as the columns of `var` are kept
        square = call("/", reduced("sum", call("*", expr.body, expr.body), ZERO), count)
        less = call("-", square, call("**", mean, Number(value=2)))
        variance = call("max", less, ZERO)  # rounding can leave it below zero
    else:
        own = mean_within("page") if expr.within == "next" else mean  # as the slots of the page behind have it
        squared = call("**", call("-", expr.body, own), Number(value=2))
        variance = call("/", reduced("sum", squared, ZERO), count)
    return variance if expr.op == "var" else call("sqrt", variance)


Part = TypeVar("Part", bound=Node)


def from_formula(formula: Formula | object, body: Expr, reduced: Callable[[str, Expr], Expr]) -> Expr:
    """What a formula says of a body; `reduced` makes the reductions in it, by their names."""
    if isinstance(formula, (int, float)):
        return Number(value=formula)
    if isinstance(formula, str):
        return {"x": body, "count": Input(name="observed")}[formula]
    assert isinstance(formula, tuple)
    name, *rest = formula
    args = tuple(from_formula(part, body, reduced) for part in rest)
    # `max` of one is the reduction, of two the function.
    if name in OPERATORS or (name in FUNCTIONS and (name not in REDUCTIONS or len(args) > 1)):
        return call(str(name), *args)
    return reduced(str(name), args[0])


def in_parts(node: Part, knows: Callable[[Reduce], bool]) -> Part:
    """Write each reduction that a target lacks with others that it has, in a policy or a part of one; what has no such form stays."""
    return mapped(node, lambda expr: _in_parts(expr, knows))


def _in_parts(expr: Expr, knows: Callable[[Reduce], bool]) -> Expr:

    def rule(node: Expr) -> Expr | None:
        if not isinstance(node, Reduce) or knows(node):
            return None
        formula = REDUCTIONS[node.op].parts
        if formula is None or node.last is not None or node.within == "next":  # a slot's next page is not its mean's
            return None
        made = from_formula(formula, node.body, lambda op, body: node.model_copy(update={"op": op, "body": body}))
        return _in_parts(made, knows)

    return rewrite(expr, rule)
