"""Random policies: a hypothesis strategy of checked IR that is legal by construction.

Expressions are made from the axes that a place asks for, by the checker's rules (`kvdsl.sema`): what a score, the body of a reduction
or a count may read, that nothing divides by a constant zero, that static keeps fit the budget. First come the plain
alternatives, so that hypothesis shrinks towards them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from random import Random as Generator
from typing import Any

from hypothesis import strategies as st

from kvdsl.ir import ops
from kvdsl.ir.nodes import (
    PREVIOUS,
    AcrossLayers,
    Axis,
    Call,
    Expr,
    Fold,
    Given,
    GivenRef,
    Input,
    Keep,
    LayerRange,
    Node,
    Number,
    Other,
    Param,
    ParamRef,
    Policy,
    Rank,
    Reduce,
    Select,
    Sketch,
    Tensor,
    TensorRef,
    call,
    is_call,
)
from kvdsl.ir.visitors import axes_of, children, expressions, walk
from kvdsl.passes.fold import fold, fold_expression, value_of
from kvdsl.passes.normal import conditions, page_of_key, together
from kvdsl.sema.needs import asks_query_heads, of_query_heads_unpooled, reads_data

from .given import GIVEN, read
from .tensors import GROUPED, MATRICES, TENSORS

QUERY, SLOT, DIM = Axis.QUERY, Axis.SLOT, Axis.DIM

LITERALS = (1.0, 2.0, 0.0, 3.0, 0.5, 7.0, 0.1, 10.0, 1.5, 100.0, 0.003, 1e6)
ARITHMETIC = ("+", "*", "-", "/", "+", "*", "%", "**")
COMPARISONS = tuple(sorted(ops.COMPARISONS))
UNARY = ("neg", *(name for name, count in ops.ELEMENTWISE.items() if count == 1))
OF_QUERIES = tuple(name for name, row in ops.REDUCTIONS.items() if {"queries", "history"} & set(row.over))
FILTERED = tuple(name for name, row in ops.REDUCTIONS.items() if not row.argument and name not in ("last", "median"))
SHAPES = ("leaf", *["reduce"] * 4, *["binary"] * 3, "unary", "extreme", "where", "condition")

ONE, NOTHING = Number(value=1), Number(value=0)


def reducing(over: str) -> tuple[str, ...]:
    """Return the plain reductions over one of `ops.RANGES`."""
    return tuple(name for name in ops.PLAIN_REDUCTIONS if over in ops.REDUCTIONS[name].over)


@dataclass(frozen=True)
class Place:
    """What an expression may read where it stands.

    Attributes:
        query: it is evaluated for one query: q has a value, what is over queries has none.
        attends: that query has attended, so attn and logit have values as well.
        dims: it stands in a reduction over dims; `sketched`: over the sketch's.
        pools: it may pool: a score, outside of reductions and pools.
        text: it may range over the prompt's queries; `asks`: it stands in such a reduction.
        previous: it stands in a fold; `pruned`: over prunes.
        depth: how many operations deep it may still become.
    """

    query: bool = False
    attends: bool = True
    dims: bool = False
    sketched: bool = False
    pools: bool = False
    text: bool = False
    asks: bool = False
    previous: bool = False
    pruned: bool = False
    depth: int = 3

    def deeper(self, **changes: bool) -> Place:
        return replace(self, depth=self.depth - 1, **changes)


SCORE, KEEP, SELECT = Place(pools=True), Place(depth=2), Place(query=True, attends=False)


@dataclass
class Maker:
    """Makes the parts of one policy.

    Attributes:
        pick: chooses one of several things.
        fixed: what numbers may read; `known`: their values where they are constant.
        logit, pages, sketch: whether expressions may read these.
        victims: who must agree on the victims, unless a budget is shared.
        fused: no statements without fused kernels.
        tensors: of files, which expressions may read. `given`: values from the caller, likewise.
        measured: whether the budget reads the data, so that nothing else reads it.
        matrices: tensors that project vectors. `grouped`: those that each query head has of its own.
        by_head: the budget, where it differs between KV heads, and what tells it; numbers that need not be the same for all may read these.
    """

    pick: Callable[[Sequence[Any]], Any]
    fixed: list[Expr] = field(default_factory=lambda: [Input(name="prompt"), Input(name="layers"), Input(name="layer")])
    known: dict[str, float] = field(default_factory=dict)
    logit: bool = True
    pages: bool = False
    sketch: bool = False
    victims: str = "own"
    fused: bool = False
    tensors: tuple[Tensor, ...] = ()
    given: tuple[Given, ...] = ()
    by_head: tuple[Expr, ...] = ()
    matrices: tuple[Tensor, ...] = ()
    grouped: tuple[Tensor, ...] = ()
    measured: bool = False

    def one_of(self, *options: Any) -> Any:
        return self.pick(options)

    def rarely(self) -> bool:
        return bool(self.one_of(False, False, False, True))

    # -- numbers -------------------------------------------------------------------------------------------------------

    def literal(self) -> Expr:
        return Number(value=self.one_of(*LITERALS))

    def fixed_number(self, depth: int = 2, own: tuple[Expr, ...] = ()) -> Expr:
        """What is known once the prompt is: literals, params, the budget, the prompt, the layer, and what each head has of its `own`."""
        if depth == 0 or not self.rarely():
            return self.literal() if self.one_of(True, False) else self.one_of(*self.fixed, *own)
        left, right = self.fixed_number(depth - 1, own), self.fixed_number(depth - 1, own)
        shape = self.one_of("+", "*", "-", "/", "max", "min", "floor", "where")
        if shape in ("max", "min"):
            return call(shape, left, right)
        if shape == "floor":
            return call("floor", left)
        if shape == "where":
            return call("where", call("<", Input(name="layers"), right), left, right)
        return self.binary(shape, left, right)

    def count(self, most: float, least: float = 0, own: tuple[Expr, ...] = ()) -> Expr:
        """A number between two others, whatever the prompt and the layer are."""
        if self.one_of(True, True, False):
            return Number(value=float(self.pick(range(int(least), int(most) + 1))))
        free = self.fixed_number(own=own)
        value = value_of(fold_expression(free), self.known)
        if value is not None and least <= value <= most:
            return free
        return call("max", call("min", free, Number(value=most)), Number(value=least))

    def binary(self, op: str, left: Expr, right: Expr) -> Expr:
        """An operator, or its left side where the checker would find no value."""
        expr = call(op, left, right)
        constant = value_of(fold_expression(left)) is not None and value_of(fold_expression(right)) is not None
        if op in ("/", "%") and value_of(fold_expression(right)) == 0:
            return left
        return left if constant and value_of(fold_expression(expr)) is None else expr

    def call(self, function: str, *args: Expr) -> Expr:
        expr = call(function, *args)
        constant = all(value_of(fold_expression(arg)) is not None for arg in args)
        return args[-1] if constant and value_of(fold_expression(expr)) is None else expr

    # -- values ----------------------------------------------------------------------------------------------------------

    def value(self, place: Place) -> Expr:
        """An expression with at most the axes that the place has."""
        shape = self.one_of(*SHAPES) if place.depth > 0 else "leaf"
        inside = place.deeper()
        if shape == "leaf":
            return self.leaf(place)
        if shape == "reduce":
            return self.reduction(place)
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
            return made if value_of(made) is None else call(">", Input(name="live"), Number(value=3))
        if shape == "not":
            return call("not", self.condition(inside))
        return call(shape, self.condition(inside), self.condition(inside))

    def leaf(self, place: Place) -> Expr:
        """Something without operands; with dims or queries around it, something that has them, mostly."""
        fixed = (*self.fixed, *self.by_head)
        number: list[Callable[[], Expr]] = [self.literal, lambda: self.one_of(*fixed), lambda: Input(name="live")]
        slot: list[Callable[[], Expr]] = [lambda: Input(name="position"), lambda: Input(name="age")]
        number += [lambda: self.tensor(dims=False)] if any("dims" not in one.axes for one in self.tensors) else []
        slot += [lambda: read(self.one_of(*self.given))] if self.given else []
        if any(one.source == "turn" for one in self.given):
            number += [lambda: Input(name="turns")]
        return self.one_of(*[lambda: self.own_leaf(place)] * 5, *slot, *number)()

    def own_leaf(self, place: Place) -> Expr:
        """What only this place has."""
        if place.asks and not place.dims:
            return self.one_of(
                lambda: self.dot(place),
                lambda: self.dot(place),
                lambda: Input(name="query_position"),
                lambda: Input(name="age"),
            )()
        if place.previous and not place.dims and self.one_of(True, False):
            return PREVIOUS
        if place.dims:
            return self.vector(place)
        if place.query and place.attends and self.one_of(*[False] * 7, True):
            return call("random")
        if place.query and place.attends:
            return Input(name=self.one_of("attn", "attn", "logit") if self.logit else "attn")
        if place.query:
            return self.dot(place)
        return self.one_of(
            self.attention, self.attention, self.attention, lambda: Input(name="observed"), lambda: call("random")
        )()

    def vector(self, place: Place) -> Expr:
        """With dims: keys, values and queries, or those of a page."""
        if self.pages and not place.asks and self.rarely():
            return self.over_page(Input(name=self.one_of("k", "v")))
        if any("dims" in one.axes for one in self.tensors) and self.rarely():
            return self.tensor(dims=True)
        if place.query and not place.attends and not place.asks and not self.fused and self.rarely():
            return self.binary("*", Input(name="k"), Input(name="query_head"))
        if not self.fused and not place.sketched and self.rarely():
            return self.rotated(place)
        if self.grouped and place.query and not place.sketched and self.rarely():
            return TensorRef(name="asking", dims=True, group=True)
        vectors = ("q", "k") if place.sketched else ("q", "k", "v") if place.query else ("k", "v")
        return Input(name=self.one_of(*vectors))

    def rotated(self, place: Place) -> Expr:
        """A key or query, turned."""
        body = Input(name=self.one_of("q", "k") if place.query else "k")
        op = self.one_of("turn", "turn", "ahead", "pairs")
        if op == "pairs":
            return call(op, body)
        if op == "ahead":
            factor = [Number(value=self.one_of(1.0, 2.0, 3.0))] if self.rarely() else []
            return call(op, body, self.count(9, 1), *factor)
        own = Input(name="query_position") if body.name == "q" else Input(name="position")
        by = self.one_of(call("neg", own), Number(value=self.one_of(1.0, 3.0, -2.0)), self.one_of(*self.fixed))
        return call(op, body, by)

    def leverage(self, place: Place) -> Expr:
        """Of keys or values, perhaps weighed."""
        body: Expr = Input(name=self.one_of("k", "v"))
        if self.rarely():
            body = self.binary("*", body, self.value(place.deeper(pools=False, text=False)))
        return call("leverage", body, Number(value=self.one_of(1.0, 0.01, 10.0)))

    def over_others(self, place: Place) -> Expr:
        """A slot against the others, by their vectors or by what both have."""
        inside = place.deeper(pools=False, text=False)
        key = Input(name=self.one_of("k", "k", "v"))
        body: Expr = Other(body=self.with_slots(self.value(inside)))
        shape = self.one_of("product", "distance", "values", "last alike")
        if shape == "distance":
            between = self.binary(self.one_of("-", "*"), key, Other(body=key))
            body = Reduce(op=self.one_of(*reducing("dims")), axis=DIM, body=self.call("abs", between))
        elif shape != "values":
            body = Reduce(op="sum", axis=DIM, body=call("*", key, Other(body=key)))
        if shape == "last alike":
            like = call(">", body, Number(value=self.one_of(0.0, 0.5)))
            last = call("where", like, Other(body=Input(name="position")), Number(value=-1))
            newest = Reduce(op=self.one_of("max", "min"), axis=Axis.OTHER, body=last)
            is_last = call("==", Other(body=newest), Input(name="position"))
            body = call("where", is_last, self.value(inside), body)
        elif self.one_of(True, False):
            body = self.binary(self.one_of("*", "+", "-", ">"), body, self.value(inside))
        op, within = self.one_of(*reducing("others")), self.one_of("all", "self")
        where = self.of_two(inside) if self.one_of(True, False) else None
        if where is not None and within == "all":
            where = together(conditions(where))
        return Reduce(op=op, axis=Axis.OTHER, body=body, within=within, where=where)

    def of_two(self, place: Place) -> Expr:
        """A condition on a slot and another one; none that says which keys are equal, as a key says that."""
        other = Other(body=self.with_slots(self.value(place)))
        made: Expr = self.one_of(
            call(self.one_of("<", "<=", ">"), Other(body=Input(name="position")), Input(name="position")),
            call("<", Other(body=Input(name="age")), self.literal()),
            call(self.one_of("<", ">=", ">"), other, self.value(place)),
        )
        if self.one_of(True, False):
            return made
        return call(self.one_of("and", "or"), made, self.one_of(self.condition(place), made))

    def with_slots(self, body: Expr) -> Expr:
        """An expression that varies over slots."""
        return body if SLOT in axes_of(body) else self.binary("*", Input(name="age"), body)

    def over_text(self, place: Place) -> Expr:
        """A reduction over the prompt's queries."""
        inside = Place(query=True, attends=False, asks=True, depth=min(place.depth - 1, 1))
        body = self.binary(self.one_of("+", "*", "-"), self.dot(inside), self.value(inside))
        if QUERY not in axes_of(body):  # of projections of keys, say
            product = call("*", Input(name="q"), Input(name="k"))
            body = self.binary("+", body, Reduce(op="sum", axis=DIM, body=product))
        if self.rarely():
            turned = call("turn", Input(name="q"), call("neg", Input(name="query_position")))
            seen = call("ahead", Input(name="k"), self.count(9, 1))
            body = Reduce(op="sum", axis=DIM, body=call("*", turned, seen))
        after = self.count(3) if self.rarely() else None
        made = Reduce(op=self.one_of(*reducing("text")), axis=QUERY, body=body, within="text", after=after)
        return self.filtered(made, inside)

    def tensor(self, *, dims: bool) -> Expr:
        """What a file says of the KV head."""
        return TensorRef(name=self.one_of(*(one.name for one in self.tensors if ("dims" in one.axes) == dims)), dims=dims)

    def attention(self) -> Expr:
        """The plainest reduction over queries."""
        body = Input(name=self.one_of("attn", "attn", "logit") if self.logit else "attn")
        return self.of_queries(self.one_of("sum", *reducing("queries")), body)

    # -- reductions ----------------------------------------------------------------------------------------------------

    def reduction(self, place: Place) -> Expr:
        axes = ["dims", "slots"] if place.query else ["queries", "queries", "queries", "dims", "slots"]
        if place.pools:
            axes.append("pool")
        if place.dims and self.one_of(True, True, False):
            return self.leaf(place)  # a reduction inside a reduction over dims: seldom
        if self.pages and not place.asks:
            axes.append("page")
        if not place.asks and self.rarely():
            axes.append("rank")
        folds = not place.dims and not place.pruned and (not place.query or place.previous)
        if not place.asks and folds and self.rarely():
            axes.append("fold")
        if place.text and not place.dims:
            axes += ["text"] * 4
        if not self.fused and not place.query and not place.asks and self.one_of(*[False] * 31, True):
            axes.append("leverage")
        if not place.query and not place.asks and not place.dims and self.rarely():
            axes.append("others")
        if self.groups(place) and self.rarely():
            axes += ["key"] * 2
        makers = {
            "text": self.over_text, "leverage": self.leverage,
            "queries": self.over_queries, "slots": self.over_slots, "dims": self.over_dims, "pool": self.pool, "page": self.in_page,
            "rank": self.rank, "fold": self.fold, "others": self.over_others,
            "key": self.by_key,
        }  # fmt: skip
        return makers[self.one_of(*axes)](place)

    def over_queries(self, place: Place) -> Expr:
        body = self.value(place.deeper(query=True, previous=False, dims=False, pools=False, text=False))
        if QUERY not in axes_of(body):
            body = self.binary(self.one_of("*", "+", ">"), Input(name="attn"), body)
        inside = place.deeper(query=True, previous=False, dims=False, pools=False, text=False)
        return self.filtered(self.of_queries(self.one_of(*OF_QUERIES), body), inside)

    def filtered(self, made: Reduce, inside: Place) -> Reduce:
        """A reduction, perhaps of what a condition holds for, which is evaluated where its body is."""
        if made.op not in FILTERED or not self.rarely():
            return made
        where = self.condition(replace(inside, depth=min(inside.depth, 1)))
        counts = made.axis in axes_of(where) and self.one_of(*[False] * 3, True)
        return made.model_copy(update={"where": where, "body": ONE if counts else made.body})

    def of_queries(self, op: str, body: Expr) -> Expr:
        over = ops.REDUCTIONS[op].over
        history = "history" in over and ("queries" not in over or self.rarely())
        decay = self.decay() if ops.REDUCTIONS[op].argument else None
        if op == "ema" and decay is not None and value_of(decay) == 0:
            op, decay = "last", None  # as the language reads it
        return Reduce(op=op, axis=QUERY, body=body, last=self.count(7, 1) if history else None, argument=decay)

    def decay(self) -> Expr:
        if self.one_of(True, False):
            return Number(value=self.one_of(0.9, 0.5, 0.0, 1.0, 0.99))
        return call("/", self.count(4), Number(value=self.one_of(4.0, 5.0)))

    def over_slots(self, place: Place) -> Expr:
        body = self.value(place.deeper(dims=False, pools=False))
        if SLOT not in axes_of(body):
            body = self.binary("*", self.slot_value(place), body)
        return self.filtered(
            Reduce(op=self.one_of(*reducing("slots")), axis=SLOT, body=body), place.deeper(dims=False, pools=False)
        )

    def by_key(self, place: Place) -> Expr:
        """What the slots with the same key have, a number or with dims around it a vector."""
        op, inside = self.one_of(*FILTERED), replace(place.deeper(pools=False, text=False), query=False)
        if place.dims:
            made = Reduce(op=op, axis=SLOT, body=Input(name=self.one_of("k", "v")), by=self.key(place))
        elif place.query:
            made = Reduce(op=op, axis=SLOT, body=self.of_token(), by=self.key(place))
            return made if self.one_of(True, False) else made.model_copy(update={"where": self.of_age()})
        else:
            made = Reduce(op=op, axis=SLOT, body=self.with_slots(self.value(inside)), by=self.key(place))
        return self.filtered(made, replace(inside, dims=False, depth=1)) if not place.query else made

    def key(self, place: Place) -> Expr:
        """A number of each slot that is no page's, which have a word of their own."""
        third = call("%", Input(name="position"), Number(value=self.one_of(3.0, 2.0, 2.5)))
        made: Expr = self.one_of(
            lambda: third,
            lambda: self.of_age(),
            lambda: call("floor", self.of_token()),
            lambda: call("floor", call("/", Input(name="age"), Number(value=3))),
            lambda: third if place.query else self.condition(KEEP.deeper()),
            lambda: third if place.query else self.value(KEEP.deeper()),
        )()
        return made if axes_of(made) == {SLOT} and page_of_key(made) is None else third

    def of_token(self) -> Expr:
        """What a token has by itself, or its age."""
        body = Reduce(op=self.one_of(*reducing("dims")), axis=DIM, body=Input(name=self.one_of("k", "v")))
        return self.one_of(body, body, Input(name="age"), *map(read, self.given))

    def of_age(self) -> Expr:
        """Whether a token is new."""
        return call(self.one_of(*COMPARISONS), Input(name="age"), Number(value=self.one_of(2.0, 5.0)))

    def slot_value(self, place: Place) -> Expr:
        if place.query:
            return Input(name="attn") if place.attends else self.dot(place)
        return Reduce(op="mean", axis=QUERY, body=Input(name="attn"))

    def dot(self, place: Place) -> Expr:
        within = "sketch" if self.sketch and not place.attends and self.one_of(True, True, False) else "all"
        product = call("*", Input(name="q"), Input(name="k"))
        if self.matrices and within == "all" and self.rarely():
            matrix = TensorRef(name=self.one_of(*self.matrices).name, dims=True)
            sides = (call("project", Input(name=name), matrix) for name in (self.one_of("q", "k"), "k"))
            product = call("*", next(sides), next(sides))
        return Reduce(op="sum", axis=DIM, body=product, within=within)

    def over_dims(self, place: Place) -> Expr:
        if place.query and self.one_of(True, False):
            return self.dot(place)
        sketched = self.sketch and place.query and not place.attends and self.one_of(True, False)
        body = self.value(
            place.deeper(dims=True, pools=False) if not sketched else replace(place.deeper(dims=True), sketched=True)
        )
        if DIM not in axes_of(body):
            body = self.binary("*", Input(name="k" if sketched else self.one_of("v", "k")), body)
        op = self.one_of(*reducing("sketch" if sketched else "dims"))
        inside = replace(place.deeper(dims=True, pools=False), sketched=sketched)
        return self.filtered(Reduce(op=op, axis=DIM, body=body, within="sketch" if sketched else "all"), inside)

    def in_page(self, place: Place) -> Expr:
        """A number of each slot's page: of what tokens have, whatever the query."""
        if place.query:
            body: Expr = Reduce(op=self.one_of(*reducing("dims")), axis=DIM, body=Input(name=self.one_of("k", "v")))
            return self.over_page(self.one_of(body, Input(name="age")))
        body = self.value(place.deeper(dims=False, pools=False, text=False))
        drawn = axes_of(body) == {SLOT} and not any(is_call(part, "random") for part in walk(body))
        return self.over_page(body if drawn else self.attention())

    def over_page(self, body: Expr) -> Expr:
        if self.rarely():
            body = self.binary("*", self.call("abs", body), self.one_of(*self.fixed))
        within = self.one_of("page", "page", "page", "next")
        where = self.of_age() if self.rarely() else None
        return Reduce(op=self.one_of(*FILTERED), axis=SLOT, body=body, within=within, where=where)

    def rank(self, place: Place) -> Expr:
        """A place in an order, perhaps within the page."""
        body = self.value(place.deeper(dims=False))
        if SLOT not in axes_of(body):
            body = self.binary("*", self.slot_value(place), body)
        paged = self.pages and QUERY not in axes_of(body) and self.one_of(True, False)
        by = None if paged or QUERY in axes_of(body) or not self.groups(place) else self.one_of(None, self.key(place))
        return Rank(body=body, within="page" if paged else "all", by=by)

    def groups(self, place: Place) -> bool:
        """Whether slots can be told apart by keys: in a settle or a selection, for which there are fused kernels nowhere."""
        return not self.fused and not place.asks and not place.sketched and not (place.query and place.attends)

    def fold(self, place: Place) -> Expr:
        """Query by query, or prune by prune; a fold over queries may stand in either."""
        over = "queries" if place.query or self.fused else self.one_of("queries", "queries", "prunes")
        inside = place.deeper(
            query=over == "queries", attends=True, previous=True, pruned=over == "prunes", pools=False, text=False
        )
        body = self.value(inside)
        shape = self.one_of("max", "blend", "where")
        if shape == "max":
            body = self.call("max", self.binary("*", PREVIOUS, Number(value=0.5)), body)
        elif shape == "blend":
            body = self.binary("+", self.binary("*", PREVIOUS, Number(value=self.one_of(0.5, 0.9))), body)
        else:
            body = self.call("where", self.condition(inside), body, PREVIOUS)
        start = self.one_of(NOTHING, ONE, Input(name="position"), self.one_of(*self.fixed))
        return Fold(body=body, start=start, over=over)

    def pool(self, place: Place) -> Expr:
        body = self.value(place.deeper(pools=False))
        if axes_of(body) != {SLOT}:
            body = self.binary("*", self.attention(), body)
        return self.pooled(body)

    def pooled(self, body: Expr) -> Call:
        return call(self.one_of(*ops.POOLS), body, self.count(7, 1))

    # -- statements ----------------------------------------------------------------------------------------------------

    def params(self, bounded: bool) -> list[Param]:
        """The budget's param and others, in any order; what may be read grows with them."""
        made = []
        names = ("a", "budget", "tail_2") if bounded else ("a", "tail_2")
        for name in self.pick(list(permutations(names[: self.one_of(2, 2, 3)]))):
            if name == "budget":
                default = Number(value=float(self.one_of(6, 8, 4, 12))) if not self.rarely() else self.count(14, 4)
                known = value_of(default := fold_expression(default))
                default = default if known is None else Number(value=float(int(known)))
                made.append(Param(name=name, default=default, low=self.one_of(None, None, 1.0)))
            elif self.one_of(True, False):
                default = fold_expression(self.fixed_number())
                made.append(Param(name=name, default=default, unit=self.one_of(None, "tokens")))
                value = value_of(default, self.known)
                if value is not None:
                    self.known[name] = value
                self.fixed.append(ParamRef(name=name))
        return made

    def keeps(self, room: float, *, evicts: bool) -> tuple[Keep, ...]:
        """Up to three; static ones fit. Without eviction only those by place have a meaning."""
        made: list[Keep] = []
        sizes = {"first": int(room // 3), "last": int(room // 2)}
        forms = [form for form in dict.fromkeys(("last", "top", "first", *ops.KEEPS)) if evicts or form in ops.ENDS]
        for _ in range(self.one_of(0, 1, 1, 2, 3)):
            row = ops.KEEPS[self.one_of(*forms)]
            count = self.count(sizes.get(row.name, room), own=self.by_head) if "count" in row.parts else None
            by = None if row.place else self.condition(KEEP) if row.holds else self.value(KEEP)
            made.append(Keep(scope=row.name, count=count, by=by))
        if not any(keep.scope == "last" for keep in made) and self.one_of(True, True, False):
            made.append(Keep(scope="last", count=ONE))
        return tuple(made)

    def eviction(self, room: float, *, compact: bool) -> dict[str, Any]:
        """The statements of a policy with a budget; what it may read of the layer is decided before."""
        made: dict[str, Any] = {"when": self.one_of("both", "both", "both", "both", "prefill", "decode")}
        made["score"] = self.value(replace(SCORE, text=made["when"] == "prefill" and not self.fused))
        asks = any(isinstance(part, Reduce) and part.within == "text" for part in walk(made["score"]))
        if made["when"] != "prefill":
            if self.rarely():
                made |= {name: self.count(4, own=self.by_head) for name in ("trigger", "slack", "max_drop")}
            made["cap"] = "soft" if self.fused or self.measured else self.one_of("soft", "soft", "soft", "hard")
        elif not self.fused and not self.by_head and not self.measured:
            made |= self.shared()
            if "across" in made and self.one_of(True, False):
                made["score"] = self.compared(made["score"])
        if (
            made["when"] != "decode"
            and self.victims != "layers"
            and "across_layers" not in made
            and not asks
            and self.rarely()
        ):
            made |= {"prefill": "blocks", "prefill_block": self.count(6, 1)}
        if not made.keys() & {"across", "across_layers"}:
            made["victims"] = self.victims
        elif "across" not in made and made["across_layers"].by is not None and self.victims == "heads":
            made["victims"] = "heads"
        if self.one_of(*[False] * 7, True):
            made["layers"] = self.one_of(*[found for found in [self.layers()] if found != LayerRange()] or [None])
        return made | ({"positions": "compact", "rope": self.one_of("fused", "fused", "cached")} if compact else {})

    def compared(self, score: Expr) -> Expr:
        """A score of heads that share a budget, which reads what all of them have."""
        if SLOT not in axes_of(score):
            score = self.binary("+", score, Input(name="position"))
        pools, apart = any(is_call(part, *ops.POOLS) for part in walk(score)), of_query_heads_unpooled(score)
        if apart and pools:  # a pool has the group's value, but cannot stand in another
            return score
        if apart or (not pools and self.one_of(True, False)):
            score = self.pooled(score)
        heads = Reduce(op="sum", axis=Axis.HEAD, body=self.one_of(ONE, Input(name="live"), self.over_slots(KEEP)))
        mean = Reduce(op="mean", axis=SLOT, body=score)  # of pools, too
        ranked = Rank(body=self.one_of(score, self.binary("-", score, mean)), within="heads")
        measured = self.binary("/", score, self.over_heads(Reduce(op=self.one_of("std", "max"), axis=SLOT, body=score)))
        return self.one_of(
            ranked, self.binary("+", score, ranked), self.binary("<", ranked, self.binary("*", heads, heads)), measured
        )

    def shared(self) -> dict[str, Any]:
        """Who shares a budget."""
        floors = (NOTHING, Number(value=0.2), Number(value=0.5), ONE)
        who = self.one_of("nobody", "nobody", "heads", "heads", "layers", "pool", "both")
        made = {} if who not in ("heads", "both") else {"across": self.one_of(*floors)}
        if who in ("layers", "pool", "both"):
            by = None if who == "pool" else self.weight()
            made["across_layers"] = AcrossLayers(by=by, floor=self.one_of(*floors))
        return made

    def weight(self) -> Expr:
        """What a layer's share of a budget goes by."""
        made = self.over_heads(self.over_slots(KEEP))
        if self.rarely():
            made = self.over_heads(Reduce(op="sum", axis=SLOT, body=self.binary("/", self.slot_value(KEEP), made)))
        return self.binary(self.one_of("*", "+", "**"), made, self.one_of(*self.fixed)) if self.rarely() else made

    def over_heads(self, body: Expr) -> Expr:
        where = call(">", Input(name="live"), self.one_of(*self.fixed)) if self.rarely() else None
        return Reduce(op=self.one_of(*reducing("heads")), axis=Axis.HEAD, body=body, where=where)

    def layers(self) -> LayerRange:
        low = self.pick(range(0, 4))
        ends = [None, Number(value=float(low)), None], [Number(value=float(self.pick(range(low, 5)))), None, None]
        last = call("-", Input(name="layers"), ONE)
        return LayerRange(low=self.one_of(*ends[0]), high=self.one_of(*ends[1], last if low < 3 else None))

    def select(self, room: float, *, votes: bool = False) -> Select:
        by = self.value(SELECT)
        if SLOT not in axes_of(by):
            by = self.binary("+", self.dot(SELECT), by)
        if votes and self.rarely():
            by = self.over_heads(by)
            by = self.binary("+", by, self.dot(SELECT)) if self.rarely() else by
        layers = self.layers() if self.rarely() else LayerRange()
        count = self.count(room + 6, room) if not self.rarely() else self.count(room, room)
        if self.rarely():
            measured = self.of_data(SELECT)
            return Select(count=Input(name="everything"), by=by, measured=measured, low=layers.low, high=layers.high)
        return Select(count=count, by=by, low=layers.low, high=layers.high)

    def reused(self, select: Select) -> Select:
        """The same where some of the first layers choose, for themselves not."""
        choosing = self.one_of((0,), (1,), (0, 2), (0, 1), (2, 1), (0.5, 7))
        return select.model_copy(
            update={"choosing": tuple(Number(value=layer) for layer in choosing), "low": None, "high": None}
        )

    def of_data(self, place: Place) -> Expr:
        """A count that reads the data."""
        share = self.one_of(Number(value=0.5), Number(value=0.9), self.decay())
        makers: list[Callable[[], Expr]] = [
            lambda: call("*", Number(value=self.one_of(0.5, 0.3, 0.7)), Input(name=self.one_of("seen", "live"))),
            lambda: Reduce(op="sum", axis=SLOT, body=self.over_threshold(place)),
            lambda: self.enough(place, share),
            lambda: self.over_slots(place),
        ]
        made = self.one_of(*makers)()
        if self.rarely():
            other = self.one_of(*makers, lambda: self.one_of(*self.fixed))()
            made = self.one_of(call(self.one_of("max", "min"), made, other), call("+", made, other))
        return made

    def over_threshold(self, place: Place) -> Expr:
        """A condition on slots."""
        made = self.condition(place.deeper())
        return made if SLOT in axes_of(made) else call(">", self.slot_value(place), Number(value=0.1))

    def enough(self, place: Place, share: Expr) -> Expr:
        body, by = (
            made if SLOT in axes_of(made) else self.binary("*", self.slot_value(place), made)
            for made in (self.value(place.deeper()), self.value(place.deeper()))
        )
        return call("enough", body, share, self.one_of(body, body, by))

    def sketch_by(self, depth: int = 2) -> Expr:
        """An expression over dims, and over queries perhaps."""
        body: Expr = Input(name=self.one_of("k", "k", "v"))
        if self.given and self.rarely():
            body = self.binary("*", body, read(self.given[0]))
        mean = Reduce(op=self.one_of("mean", "max", "sum"), axis=SLOT, body=body)
        if depth == 0 or self.one_of(False, True):
            return self.one_of(Input(name="q"), Input(name="q"), mean)
        if self.one_of(True, False):
            return self.call(self.one_of("abs", "abs", "neg", "exp"), self.sketch_by(depth - 1))
        other = self.sketch_by(depth - 1) if self.one_of(True, False) else self.one_of(*self.fixed)
        return self.binary(self.one_of("*", "+", "-"), self.sketch_by(depth - 1), other)


def make_policy(pick: Callable[[Sequence[Any]], Any], stem: str = "p", *, fused: bool = False) -> Policy:
    """A folded policy that the checker accepts; `print_policy` gives its source.

    Args:
        fused: leave out the statements for which there are no fused kernels so far.
    """
    maker = Maker(pick, fused=fused)
    maker.tensors = tuple(one for one in TENSORS if maker.one_of(*[False] * 4, True))
    maker.matrices = () if fused else tuple(one for one in MATRICES if maker.one_of(*[False] * 4, True))
    maker.grouped = (
        () if fused else tuple(one for one in GROUPED if one.name == "asking" and maker.one_of(*[False] * 4, True))
    )
    maker.given = tuple(one for one in GIVEN if maker.one_of(*[False] * 4, True))
    evicts = maker.one_of(*[True] * 9, False)
    selects = not evicts or maker.one_of(False, False, False, False, True)
    compact = evicts and not fused and maker.one_of(*[False] * 5, True)
    maker.victims = maker.one_of("own", "own", "own", "own", "heads", "layers") if evicts and not fused else "own"
    if maker.victims == "layers":
        maker.fixed.pop()  # a count cannot read the layer
    maker.logit = not selects
    maker.pages = not compact and maker.rarely()
    sketches = selects and not compact and maker.one_of(True, False)
    made: dict[str, Any] = {"params": tuple(maker.params(evicts)), "group": maker.one_of("mean", "max", "sum")}
    room = 4.0
    if evicts:
        made["budget"], room = _budget(maker, made["params"])
        maker.measured = maker.victims != "layers" and maker.one_of(*[False] * 5, True)
        told = _by_head(maker, made["budget"]) if maker.victims == "own" and not maker.measured else None
        if maker.measured:
            made["measured"] = maker.of_data(KEEP)
            if maker.victims == "heads" and any(isinstance(part, TensorRef) for part in walk(made["measured"])):
                made["measured"] = call("*", Number(value=0.5), Input(name="seen"))  # heads have to agree
            made["budget"] = maker.one_of(made["budget"], Input(name="everything"))
            if made["budget"] == Input(name="everything"):
                made |= _bounded(made["measured"])
        elif told is None:
            maker.fixed.append(Input(name="budget"))
        else:
            made["budget"], room, maker.by_head = told, min(room, 4.0), (Input(name="budget"), *_by_head_numbers(maker))
    made["keeps"] = maker.keeps(room, evicts=evicts) if evicts or selects else ()
    if evicts:
        made |= maker.eviction(room, compact=compact)
    if selects:
        maker.sketch = sketches
        made["select"] = maker.select(room, votes=not evicts or made.get("victims", "own") != "own")
        if not evicts and maker.one_of(False, True):
            made["select"] = maker.reused(made["select"])
    if sketches and _looks_at_sketch(made["select"]):
        made["sketch"] = Sketch(count=maker.count(4, 1), by=maker.sketch_by(), every=maker.count(4, 1))
    paged = any(isinstance(part, (Rank, Reduce)) and part.within in ("page", "next") for part in _nodes(made))
    if maker.pages and (selects or paged):
        made["pages"] = maker.count(5, 1)
        if maker.rarely():
            made["pages_after"] = maker.count(7)
    if not fused and maker.rarely():
        made |= {"storage": "blocks", "block": maker.count(6, 1)}
    made["tensors"] = tuple(one for one in (*maker.grouped, *maker.matrices, *maker.tensors) if _reads(made, one))
    made["given"] = tuple(one for one in maker.given if _reads(made, one))
    policy = fold(Policy(name=stem.upper(), stem=stem, doc="A random policy.", **made))
    if selects and may_choose_alone(policy) and maker.one_of(True, False):
        policy = policy.model_copy(update={"group": "each"})
    kept = tuple(keep for keep in policy.keeps if keep != Keep(scope="last", count=NOTHING))
    return policy.model_copy(update={"keeps": kept})


def may_choose_alone(policy: Policy) -> bool:
    """Whether each query head may select for itself: the KV head needs no number of theirs."""
    assert policy.select is not None
    common = list(_all_expressions(policy.model_copy(update={"select": None})))
    common += [
        part for part in _nodes({"select": policy.select}) if isinstance(part, Reduce) and part.axis is Axis.HEAD
    ]  # fmt: skip
    return not any(map(asks_query_heads, common))


def _looks_at_sketch(select: Select) -> bool:
    exprs = [select.by] if select.measured is None else [select.by, select.measured]
    return any(isinstance(part, Reduce) and part.within == "sketch" for expr in exprs for part in walk(expr))


def _reads(statements: dict[str, Any], one: Tensor | Given) -> bool:
    """Whether a statement reads a tensor, or a value from the caller."""
    return any(isinstance(part, (TensorRef, GivenRef)) and part.name == one.name for part in _nodes(statements))


def _nodes(statements: dict[str, Any]) -> Iterator[Expr]:
    """Everything that is written in some statements."""
    for expr in _all_expressions(Policy(name="P", stem="p", **statements)):
        yield from walk(expr)


def _budget(maker: Maker, params: Sequence[Param]) -> tuple[Expr, float]:
    """The budget, and how many tokens it holds at least."""
    budget: Expr = ParamRef(name="budget")
    default = next((param.default for param in params if param.name == "budget"), None)
    if default is None:
        return maker.count(12, 4), 4.0
    smallest = value_of(default)
    if maker.rarely():
        wider = maker.call(maker.one_of("max", "min"), budget, Number(value=6))
        budget = maker.one_of(wider, call("+", budget, maker.fixed[1]))
    return budget, 4.0 if smallest is None else min(smallest, 6.0)


def _bounded(measured: Expr) -> dict[str, Expr]:
    """`budget min(x, n)` of an x that reads the data, and an n that does not, is at most n."""
    if not is_call(measured, "min"):
        return {}
    return next(
        (
            {"measured": x, "budget": n}
            for x, n in (measured.args, measured.args[::-1])
            if reads_data(x) and not reads_data(n)
        ),
        {},
    )


def _by_head(maker: Maker, budget: Expr) -> Expr | None:
    """The budget for some KV heads, and another for the others, as a tensor tells; None where none is read."""
    numbers = _by_head_numbers(maker)
    if not numbers or maker.one_of(True, False):
        return None
    other = maker.one_of(Number(value=4.0), Number(value=12.0), Input(name="prompt"), Input(name="everything"))
    least = call("max", other, Number(value=4.0))
    condition = call(">", maker.one_of(*numbers), NOTHING)
    return call("where", condition, budget, least)


def _by_head_numbers(maker: Maker) -> list[Expr]:
    return [TensorRef(name=one.name, dims=False) for one in maker.tensors if "dims" not in one.axes]


@st.composite
def policies(draw: Callable[[st.SearchStrategy[Any]], Any]) -> Policy:
    """Random policies that hypothesis can shrink."""
    return make_policy(lambda options: draw(st.sampled_from(options)))


def policy_of(seed: str, stem: str = "p", *, fused: bool = False) -> Policy:
    """The random policy of a seed: many times faster than hypothesis, and no two alike."""
    return make_policy(Generator(seed).choice, stem, fused=fused)


def mixes_dims(policy: Policy) -> bool:
    """Whether some reduction over dims puts values beside keys or queries, so that both need the same size."""
    if policy.sketch is not None:
        return True
    exprs = [*expressions(policy), *([] if policy.select is None else [policy.select.by])]
    exprs += [] if policy.select is None or policy.select.measured is None else [policy.select.measured]
    return any(
        isinstance(part, Reduce) and part.axis is DIM and len({_vector(leaf) for leaf in walk(part)} - {""}) > 1
        for expr in exprs
        for part in walk(expr)
    )


def _vector(leaf: Expr) -> str:
    if isinstance(leaf, TensorRef) and leaf.dims:
        return "k"
    if isinstance(leaf, Input) and leaf.name in ("q", "k", "v"):
        return "v" if leaf.name == "v" else "k"
    return ""


# -- smaller ones --------------------------------------------------------------------------------------------------------


def simpler(policy: Policy) -> Iterator[Policy]:
    """Policies with one statement less, or a part of an expression in the place of the whole. They may not be legal."""
    for name, info in Policy.model_fields.items():
        if getattr(policy, name) != info.default and name not in (
            "name",
            "stem",
            "doc",
            "budget",
            "score",
            "keeps",
            "params",
        ):
            yield policy.model_copy(update={name: info.default})
    for index in range(len(policy.keeps)):
        yield policy.model_copy(update={"keeps": policy.keeps[:index] + policy.keeps[index + 1 :]})
    for index, param in enumerate(policy.params):
        if not any(ParamRef(name=param.name) == part for expr in _all_expressions(policy) for part in walk(expr)):
            yield policy.model_copy(update={"params": policy.params[:index] + policy.params[index + 1 :]})
    yield from _with_smaller_parts(policy)


def _all_expressions(node: Any) -> Iterator[Expr]:
    for _, value in node:
        for part in value if isinstance(value, tuple) else (value,):
            if hasattr(part, "kind"):
                yield part
            elif isinstance(part, Node):
                yield from _all_expressions(part)


def _with_smaller_parts(node: Any) -> Iterator[Any]:
    """Copies of a node in which one expression has become smaller."""
    for name, value in node:
        if isinstance(value, tuple):
            for index, part in enumerate(value):
                if isinstance(part, Node):
                    for smaller in _smaller(part):
                        yield node.model_copy(update={name: (*value[:index], smaller, *value[index + 1 :])})
        elif isinstance(value, Node):
            for smaller in _smaller(value):
                yield node.model_copy(update={name: smaller})


def _smaller(node: Node) -> Iterator[Node]:
    if isinstance(node, (Call, Reduce, Other, Fold, Rank)):
        yield from children(node)
    yield from _with_smaller_parts(node)
