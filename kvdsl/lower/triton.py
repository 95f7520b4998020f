"""Expressions as Triton: what a generated `kernels_triton.py` computes, in the last launch of a decode step (`settle`), and in the
first two of one whose query attends to a selection (`look` and `choose`).

A value over slots is a block of floats in a loop over the slots; numbers per row are doubles. A reduction over slots is hoisted
into a loop of its own. `ops.py`, `evicting.py` and `select.py` of `kvdsl/runtime/gpu` have what the text calls.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from kvdsl.ir.axes import axes_of
from kvdsl.ir.nodes import (
    Axis,
    Binary,
    Call,
    Column,
    ColumnRef,
    Expr,
    Input,
    Keep,
    Number,
    ParamRef,
    Policy,
    Random,
    Reduce,
    RingRef,
)
from kvdsl.ir.ops import OPERATORS
from kvdsl.ir.visitors import children, walk
from kvdsl.lower.expression import ATOM, Leaf, NotLowerable, Printer, Target, form_of_ranks, literal, pair, reads
from kvdsl.lower.spelling import size_of, spelled
from kvdsl.passes.parts import in_parts

# Python's precedence, with & and | for conditions (they bind tighter than comparisons).
_STRENGTH = {"or": 4, "and": 5, "*": 7, "/": 7, "%": 7, "+": 6, "-": 6}
_STRENGTH |= {op: 3 for op in ("<", "<=", ">", ">=", "==", "!=")}
_UNARY = 8
_INT_MAX = 2**31 - 1
_INITIAL = {"max": 'float("-inf")', "min": 'float("inf")'}
_SLOTS = {"visible": "visible = (pos >= 0) & (now - pos < window)", "cached": "cached = pos >= 0"}
_OVER_DIMS = {"sum": "ops.total", "mean": "ops.mean", "var": "ops.var", "max": "ops.largest", "min": "ops.least"}
_FUNCTIONS = {name: f"tl.{name}" for name in ("abs", "exp", "log", "floor", "ceil")}
CAN = Target(
    reduces={
        "queries": ("token", "sum", "squares", "max", "min", "last", "ema", "ring"),
        "history": ("sum", "mean", "var", "std", "max", "min"),
        "slots": ("sum", "mean", "max", "min"),
        "dims": (*_OVER_DIMS, "std"),
    },
    functions=("neg", "not", "where", "max", "min", "sqrt", *_FUNCTIONS),
    operators=OPERATORS,
)
"""What there is Triton for; `ops.py` of `kvdsl/runtime/gpu` has it."""
_OVERFLOW = {"capacity": "", "trigger": "1", "slack": "0", "max_drop": "0"}


class _TritonPrinter(Printer):
    can = CAN
    strength = _STRENGTH
    spelling: ClassVar[dict[str, str]] = {"and": "&", "or": "|"}
    negation = ("-", _UNARY)
    sqrt: ClassVar[str] = "tl.sqrt"

    def as_number(self, condition: str) -> str:
        return f"tl.where({condition}, 1.0, 0.0)"

    def binary(self, expr: Binary) -> tuple[str, int]:
        if expr.op == "**" and expr.right == Number(value=2):
            return f"ops.square({self.value(expr.left)})", ATOM
        if expr.op in ("**", "%"):
            function = "ops.power" if expr.op == "**" else "ops.modulo"
            return f"{function}({self.value(expr.left)}, {self.value(expr.right)})", ATOM
        if expr.op in ("and", "or"):
            # & and | bind tighter than comparisons, so every operand that is not an atom is bracketed.
            left, right = (self._operand(side, expr) for side in (expr.left, expr.right))
            return f"{left} {self.spelling[expr.op]} {right}", _STRENGTH[expr.op]
        return super().binary(expr)

    def _operand(self, side: Expr, whole: Expr) -> str:
        alone = Axis.SLOT in axes_of(whole) and Axis.SLOT not in axes_of(side)
        return f"ops.truth({self.truth(side)})" if alone else self.truth(side, ATOM)

    def call(self, expr: Call) -> tuple[str, int]:
        if expr.function == "not":
            return f"~{self.truth(expr.args[0], ATOM)}", _UNARY
        if expr.function == "where":
            condition, yes, no = expr.args
            return f"tl.where({self.truth(condition)}, {self.value(yes)}, {self.value(no)})", ATOM
        if expr.function in ("min", "max"):
            left, right = pair(expr)
            return f"ops.{expr.function}imum({self.value(left)}, {self.value(right)})", ATOM
        function = self.sqrt if expr.function == "sqrt" else _FUNCTIONS[expr.function]
        return f"{function}({self.value(expr.args[0])})", ATOM


class CountPrinter(_TritonPrinter):
    """One double per row and KV head."""

    def leaf(self, expr: Leaf) -> str:
        if isinstance(expr, Number):
            # A literal that is an operand of a function becomes a float32 first.
            return literal(expr.value) if _is_float32(expr.value) else f"tl.full([], {expr.value!r}, tl.float64)"
        if isinstance(expr, ParamRef):
            return _number(spelled(expr.name))
        assert isinstance(expr, Input)
        return "live.to(tl.float64)" if expr.name == "live" else _number(expr.name)

    def reduce(self, expr: Reduce) -> tuple[str, int]:
        raise AssertionError("a number reduces nothing")


@dataclass(frozen=True)
class BlockPrinter(_TritonPrinter):
    """Float32 values over a block of slots, or over the dims of a new token's `k` and `v`.

    `hoisted` names the reductions over slots that stand before the loop.
    """

    hoisted: dict[Expr, str]

    sqrt = "tl.sqrt_rn"

    def binary(self, expr: Binary) -> tuple[str, int]:
        if expr.op == "/":  # correctly rounded, so that equal quotients are equal
            return f"tl.div_rn({self.value(expr.left)}, {self.value(expr.right)})", ATOM
        text, binds = super().binary(expr)
        return (f"{text}.to(tl.float32)", ATOM) if text.startswith("ops.power(") else (text, binds)

    def leaf(self, expr: Leaf) -> str:
        if isinstance(expr, Number):
            text = literal(expr.value)
            return f"{text}.0" if text.lstrip("-").isdigit() else text
        if isinstance(expr, ParamRef):
            return f"{_number(spelled(expr.name))}.to(tl.float32)"
        if isinstance(expr, Random):
            return "ops.random(random_key, pos, now)"
        if isinstance(expr, ColumnRef):
            return expr.name
        if isinstance(expr, RingRef):
            return _ring_name(expr)
        plain = {"position": "pos.to(tl.float32)", "age": "(now - pos).to(tl.float32)", "live": "live.to(tl.float32)"}
        if expr.name in ("attn", "logit", "observed", "k", "v"):
            return expr.name
        return plain.get(expr.name, f"{_number(expr.name)}.to(tl.float32)")

    def condition(self, expr: Expr) -> str:
        """A condition that can be combined with others over slots."""
        return self.truth(expr) if Axis.SLOT in axes_of(expr) else f"ops.truth({self.truth(expr)})"

    def reduce(self, expr: Reduce) -> tuple[str, int]:
        if expr.axis is Axis.SLOT:
            return self.hoisted[expr], ATOM
        mask = "e < E" if reads(expr.body, "v") else "d < D"
        if expr.op == "std":
            return f"tl.sqrt_rn(ops.var({self.value(expr.body)}, {mask}))", ATOM
        return f"{_OVER_DIMS[expr.op]}({self.value(expr.body)}, {mask})", ATOM


class DimPrinter(BlockPrinter):
    """A number per query head and dim, of the query alone: what a sketch ranks the dims by."""

    def leaf(self, expr: Leaf) -> str:
        numbers = ("budget", "prompt", "layer", "layers")
        if isinstance(expr, (Number, ParamRef)) or (isinstance(expr, Input) and expr.name in numbers):
            return super().leaf(expr)
        if expr != Input(name="q"):
            raise NotLowerable(_SKETCHED)
        return "q"

    def reduce(self, expr: Reduce) -> tuple[str, int]:
        raise NotLowerable(_SKETCHED)


_SKETCHED = "a sketch by anything but the query, dim by dim"


@dataclass(frozen=True)
class Loop:
    """One pass over the slots, in blocks: statements before it, in it and after it."""

    before: tuple[str, ...]
    body: tuple[str, ...]
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class TritonSelect:
    """Parts of the kernels `look` and `choose`, one statement a line.

    Attributes:
        by: what slots rank by: `dot`, `sketch_dot` or `page_bound` (which ranks pages).
        sketch_by: what the sketch ranks the dims by, per query head; empty if there is none.
        sketch_numbers, choose_numbers: what the search for the dims and `choose` read of the policy's numbers, as in `TritonPlan`.
            `page_number`: the place of the one that says how many tokens a page has.
        protect: what the first and last tokens are that are attended to in any case. `first`, `last`: whether there are such.
        observed: whether the policy remembers what slots were given.
    """

    by: str
    sketch_by: str
    sketch_numbers: tuple[tuple[str, int], ...]
    choose_numbers: tuple[tuple[str, int], ...]
    page_number: int
    protect: tuple[str, ...]
    first: bool
    last: bool
    observed: bool


@dataclass(frozen=True)
class TritonPlan:
    """Parts of the kernel `settle`, one statement a line.

    Attributes:
        args: names of what it is given beyond what every policy's is.
        numbers: what it reads of the policy's numbers: name and place in the table.
        columns: names of the columns that it writes or reads, and the rows of the table where they begin. `rings`: of the rings,
            the same, with the place of each among the rings instead.
        place: stores of a new token's columns. `reads_key`, `reads_value`: whether they need its key, its value.
        observe: loops that fold the query into the columns.
        settles: whether a decode step settles; then `overflow` are the arguments of the call that says how many must leave,
            `protect` what the first and last tokens are, `score` the loops that compute the rows of scores, `scores` how many
            those are, and `tops` how many slots each `keep top` protects. `hard_cap`: whether it does so before its token is
            placed, as well.
        select: None where the policy's queries attend to everything.
        compact: whether keys are turned, so that ranks and lengths are to be kept up to date.
        agrees: whether the KV heads of a layer agree on who leaves, in one more kernel.
        shares: whether they share a budget, so that some may have more slots than others.
        blocks: whether keys and values lie in blocks, found through tables.
        halves: whether the keys' rotated halves are kept beside them.
    """

    args: tuple[str, ...]
    numbers: tuple[tuple[str, int], ...]
    columns: tuple[tuple[str, int], ...]
    rings: tuple[tuple[str, int], ...]
    place: tuple[str, ...]
    reads_key: bool
    reads_value: bool
    observe: tuple[Loop, ...]
    settles: bool
    hard_cap: bool
    overflow: str
    protect: tuple[str, ...]
    score: tuple[Loop, ...]
    scores: int
    tops: tuple[str, ...]
    select: TritonSelect | None
    compact: bool
    agrees: bool
    shares: bool
    blocks: bool
    halves: bool

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn."""
        return "seed" in self.args


def triton_plan(policy: Policy, numbers: tuple[str, ...]) -> TritonPlan:
    """The Triton of a decode step, for a policy whose state columns are known. Prompts are torch's.

    Args:
        numbers: names of the numbers in the table, in order.

    Raises:
        NotLowerable: if it has no Triton form; the torch backend serves such a policy.
    """
    _refuse_statements(policy)
    policy = in_parts(policy, CAN.knows)
    CAN.check_columns(policy.columns)
    settles = policy.budget is not None and policy.when != "prefill"
    folded = [column for column in policy.columns if column.rule != "token"]
    observe = _observe(policy, folded)
    protect, score = _settle(policy) if settles else ((), ())
    place = tuple(_place(column) for column in policy.columns if column.rule != "ring")
    overflow = _overflow(numbers) if settles else ""
    tops = tuple(_count(keep) for keep in policy.keeps if keep.scope == "top") if settles else ()
    select = _select(policy, numbers)
    text = "\n".join([*place, *_lines(observe), *protect, *_lines(score), overflow, *tops])
    used = _numbers_in(text if policy.pages is None else f"{text} {_number('page')}", numbers)
    singles = [column.name for column in policy.columns if column.rule != "ring"]
    rings = [column.name for column in policy.columns if column.rule == "ring"]
    args = {
        "columns": bool(policy.columns),
        "numbers": bool(used) or policy.sketch is not None,
        "logits": "ops.attn(" in text or "ops.logit(" in text,
        "ring_rows": bool(rings),
        "window": "window" in text,
        "seed": "random_key" in text,
        "work": settles,
    }
    return TritonPlan(
        args=tuple(name for name, wanted in args.items() if wanted),
        numbers=used,
        columns=tuple((name, n) for n, name in enumerate(singles)),
        rings=tuple((name, n) for n, name in enumerate(rings)),
        place=place,
        reads_key=any(reads(column.body, "k") for column in policy.columns if column.rule == "token"),
        reads_value=any(reads(column.body, "v") for column in policy.columns if column.rule == "token"),
        observe=observe,
        settles=settles,
        hard_cap=settles and policy.cap == "hard",
        overflow=overflow,
        protect=protect,
        score=score,
        scores=1 + len(tops),
        tops=tops,
        select=select,
        compact=policy.positions == "compact",
        shares=policy.across is not None,
        blocks=policy.storage == "blocks",
        halves=policy.rope == "cached",
        agrees=settles and policy.victims == "heads",
    )


def _refuse_statements(policy: Policy) -> None:
    """The statements that the kernels do not know: a launch sees one layer."""
    refused = {
        "`pages` of what eviction leaves": policy.pages is not None and policy.budget is not None,
        "`victims shared by layers`": policy.victims == "layers",
    }
    found = [statement for statement, stated in refused.items() if stated]
    if found:
        raise NotLowerable(", ".join(found))


def _lines(loops: Iterable[Loop]) -> Iterator[str]:
    for loop in loops:
        yield from (*loop.before, *loop.body, *loop.after)


def _numbers_in(text: str, numbers: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((name, n) for n, name in enumerate(numbers) if _mentions(text, _number(name)))


def _mentions(text: str, name: str) -> bool:
    return any(word == name for word in _words(text))


def _words(text: str) -> list[str]:
    return "".join(char if char.isalnum() or char == "_" else " " for char in text).split()


def _number(name: str) -> str:
    return f"number_{name}"


# -- the new token -----------------------------------------------------------------------------------------------------


def _place(column: Column) -> str:
    value = BlockPrinter({}).value(column.body) if column.rule == "token" else _INITIAL.get(column.rule, "0.0")
    return f"tl.store({column.name}_at + slot, {value})"


# -- observing ---------------------------------------------------------------------------------------------------------


def _observe(policy: Policy, folded: list[Column]) -> tuple[Loop, ...]:
    if not folded:
        return ()
    bodies = [column.body for column in folded]
    loops, hoisted = _hoist(policy, "visible", bodies)
    printer = BlockPrinter(hoisted)
    lines = [_fold(column, printer) for column in folded]
    old = [ColumnRef(name=column.name) for column in folded if column.rule not in ("ring", "last")]
    return (*loops, Loop((), (*_values(policy, "visible", [*bodies, *old]), *lines)))


def _fold(column: Column, printer: BlockPrinter) -> str:
    old, row, body = column.name, f"{column.name}_at", printer.value(column.body)
    if column.rule == "ring":
        row = f"ops.ring_row({row}, column_stride, {_ring_size(old)}, now)"
        new = body
    elif column.decay is not None:
        new = f"ops.ema({old}, {body}, {printer.value(column.decay)}, now - pos)"
    elif column.rule == "sum":
        new = f"{old} + {printer.value(column.body, _STRENGTH['+'] + 1)}"
    elif column.rule == "squares":
        new = f"{old} + ops.square({body})"
    else:
        new = {"last": body, "max": f"ops.maximum({old}, {body})", "min": f"ops.minimum({old}, {body})"}[column.rule]
    return f"tl.store({row} + i, {new}, mask=visible)"


def _values(policy: Policy, slots: str, exprs: Iterable[Expr]) -> list[str]:
    """Statements that give a block's values the names that the expressions read. `slots`: which count, by name."""
    nodes = [node for expr in exprs for node in walk(expr)]
    inputs = {node.name for node in nodes if isinstance(node, Input)}
    if inputs & {"q", "k", "v"}:
        raise NotLowerable("a value of every slot that is computed from keys, values or queries")
    given = {
        "attn": _attn(policy),
        "logit": f'ops.logit(logits, i, slots, G, G_PAD, "{policy.group}")',
        "observed": "ops.observed(pos, now, window)",
    }
    columns = dict.fromkeys(node.name for node in nodes if isinstance(node, ColumnRef))
    rings = dict.fromkeys(node for node in nodes if isinstance(node, RingRef))
    return [
        *([_SLOTS[slots]] if slots in _SLOTS else []),
        *(f"{name} = {value}" for name, value in given.items() if name in inputs),
        *(f"{name} = tl.load({name}_at + i, mask=inside, other=0.0)" for name in columns),
        *map(_ring_value, rings),
    ]


def _attn(policy: Policy) -> str:
    attn = f'ops.attn(logits, lse, i, slots, G, G_PAD, "{policy.group}")'
    return attn if policy.select is None else f"ops.attended({attn}, taken, i, inside, SELECTS)"


def _ring_value(ref: RingRef) -> str:
    given = f"{ref.name}_at, column_stride, {_ring_size(ref.name)}, i, pos, now, window"
    return f"{_ring_name(ref)} = ops.ring_{ref.op}({given})"


def _ring_name(ref: RingRef) -> str:
    return f"{ref.op}_of_{ref.name}"


def _ring_size(ring: str) -> str:
    return f"ops.count({_number(size_of(ring))})"


def _hoist(policy: Policy, slots: str, exprs: list[Expr]) -> tuple[list[Loop], dict[Expr, str]]:
    """Loops that compute every reduction over slots, inner ones first, and the names these get."""
    loops: list[Loop] = []
    names: dict[Expr, str] = {}

    def visit(expr: Expr) -> None:
        if isinstance(expr, Reduce) and expr.axis is Axis.DIM:
            raise NotLowerable("a value of every slot that is computed from keys, values or queries")
        for child in children(expr):
            visit(child)
        if isinstance(expr, Reduce) and expr not in names:
            CAN.check(expr)
            name = f"{expr.op}_over_slots_{len(names) + 1}"
            given = _values(policy, slots, [expr.body])
            loops.extend(_reduction(name, expr.op, BlockPrinter(dict(names)).value(expr.body), slots, given))
            names[expr] = name

    for expr in exprs:
        visit(expr)
    return loops, names


def _reduction(name: str, op: str, body: str, slots: str, given: list[str]) -> Iterator[Loop]:
    """The loops of one reduction over slots."""
    if op in ("max", "min"):
        fold = f"{name} = ops.{op}imum({name}, ops.{'largest' if op == 'max' else 'least'}({body}, {slots}))"
        yield Loop((f"{name} = {_INITIAL[op]}",), (*given, fold))
        return
    if op == "sum":
        yield Loop((f"{name} = 0.0",), (*given, f"{name} += ops.total({body}, {slots})"))
        return
    assert op == "mean", op
    counted = f"{name}_count += tl.sum({slots}.to(tl.float32), 0)"
    yield Loop(
        (f"{name}, {name}_count = 0.0, 0.0",),
        (*given, f"{name} += ops.total({body}, {slots})", counted),
        (f"{name} = tl.div_rn({name}, {name}_count)",),
    )


# -- selecting ---------------------------------------------------------------------------------------------------------


def _select(policy: Policy, numbers: tuple[str, ...]) -> TritonSelect | None:
    if policy.select is None:
        return None
    by = form_of_ranks(policy.select.by)
    if by == "expression":
        raise NotLowerable(
            "`select` by anything but dot(q, k), dot(q, k over sketch) and what the keys of a page could give at most"
        )
    if policy.pages is not None and by != "page_bound":
        raise NotLowerable("`pages` that rank by their tokens")
    protect = _protect(policy)
    sketch_by = "" if policy.sketch is None else _sketch_by(policy, policy.sketch.by)
    sketch_text = f"{sketch_by} {_number('sketch_every')} {_number('sketch_dims')}"
    choose_text = " ".join([*protect.values(), _number("select"), _number("page")])
    return TritonSelect(
        by=by,
        sketch_by=sketch_by,
        sketch_numbers=_numbers_in(sketch_text, numbers),
        choose_numbers=_numbers_in(choose_text, numbers),
        page_number=numbers.index("page") if policy.pages is not None else 0,
        protect=tuple(protect.values()),
        first="first" in protect,
        last="last" in protect,
        observed=any(reads(column.body, "attn") for column in policy.columns),
    )


def _sketch_by(policy: Policy, by: Expr) -> str:
    if not reads(by, "q"):
        raise NotLowerable(_SKETCHED)
    return f'ops.over_group({DimPrinter({}).value(by)}, g, G, "{policy.group}")'


# -- settling ----------------------------------------------------------------------------------------------------------


def _settle(policy: Policy) -> tuple[tuple[str, ...], tuple[Loop, ...]]:
    """What is protected by position, and the loops that leave every slot's scores in `work` and what protects it in `kept`."""
    assert policy.score is not None
    ranked = [policy.score, *(keep.by for keep in policy.keeps if keep.scope == "top" and keep.by is not None)]
    conditions = [keep.by for keep in policy.keeps if keep.scope == "where" and keep.by is not None]
    loops, hoisted = _hoist(policy, "cached", [*ranked, *conditions])
    printer = BlockPrinter(hoisted)
    protect = _protect(policy)
    kept = [f"pos {compare} {scope}" for scope, compare in (("first", "<="), ("last", ">=")) if scope in protect]
    kept += [printer.condition(condition) for condition in conditions]
    if len(kept) > 1:
        kept = [f"({condition})" for condition in kept]
    stores = [f"tl.store(work + {_row(n)}i, {printer.value(expr)}, mask=inside)" for n, expr in enumerate(ranked)]
    stores.append(f"tl.store(kept + i, {' | '.join(kept) or '0'}, mask=inside)")
    return tuple(protect.values()), (*loops, Loop((), (*_values(policy, "", [*ranked, *conditions]), *stores)))


def _protect(policy: Policy) -> dict[str, str]:
    """By `first` and `last`, as far as the policy keeps such: up to and from which position."""
    found = {}
    for scope, together in (("first", "tl.maximum"), ("last", "tl.minimum")):
        counts = [_count(keep) for keep in policy.keeps if keep.scope == scope]
        if counts:
            ends = [f"evicting.{scope}_protected(position, slots, now, live, {count}, BLOCK)" for count in counts]
            found[scope] = f"{scope} = {_nested(together, ends)}"
    return found


def _row(n: int) -> str:
    return {0: "", 1: "slots + "}.get(n, f"{n} * slots + ")


def _nested(function: str, values: list[str]) -> str:
    first, *rest = values
    return f"{function}({first}, {_nested(function, rest)})" if rest else first


def _count(keep: Keep) -> str:
    assert keep.count is not None
    if isinstance(keep.count, Number):
        return str(max(0, min(int(keep.count.value // 1), _INT_MAX)))
    return f"ops.count({CountPrinter()(keep.count)})"


def _overflow(numbers: tuple[str, ...]) -> str:
    return ", ".join(f"ops.count({_number(name)})" if name in numbers else default for name, default in _OVERFLOW.items())


def _is_float32(value: float) -> bool:
    try:
        return bool(struct.unpack("f", struct.pack("f", value))[0] == value)
    except OverflowError:
        return False
