"""Lower the observation of a prompt to Triton: what the kernels `observe` and `over_slots` call of a generated `kernels_triton.py`.

A program of `observe` owns a block of slots and loops over blocks of queries. A value is a tile [slots, queries], with size 1 along an
axis that it does not vary over. So expressions print as in `settle`, which has one query. A reduction over slots needs all slots of a
query, which no program of `observe` sees: the earlier launch `over_slots` computes these reductions, one number per query.
`kvdsl/runtime/gpu/observing.py` has the device functions, and says why the order of queries does not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvdsl.ir.nodes import Axis, Column, Expr, is_reduction
from kvdsl.lower.expression import Fragment, OfAllSlots, Use, fragment, hoist, names_of, size_of, uses_of
from kvdsl.lower.step import Step
from kvdsl.lower.triton_expressions import CAN, BlockPrinter, CountPrinter, Pass, number
from kvdsl.lower.triton_hooks import indented, times

_OVER_SLOTS = {"sum": "ops.total", "mean": "ops.total", "max": "ops.largest", "min": "ops.least"}
_COUNTED = Use("helper", "count")
_COUNT = Pass(
    (Fragment("count = tl.zeros([QUERIES], tl.float32)"),), (Fragment("count += tl.sum(visible.to(tl.float32), 0)"),)
)
"""Counts the slots that each query sees, in a pass that reads positions only."""


@dataclass(frozen=True)
class TritonPromptPlan:
    """How the kernels observe a prompt.

    Attributes:
        observe: the loop over queries, for a block of slots.
        over_slots: loops over slots, for a block of queries; none if the policy has no reduction over slots.
        reductions: names of their results.
    """

    observe: Pass
    over_slots: tuple[Pass, ...]
    reductions: tuple[str, ...]

    @property
    def uses(self) -> tuple[Use, ...]:
        """What all of it needs."""
        return uses_of(*(Fragment("", uses=one.uses) for one in (self.observe, *self.over_slots)))

    def fold_queries(self) -> Iterator[str]:
        """Yield the statements of the hook of this name. All programs read the same queries at the same time: the last ones first."""
        loop = self.observe.printed()
        yield "seen = since <= until"
        yield from loop.before
        yield "low, high = tl.min(since), tl.max(until)"
        yield "for back in range(0, high - low + 1, QUERIES):"
        yield from indented(
            (
                "now = high - back - tl.arange(0, QUERIES)",
                "asked = now >= first",
                "t = observing.place(order, now, first, asked, PADDED)",
                "now = now[None, :]",
                "visible = (since <= now) & (now <= until)",
                *loop.body,
            )
        )
        yield from loop.after

    def reduce_queries(self) -> Iterator[str]:
        """Yield the statements of the hook of this name."""
        yield "d = tl.arange(0, D_PAD)[None, :]"
        for loop in (one.printed() for one in self.over_slots):
            yield from loop.before
            yield "for slot in range(start, stop, SLOTS):"
            yield from indented(
                (
                    "i = slot + tl.arange(0, SLOTS)[:, None]",
                    "inside = i < stop",
                    "pos = tl.load(position + i, mask=inside, other=-1)",
                    "visible = (pos >= 0) & (now >= pos) & (now - pos < window) & asked[None, :]",
                    "k = tl.load(keys + i.to(tl.int64) * key_slot + d, mask=inside & (d < D), other=0.0).to(DOT)",
                    *loop.body,
                )
            )
            yield from loop.after
        for n, name in enumerate(self.reductions):
            yield f"tl.store(reduced + {_row(n)}t[None, :], {name}, mask=asked[None, :])"


def triton_prompt_plan(step: Step) -> TritonPromptPlan | None:
    """Lower the observation of a prompt.

    Returns:
        None if the policy observes nothing, or has a `fold`: torch applies folds query by query, and these kernels read many at once.
    """
    if not step.observe or step.ruled("fold"):
        return None
    loops, hoisted = _over_slots(step, [column.body for column in step.observe])
    return TritonPromptPlan(_observe(step, hoisted), tuple(loops), tuple(hoisted.values()))


# -- a block of slots, and the queries that see them -------------------------------------------------------------------


def _observe(step: Step, hoisted: dict[Expr, str]) -> Pass:
    printer = BlockPrinter(hoisted)
    found = [
        Fragment(f"{name} = tl.load(reduced + {_row(n)}t, mask=asked, other=0.0)[None, :]")
        for n, name in enumerate(hoisted.values())
    ]
    before, body, after = zip(*(_fold(column, printer) for column in step.observe), strict=True)
    uses = uses_of(*body)
    return Pass(
        before=(*_of_tokens(step, uses), *(line for line in before if line.text)),
        body=(*_from_queries(step, uses), *found, *body),
        after=tuple(line for line in after if line.text),
    )


def _fold(column: Column, printer: BlockPrinter) -> tuple[Fragment, Fragment, Fragment]:
    """Print a column's initial value, its update by a tile, and the store that merges the result with the old value."""
    name, body = column.name, printer.value(column.body)
    old = f"tl.load({name}_at + i, mask=seen, other=0.0)"
    if column.rule == "ring":
        size = fragment("ops.count({})", number(size_of(name)))
        place = fragment(f"ops.ring_row({name}_at + i, column_stride, {{}}, now)", size)
        store = fragment("tl.store({}, {}, mask=visible & (now >= end - {}))", place, body, size)
        return Fragment(""), store, Fragment("")
    begin = "tl.zeros([SLOTS, 1], tl.float32)"
    tile = fragment(f"{name} += observing.total({{}}, visible)", body)
    joined = Fragment(f"{old} + {name}")
    if column.decay is not None:
        decay = CountPrinter()(column.decay)
        weighted = fragment("observing.remaining(now, pos, until, {}) * ({})", decay, body)
        tile = fragment(f"{name} += observing.total({{}}, visible)", weighted)
        joined = fragment(f"observing.averaged({old}, {name}, pos, since, until, {{}})", decay)
    elif column.rule == "squares":
        tile = fragment(f"{name} += observing.total(ops.square({{}}), visible)", body)
    elif column.rule == "last":
        tile = fragment(f"{name} += observing.total({{}}, visible & (now == until))", body)
        joined = Fragment(name)
    elif column.rule in ("max", "min"):
        sign, function = ("-", "largest") if column.rule == "max" else ("", "least")
        begin = f'tl.full([SLOTS, 1], float("{sign}inf"), tl.float32)'
        tile = fragment(f"{name} = ops.{column.rule}imum({name}, observing.{function}({{}}, visible))", body)
        joined = Fragment(f"ops.{column.rule}imum({old}, {name})")
    else:
        assert column.rule == "sum", column.rule
    return Fragment(f"{name} = {begin}"), tile, fragment(f"tl.store({name}_at + i, {{}}, mask=seen)", joined)


def _row(n: int) -> str:
    return times(n, "reduced_stride")


def _from_queries(step: Step, uses: Iterable[Use]) -> Iterator[Fragment]:
    """Yield statements that name the values which expressions read of a tile."""
    inputs = names_of(uses, "input")
    attn, logit = "attn" in inputs, "logit" in inputs
    if attn or logit:
        yield Fragment(
            f"attn, logit = observing.weights(query, {'lse' if attn else None}, k, t, asked, tokens, scaling, softcap, "
            f'query_head, query_token, ATTN={attn}, LOGIT={logit}, HOW="{step.group}", G=G, D=D, CAPPED=CAPPED)'
        )
    if "observed" in inputs:
        yield Fragment("observed = ops.observed(pos, now, window)")
    if "live" in inputs:
        yield Fragment("live = tl.load(live_slots + t, mask=asked, other=0)[None, :]")


def _of_tokens(step: Step, uses: Iterable[Use]) -> Iterator[Fragment]:
    """Yield statements that load the columns which tokens get when placed."""
    read = names_of(uses, "column")
    for column in step.place:
        if column.name in read:
            yield Fragment(f"{column.name} = tl.load({column.name}_at + i, mask=inside, other=0.0)")


# -- a block of queries, and the slots that they see -------------------------------------------------------------------


def _over_slots(step: Step, exprs: Iterable[Expr]) -> tuple[list[Pass], dict[Expr, str]]:
    """Return loops that compute every reduction over slots, innermost first, and the names of the results."""

    def loop(expr: OfAllSlots, name: str, names: dict[Expr, str]) -> Pass | None:
        if not is_reduction(expr, Axis.SLOT):
            return None
        CAN.check(expr.op, expr.over)
        body = BlockPrinter(names).value(expr.body)
        return _reduction(name, expr.op, body, (*_of_tokens(step, body.uses), *_from_queries(step, body.uses)))

    loops, names = hoist(exprs, loop)
    if any(_COUNTED in loop.uses for loop in loops):
        loops.insert(0, _COUNT)
    return loops, names


def _reduction(name: str, op: str, body: Fragment, before: tuple[Fragment, ...]) -> Pass:
    """Return the loop of one reduction over slots, whose result is [1, QUERIES]."""
    if op in ("max", "min"):
        least = f'{name} = tl.full([QUERIES], float("{"-" if op == "max" else ""}inf"), tl.float32)'
        fold = fragment(f"{name} = ops.{op}imum({name}, {_OVER_SLOTS[op]}({{}}, visible))", body)
        return Pass((Fragment(least),), (*before, fold), (Fragment(f"{name} = {name}[None, :]"),))
    nothing, fold = (
        Fragment(f"{name} = tl.zeros([QUERIES], tl.float32)"),
        fragment(f"{name} += ops.total({{}}, visible)", body),
    )
    if op == "sum":
        return Pass((nothing,), (*before, fold), (Fragment(f"{name} = {name}[None, :]"),))
    assert op == "mean", op
    return Pass((nothing,), (*before, fold), (Fragment(f"{name} = tl.div_rn({name}, count)[None, :]", uses=(_COUNTED,)),))
