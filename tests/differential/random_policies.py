"""Random policies: a hypothesis strategy of checked IR that is legal by construction.

Expressions are made from the axes that a place asks for, by the checker's rules (`kvdsl.sema`): what a score, the body of a reduction
or a count may read, that nothing divides by a constant zero, that static keeps fit the budget. First come the plain
alternatives, so that hypothesis shrinks towards them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from random import Random as Generator
from typing import Any

from hypothesis import strategies as st

from kvdsl.ir.axes import axes_of
from kvdsl.ir.nodes import (
    Axis,
    Binary,
    Call,
    Expr,
    Input,
    Keep,
    Number,
    Param,
    ParamRef,
    Policy,
    Random,
    Reduce,
)
from kvdsl.ir.visitors import walk
from kvdsl.passes.fold import fold, fold_expression, value_of

QUERY, SLOT, DIM = Axis.QUERY, Axis.SLOT, Axis.DIM

LITERALS = (1.0, 2.0, 0.0, 3.0, 0.5, 7.0, 0.1, 10.0, 1.5, 100.0, 0.003, 1e6)
ARITHMETIC = ("+", "*", "-", "/", "+", "*", "%", "**")
COMPARISONS = (">", "<", ">=", "<=", "==", "!=")
UNARY = ("abs", "neg", "floor", "sqrt", "ceil", "exp", "log")
FOLDS = ("sum", "mean", "max", "min", "std", "var")


@dataclass(frozen=True)
class Place:
    """What an expression may read where it stands.

    Attributes:
        query: it is evaluated for one query: attn, logit and q have a value, `random()` and what is over queries have none.
        dims: it stands in a reduction over dims.
        depth: how many operations deep it may still become.
    """

    query: bool = False
    dims: bool = False
    depth: int = 3

    def deeper(self, **changes: bool) -> Place:
        return replace(self, depth=self.depth - 1, **changes)


@dataclass
class Maker:
    """Makes the parts of one policy.

    Attributes:
        pick: chooses one of several things.
        fixed: what numbers may read; `known`: their values where they are constant.
    """

    pick: Callable[[Sequence[Any]], Any]
    fixed: list[Expr] = field(default_factory=lambda: [Input(name=n) for n in ("prompt", "layer", "layers")])  # type: ignore[arg-type]
    known: dict[str, float] = field(default_factory=dict)

    def one_of(self, *options: Any) -> Any:
        return self.pick(options)

    def rarely(self) -> bool:
        return bool(self.one_of(False, False, False, True))

    # -- numbers -------------------------------------------------------------------------------------------------------

    def literal(self) -> Expr:
        return Number(value=self.one_of(*LITERALS))

    def fixed_number(self, depth: int = 2) -> Expr:
        """What is known once the prompt is: literals, params, the budget, the prompt, the layer."""
        if depth == 0 or not self.rarely():
            return self.literal() if self.one_of(True, False) else self.one_of(*self.fixed)
        left, right = self.fixed_number(depth - 1), self.fixed_number(depth - 1)
        shape = self.one_of("+", "*", "-", "/", "max", "min", "floor", "where")
        if shape in ("max", "min"):
            return Call(function=shape, args=(left, right))
        if shape == "floor":
            return Call(function="floor", args=(left,))
        if shape == "where":
            return Call(function="where", args=(Binary(op="<", left=Input(name="layer"), right=right), left, right))
        return self.binary(shape, left, right)

    def count(self, most: float, least: float = 0) -> Expr:
        """A count of tokens between two numbers, whatever the prompt and the layer are."""
        if self.one_of(True, True, False):
            return Number(value=float(self.pick(range(int(least), int(most) + 1))))
        free = self.fixed_number()
        value = value_of(fold_expression(free), self.known)
        if value is not None and least <= value <= most:
            return free
        return Call(function="max", args=(Call(function="min", args=(free, Number(value=most))), Number(value=least)))

    def binary(self, op: str, left: Expr, right: Expr) -> Expr:
        """An operator, or its left side where the checker would find no value."""
        expr = Binary(op=op, left=left, right=right)  # type: ignore[arg-type]
        constant = value_of(fold_expression(left)) is not None and value_of(fold_expression(right)) is not None
        if op in ("/", "%") and value_of(fold_expression(right)) == 0:
            return left
        return left if constant and value_of(fold_expression(expr)) is None else expr

    def call(self, function: str, *args: Expr) -> Expr:
        expr = Call(function=function, args=args)  # type: ignore[arg-type]
        constant = all(value_of(fold_expression(arg)) is not None for arg in args)
        return args[-1] if constant and value_of(fold_expression(expr)) is None else expr

    # -- values ----------------------------------------------------------------------------------------------------------

    def value(self, place: Place) -> Expr:
        """An expression with at most the axes that the place has."""
        if place.depth <= 0:
            return self.leaf(place)
        shape = self.one_of("leaf", "reduce", "reduce", "reduce", "reduce", "binary", "binary", "binary", "unary", "extreme", "where", "condition")
        if shape == "leaf":
            return self.leaf(place)
        if shape == "reduce":
            return self.reduction(place)
        inside = place.deeper()
        if shape == "binary":
            left, right = self.value(inside), self.value(inside)
            return self.binary(self.one_of(*ARITHMETIC), left, right)
        if shape == "unary":
            return self.call(self.one_of(*UNARY), self.value(inside))
        if shape == "extreme":
            return self.call(self.one_of("max", "min"), self.value(inside), self.value(inside))
        if shape == "where":
            return self.call("where", self.condition(inside), self.value(inside), self.value(inside))
        return self.condition(inside)

    def condition(self, place: Place) -> Expr:
        inside = place.deeper()
        shape = self.one_of("compare", "compare", "and", "or", "not") if place.depth > 0 else "compare"
        if shape == "compare":
            made = self.binary(self.one_of(*COMPARISONS), self.value(inside), self.value(inside))
            # A constant would be folded to a number, which the language does not take for a condition.
            return made if value_of(made) is None else Binary(op=">", left=Input(name="live"), right=Number(value=3))
        if shape == "not":
            return Call(function="not", args=(self.condition(inside),))
        return Binary(op=shape, left=self.condition(inside), right=self.condition(inside))

    def leaf(self, place: Place) -> Expr:
        """Something without operands; with dims or queries around it, something that has them, mostly."""
        number: list[Callable[[], Expr]] = [self.literal, lambda: self.one_of(*self.fixed), lambda: Input(name="live")]
        slot: list[Callable[[], Expr]] = [lambda: Input(name="position"), lambda: Input(name="age")]
        if place.query:
            own = ["attn", "attn", "attn", "logit"] + (["k", "v", "q", "k", "v", "q"] if place.dims else [])
            return self.one_of(*[lambda n=n: Input(name=n) for n in own], *slot, *number)()
        if place.dims:
            return self.one_of(*[lambda n=n: Input(name=n) for n in ("k", "v")] * 3, *slot, *number)()
        others: list[Callable[[], Expr]] = [lambda: Input(name="observed"), lambda: Random()]
        attention: list[Callable[[], Expr]] = [lambda: self.attention("attn"), lambda: self.attention("attn", "logit")]
        return self.one_of(*attention * 3, *slot, *others, *number)()

    def attention(self, *inputs: Any) -> Expr:
        return Reduce(op=self.one_of("sum", *FOLDS, "last"), axis=QUERY, body=Input(name=self.one_of(*inputs)))

    # -- reductions ----------------------------------------------------------------------------------------------------

    def reduction(self, place: Place) -> Expr:
        axes = ["slots", "dims"] if place.query else ["queries", "queries", "queries", "dims", "slots"]
        if place.dims and self.one_of(True, True, False):
            return self.leaf(place)  # a reduction inside a reduction over dims: seldom
        return {"queries": self.over_queries, "slots": self.over_slots, "dims": self.over_dims}[self.one_of(*axes)](place)

    def over_queries(self, place: Place) -> Expr:
        body = self.value(place.deeper(query=True, dims=False))
        if QUERY not in axes_of(body):
            body = self.binary(self.one_of("*", "+", ">"), Input(name="attn"), body)
        return Reduce(op=self.one_of(*FOLDS, "last"), axis=QUERY, body=body)

    def over_slots(self, place: Place) -> Expr:
        body = self.value(place.deeper(dims=False))
        if SLOT not in axes_of(body):
            body = self.binary("*", self.slot_value(place), body)
        return Reduce(op=self.one_of(*FOLDS), axis=SLOT, body=body)

    def slot_value(self, place: Place) -> Expr:
        return Input(name="attn") if place.query else Reduce(op="mean", axis=QUERY, body=Input(name="attn"))

    def over_dims(self, place: Place) -> Expr:
        if place.query and self.one_of(True, False):
            return Reduce(op="sum", axis=DIM, body=Binary(op="*", left=Input(name="q"), right=Input(name="k")))
        body = self.value(place.deeper(dims=True))
        if DIM not in axes_of(body):
            body = self.binary("*", Input(name=self.one_of("v", "k")), body)
        return Reduce(op=self.one_of(*FOLDS), axis=DIM, body=body)

    # -- statements ----------------------------------------------------------------------------------------------------

    def params(self) -> list[Param]:
        """The budget's param and others, in any order; what may be read grows with them."""
        made = []
        for name in self.pick(list(permutations(("a", "budget", "tail_2")[: self.one_of(2, 2, 3)]))):
            if name == "budget":
                default = Number(value=float(self.one_of(6, 8, 4, 12))) if not self.rarely() else self.count(14, 4)
                made.append(Param(name=name, default=fold_expression(default), low=self.one_of(None, None, 1.0)))
            elif self.one_of(True, False):
                default = fold_expression(self.fixed_number())
                made.append(Param(name=name, default=default, unit=self.one_of(None, "tokens")))
                self.known |= {name: value for value in [value_of(default, self.known)] if value is not None}
                self.fixed.append(ParamRef(name=name))
        return made

    def keeps(self, budget: float) -> list[Keep]:
        """Up to three; static ones leave room in the budget."""
        made: list[Keep] = []
        room = {"first": int(budget // 3), "last": int(budget // 2)}
        for _ in range(self.one_of(0, 1, 1, 2, 3)):
            scope = self.one_of("last", "top", "first", "where")
            if scope in room:
                made.append(Keep(scope=scope, count=self.count(room[scope])))
            elif scope == "top":
                made.append(Keep(scope="top", count=self.count(budget), by=self.value(Place(depth=2))))
            else:
                made.append(Keep(scope="where", by=self.condition(Place(depth=2))))
        return made


def make_policy(pick: Callable[[Sequence[Any]], Any], stem: str = "p") -> Policy:
    """A folded policy that the checker accepts; `print_policy` gives its source."""
    maker = Maker(pick)
    params = maker.params()
    default = next(param.default for param in params if param.name == "budget")
    budget: Expr = ParamRef(name="budget")
    if maker.rarely():
        wider = maker.call(maker.one_of("max", "min"), budget, Number(value=6))
        budget = maker.one_of(wider, Binary(op="+", left=budget, right=Input(name="layer")))
    smallest = value_of(default)
    maker.fixed.append(Input(name="budget"))
    keeps = maker.keeps(4.0 if smallest is None else min(smallest, 6.0))
    if not any(keep.scope == "last" for keep in keeps) and maker.one_of(True, True, False):
        keeps.append(Keep(scope="last", count=Number(value=1)))
    lazy = maker.rarely()
    made = fold(
        Policy(
            name=stem.upper(),
            stem=stem,
            doc="A random policy.",
            params=tuple(params),
            budget=budget,
            score=maker.value(Place()),
            keeps=tuple(keeps),
            group=maker.one_of("mean", "max", "sum"),
            trigger=maker.count(4) if lazy else Number(value=1),
            slack=maker.count(4) if lazy else Number(value=0),
            max_drop=maker.count(4) if lazy else Number(value=0),
        )
    )
    nothing = Keep(scope="last", count=Number(value=0))
    return made.model_copy(update={"keeps": tuple(keep for keep in made.keeps if keep != nothing)})


@st.composite
def policies(draw: Callable[[st.SearchStrategy[Any]], Any], stem: str = "p") -> Policy:
    """Random policies that hypothesis can shrink."""
    return make_policy(lambda options: draw(st.sampled_from(options)), stem)


def policy_of(seed: str, stem: str = "p") -> Policy:
    """The random policy of a seed: many times faster than hypothesis, and no two alike."""
    return make_policy(Generator(seed).choice, stem)


def mixes_dims(policy: Policy) -> bool:
    """Whether some reduction over dims puts values beside keys or queries, so that both need the same size."""
    exprs = [policy.score, *(keep.by for keep in policy.keeps)]
    return any(
        isinstance(part, Reduce) and part.axis is DIM and len({_vector(leaf) for leaf in walk(part.body)} - {""}) > 1
        for expr in exprs
        if expr is not None
        for part in walk(expr)
    )


def _vector(leaf: Expr) -> str:
    if isinstance(leaf, Input) and leaf.name in ("q", "k", "v"):
        return "v" if leaf.name == "v" else "k"
    return ""
