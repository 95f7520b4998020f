"""What a prompt's queries give the slots, as Triton: the kernels `observe` and `over_slots` of a generated `kernels_triton.py`.

A program of `observe` has a block of slots, which blocks of queries pass: a value is a tile of [slots, queries], and what does not vary
over one of these has size 1 there. So expressions read as they do in `settle`, where there is one query. A reduction over
slots needs all of a query's, which no program of `observe` has: `over_slots`, launched before, finds these, one number a query.
`kvdsl/runtime/gpu/observing.py` has what the text calls, and says why the order of queries does not matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvdsl.ir.nodes import Axis, Column, Expr, Policy, Reduce
from kvdsl.ir.visitors import children
from kvdsl.lower.spelling import size_of
from kvdsl.lower.triton import CAN, BlockPrinter, CountPrinter, Loop
from kvdsl.passes.parts import in_parts

_OVER_SLOTS = {"sum": "ops.total", "mean": "ops.total", "max": "ops.largest", "min": "ops.least"}
_COUNT = Loop(("count = tl.zeros([QUERIES], tl.float32)",), ("count += tl.sum(visible.to(tl.float32), 0)",))
"""How many slots each query sees: in a pass of its own, which reads positions only."""

_LIVE = "live = tl.load(live_slots + t, mask=asked, other=0)[None, :]"


@dataclass(frozen=True)
class PromptKernel:
    """Parts of one of the kernels, one statement a line.

    Attributes:
        args: names of what it is given beyond what every policy's is.
        numbers: what it reads of the policy's numbers: name and place in the table.
        columns: names of the columns that it writes or reads, and the rows of the table where they begin. `rings`: of the rings,
            the same, with the place of each among the rings instead.
        loops: passes of the queries over a block of slots, or of the slots past a block of queries.
    """

    args: tuple[str, ...]
    numbers: tuple[tuple[str, int], ...]
    columns: tuple[tuple[str, int], ...]
    rings: tuple[tuple[str, int], ...]
    loops: tuple[Loop, ...]


@dataclass(frozen=True)
class TritonPromptPlan:
    """The kernels that observe a prompt.

    Attributes:
        over_slots: None where nothing is reduced over slots. `reductions`: the names of what it finds.
    """

    observe: PromptKernel
    over_slots: PromptKernel | None
    reductions: tuple[str, ...]


def triton_prompt_plan(policy: Policy, numbers: tuple[str, ...]) -> TritonPromptPlan | None:
    """The Triton of a prompt, for a policy that `triton_plan` takes; None if it observes nothing.

    Args:
        numbers: names of the numbers in the table, in order.
    """
    policy = in_parts(policy, CAN.knows)
    folded = [column for column in policy.columns if column.rule != "token"]
    if not folded:
        return None
    loops, hoisted = _over_slots(policy, [column.body for column in folded])
    over_slots = _kernel(policy, numbers, loops, []) if loops else None
    names = tuple(hoisted.values())
    return TritonPromptPlan(_kernel(policy, numbers, [_observe(policy, folded, hoisted)], folded), over_slots, names)


def _kernel(policy: Policy, numbers: tuple[str, ...], loops: list[Loop], written: list[Column]) -> PromptKernel:
    text = "\n".join(line for loop in loops for line in (*loop.before, *loop.body, *loop.after))
    touched = [column for column in policy.columns if column in written or _mentions(text, f"{column.name}_at")]
    singles = [column.name for column in policy.columns if column.rule != "ring"]
    rings = [column.name for column in policy.columns if column.rule == "ring"]
    used = tuple((name, n) for n, name in enumerate(numbers) if _mentions(text, f"number_{name}"))
    args = {
        "lse": "ATTN=True" in text,
        "columns": bool(touched),
        "ring_rows": any(column.rule == "ring" for column in touched),
        "numbers": bool(used),
        "live_slots": _mentions(text, "live_slots"),
    }
    names = {column.name for column in touched}
    return PromptKernel(
        args=tuple(name for name, wanted in args.items() if wanted),
        numbers=used,
        columns=tuple((name, n) for n, name in enumerate(singles) if name in names),
        rings=tuple((name, n) for n, name in enumerate(rings) if name in names),
        loops=tuple(loops),
    )


def _mentions(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None


# -- a block of slots, and the queries that see them -------------------------------------------------------------------


def _observe(policy: Policy, folded: list[Column], hoisted: dict[Expr, str]) -> Loop:
    printer = BlockPrinter(hoisted)
    found = [
        f"{name} = tl.load(reduced + {_row(n)}t, mask=asked, other=0.0)[None, :]" for n, name in enumerate(hoisted.values())
    ]
    before, body, after = zip(*(_fold(column, printer) for column in folded), strict=True)
    text = "\n".join(body)
    return Loop(
        before=(*_of_tokens(policy, text), *filter(None, before)),
        body=(*_given(policy, text), *found, *body),
        after=tuple(filter(None, after)),
    )


def _fold(column: Column, printer: BlockPrinter) -> tuple[str, str, str]:
    """What a column holds before the first query, what a tile does to it, and how that joins what is stored."""
    name, body = column.name, printer.value(column.body)
    old = f"tl.load({name}_at + i, mask=seen, other=0.0)"
    if column.rule == "ring":
        size = f"ops.count(number_{size_of(name)})"
        place = f"ops.ring_row({name}_at + i, column_stride, {size}, now)"
        return "", f"tl.store({place}, {body}, mask=visible & (now >= end - {size}))", ""
    begin, tile, joined = (
        "tl.zeros([SLOTS, 1], tl.float32)",
        f"{name} += observing.total({body}, visible)",
        f"{old} + {name}",
    )
    if column.decay is not None:
        decay = CountPrinter()(column.decay)
        weighted = f"observing.remaining(now, pos, until, {decay}) * ({body})"
        tile = f"{name} += observing.total({weighted}, visible)"
        joined = f"observing.averaged({old}, {name}, pos, since, until, {decay})"
    elif column.rule == "squares":
        tile = f"{name} += observing.total(ops.square({body}), visible)"
    elif column.rule == "last":
        tile, joined = f"{name} += observing.total({body}, visible & (now == until))", name
    elif column.rule in ("max", "min"):
        sign, function = ("-", "largest") if column.rule == "max" else ("", "least")
        begin = f'tl.full([SLOTS, 1], float("{sign}inf"), tl.float32)'
        tile = f"{name} = ops.{column.rule}imum({name}, observing.{function}({body}, visible))"
        joined = f"ops.{column.rule}imum({old}, {name})"
    return f"{name} = {begin}", tile, f"tl.store({name}_at + i, {joined}, mask=seen)"


def _row(n: int) -> str:
    return {0: "", 1: "reduced_stride + "}.get(n, f"{n} * reduced_stride + ")


def _given(policy: Policy, text: str) -> Iterator[str]:
    """Statements that give a tile's values the names that expressions read."""
    attn, logit = _mentions(text, "attn"), _mentions(text, "logit")
    if attn or logit:
        yield (
            f"attn, logit = observing.given(query, {'lse' if attn else 'query'}, k, t, asked, tokens, scaling, softcap, "
            f'query_head, query_token, ATTN={attn}, LOGIT={logit}, HOW="{policy.group}", G=G, D=D, CAPPED=CAPPED)'
        )
    if _mentions(text, "observed"):
        yield "observed = ops.observed(pos, now, window)"
    if _mentions(text, "live"):
        yield _LIVE


def _of_tokens(policy: Policy, text: str) -> Iterator[str]:
    """Statements that load what tokens have by themselves."""
    for column in policy.columns:
        if column.rule == "token" and _mentions(text, column.name):
            yield f"{column.name} = tl.load({column.name}_at + i, mask=inside, other=0.0)"


# -- a block of queries, and the slots that they see -------------------------------------------------------------------


def _over_slots(policy: Policy, exprs: Iterable[Expr]) -> tuple[list[Loop], dict[Expr, str]]:
    """Loops that compute every reduction over slots, inner ones first, and the names these get."""
    loops: list[Loop] = []
    names: dict[Expr, str] = {}

    def visit(expr: Expr) -> None:
        for child in children(expr):
            visit(child)
        if isinstance(expr, Reduce) and expr.axis is Axis.SLOT and expr not in names:
            CAN.check(expr)
            name = f"{expr.op}_over_slots_{len(names) + 1}"
            body = BlockPrinter(dict(names)).value(expr.body)
            given = (*_of_tokens(policy, body), *_given(policy, body))
            loops.extend(_reduction(name, expr.op, body, given))
            names[expr] = name

    for expr in exprs:
        visit(expr)
    if any(_mentions(line, "count") for loop in loops for line in loop.after):
        loops.insert(0, _COUNT)
    return loops, names


def _reduction(name: str, op: str, body: str, given: tuple[str, ...]) -> Iterator[Loop]:
    """The loops of one reduction over slots, [1, QUERIES] in the end."""
    nothing = f"{name} = tl.zeros([QUERIES], tl.float32)"
    if op in ("max", "min"):
        least = f'{name} = tl.full([QUERIES], float("{"-" if op == "max" else ""}inf"), tl.float32)'
        fold = f"{name} = ops.{op}imum({name}, {_OVER_SLOTS[op]}({body}, visible))"
        yield Loop((least,), (*given, fold), (f"{name} = {name}[None, :]",))
        return
    fold = f"{name} += ops.total({body}, visible)"
    if op == "sum":
        yield Loop((nothing,), (*given, fold), (f"{name} = {name}[None, :]",))
        return
    assert op == "mean", op
    yield Loop((nothing,), (*given, fold), (f"{name} = tl.div_rn({name}, count)[None, :]",))
