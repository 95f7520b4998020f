"""Lower a policy's decode step to Triton.

The plan holds the functions of a generated `kernels_triton.py`, which the kernels of `kvdsl/runtime/gpu/kernels` call. Their statements
call device functions of `ops.py`, `evicting.py` and `select.py` in `kvdsl/runtime/gpu`. `triton_loops.py` prints loops over slots,
`triton_expressions.py` expressions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from kvdsl.ir.nodes import Column, ColumnRef, Expr, Input
from kvdsl.ir.ops import ENDS
from kvdsl.ir.visitors import mapped, reads
from kvdsl.lower.expression import Fragment, NotLowerable, Use, fragment, names_of, spelled, texts, uses_of, whole
from kvdsl.lower.step import START, Eviction, Protection, Step, for_target
from kvdsl.lower.triton_expressions import (
    CAN,
    SKETCHED,
    STRENGTH,
    BlockPrinter,
    CountPrinter,
    DimPrinter,
    Pass,
    TokenPrinter,
    column_rows,
    number,
    numbers_in,
    ring_size,
    tensors_in,
)
from kvdsl.lower.triton_hooks import Hook, Tables, indented, load_supplied, load_vectors, over_slots
from kvdsl.lower.triton_loops import BARRIER, EXTREMES, PAGE, hoisted_loops, load_column, row_at, values_of
from kvdsl.lower.triton_prompt import TritonPromptPlan, triton_prompt_plan
from kvdsl.passes.normal import compared

_MODULES = ("evicting", "layout", "neighbours", "observing", "ops", "packed", "select")
_LOWER = "lowest, where, certain = evicting.lower(lowest, where, certain, i, pos, score, keep, first, last)"
_KEEP = Fragment("keep = tl.load(kept + i, mask=inside, other=0)")
_KEPT = Fragment("    tl.store(kept + i, keep, mask=inside)")


@dataclass(frozen=True)
class _Select:
    """What the kernels `look`, `vote` and `choose` depend on.

    Attributes:
        by: the score: `dot` or `sketch_dot` of slots, `page_bound` or `page_mean` of pages. vote: the reduction of scores over the KV
            heads of a layer; empty if each KV head selects by its own scores.
        sketch_by: the score of the sketch's dims, per query head; None without a sketch.
        protects: whether first or last tokens are always selected.
        observed: whether a column reads the attention that slots received.
        uses: what counts of tokens need.
    """

    by: str
    vote: str
    sketch_by: Fragment | None
    protects: bool
    observed: bool
    uses: tuple[Use, ...]

    @property
    def paged(self) -> bool:
        """Whether the query selects pages."""
        return self.by in ("page_bound", "page_mean")


@dataclass(frozen=True)
class _Settle:
    """Parts of the functions that rank slots and evict.

    Attributes:
        overflow: what determines the number of victims. counts: numbers of protected first and last tokens. tops: number of slots that
            each `keep top` protects. ends: the class of the first and last tokens, see `evicting`.
        score: loops that compute the scores. rows: number of rows of `work`, temporary ones included.
        vectors: tensors of files, with a number per dim, that the loops read. reads_vectors: whether the loops read such tensors, keys or
            values.
        pools: whether a score pools; the kernels then find the protected ends before they score.
        hard_cap: whether `make_room` evicts before the step places a token.
        prompts: whether `settle_prompt` evicts after a prompt: each KV head evicts by itself, and its columns suffice.
        agrees: whether `agree` evicts the same slots from all KV heads of a layer.
    """

    overflow: Fragment
    counts: list[Fragment]
    tops: list[Fragment]
    ends: int
    score: list[Pass]
    rows: int
    vectors: tuple[tuple[str, int], ...]
    reads_vectors: bool
    pools: bool
    hard_cap: bool
    prompts: bool
    agrees: bool

    @property
    def uses(self) -> tuple[Use, ...]:
        """What all of it needs."""
        return uses_of(*self.counts, self.overflow, *self.tops, Fragment("", uses=_uses(self.score)))


@dataclass(frozen=True)
class TritonPlan:
    """A generated `kernels_triton.py`.

    Attributes:
        kernels: names of the kernels that serve the policy. constants: their constants that depend on the policy, name and value.
            SPREADS: several programs share a KV head's slots: there are loops over slots, and none depends on another one's results.
            LAZY: the programs store scores only where no single victim is known. MERGES: one loop folds the query into the columns and
            ranks.
            SLIDES: the oldest tokens leave first, so that only keys of protected first tokens are rotated.
        hooks: the policy's functions.
    """

    kernels: tuple[str, ...]
    constants: tuple[tuple[str, str], ...]
    hooks: tuple[Hook, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of `kvdsl.runtime.gpu` that the functions call."""
        text = "\n".join(line for hook in self.hooks for line in hook.body)
        return tuple(name for name in _MODULES if re.search(rf"\b{name}\.", text))


def triton_plan(step: Step) -> TritonPlan:
    """Lower a decode step to Triton. `prompt` and `settle_prompt` serve a prompt's queries and evictions; torch serves its rest.

    Raises:
        NotLowerable: if the step has no Triton form; the torch backend serves such a policy.
    """
    step = for_target(_compared(step), CAN, _refused(step))
    observe = [] if step.forgets else _observe(step)  # then only prompts observe
    settle = _settle(step, step.evict) if step.evict is not None and step.evict.decodes else None
    place = [_place(column) for column in step.columns if column.rule != "ring"]
    select, prompt = _select(step), triton_prompt_plan(step)
    prompts = prompt.uses if prompt else ()
    uses = uses_of(*place, Fragment("", uses=(*_uses(observe), *(settle.uses if settle else ()))))
    every = uses_of(Fragment("", uses=(*uses, *prompts, *(select.uses if select else ()))))
    columns, rings = column_rows(step)
    tables = Tables(
        numbers=len(step.numbers),
        row="own_pair" if step.heads_differ else "own_row",
        own=numbers_in(every, step.numbers),
        constants=tensors_in(every, "constant", step),
        columns=columns,
        rings=rings,
    )
    loops = [*observe, *(settle.score if settle else ())]
    spreads = bool(loops) and len(observe) <= 1 and len(loops) - len(observe) <= 1
    lazy = spreads and settle is not None and not settle.agrees and not any(one.columns for one in step.rank)
    merged = _merged(step, observe[0], settle.score[0]) if lazy and settle is not None and observe else None
    logits = bool({"attn", "logit"} & {*names_of(uses, "input")})
    constants = {
        "SPREADS": spreads,
        "LOGITS": logits,
        "SLIDES": step.compact
        and not (logits or step.protect.overprotects)
        and step.evict is not None
        and step.evict.score == Input(name="position"),
        "OBSERVES": bool(observe),
        "MERGES": merged is not None,
        "LAZY": lazy,
        "DRAWS": "random_key" in names_of(every, "helper"),
        "COUNTS": "live" in names_of(prompts, "input"),
        "REDUCTIONS": len(prompt.reductions) if prompt else 0,
        **_constants(step, settle, select),
    }
    return TritonPlan(
        kernels=tuple(_kernels(settle, select, prompt, at_once=spreads and select is None and _at_once(loops, settle))),
        constants=tuple((name, repr(value)) for name, value in constants.items()),
        hooks=(
            *tables.hooks(),
            *_placing(step, place, tables),
            *([tables.hook("update", _lines(observe))] if observe and merged is None else []),
            *(_protecting(step.protect, tables) if settle or (select and select.protects) else ()),
            *(_settling(settle, step, tables, settle.score if merged is None else [merged]) if settle else ()),
            *(_selecting(select, step, tables) if select else ()),
            *(_observing(prompt, tables) if prompt else ()),
        ),
    )


def _at_once(loops: list[Pass], settle: _Settle | None) -> bool:
    """Return whether the programs of `attend` can settle their own slots: nothing reads other slots, keys or values, and only the loop that
    folds the query reads its logits.
    """
    alone = settle is None or not (
        settle.agrees or settle.pools or {"attn", "logit"} & {*names_of(_uses(settle.score), "input")}
    )
    return alone and not any(one.reads or one.inner for one in loops)


def _kernels(
    settle: _Settle | None, select: _Select | None, prompt: TritonPromptPlan | None, *, at_once: bool
) -> Iterator[str]:
    """Yield the names of the policy's kernels, in the order of their launches."""
    wanted = {
        "make_room": settle is not None and settle.hard_cap,
        "look": select is not None,
        "vote": select is not None and bool(select.vote),
        "choose": select is not None,
        "settle": True,
        "at_once": at_once,
        "agree": settle is not None and settle.agrees,
        "over_slots": prompt is not None and bool(prompt.over_slots),
        "observe": prompt is not None,
        "settle_prompt": settle is not None and settle.prompts,
    }
    return (name for name, needed in wanted.items() if needed)


def _constants(step: Step, settle: _Settle | None, select: _Select | None) -> dict[str, object]:
    """Return the kernels' constants that depend on what the policy selects and evicts."""
    return {
        "COMPACT": step.compact,
        "SKETCHES": step.sketch is not None,
        "BOUNDS": select is not None and select.by == "page_bound",
        "BY": select.by if select else "",
        "GROUP": step.group,
        "VOTE": select.vote if select else "",
        "PROTECTS": select is not None and select.protects,
        "OBSERVED": select is not None and select.observed,
        "SHARES": _shares(step),
        "AGREES": settle is not None and settle.agrees,
        "POOLS": settle is not None and settle.pools,
        "SCORES": settle.rows if settle else 0,
        "TOPS": len(settle.tops) if settle else 0,
        "ENDS": settle.ends if settle else 0,
    }


def _shares(step: Step) -> bool:
    """Return whether KV heads share a budget, or have budgets of their own, so that their numbers of slots differ."""
    return step.heads_differ or (step.evict is not None and step.evict.heads_share)


def _lines(passes: Iterable[Pass], begin: str = "begin", end: str = "end") -> Iterator[str]:
    return (line for one in passes for line in over_slots(one.printed(), begin, end))


def _placing(step: Step, place: list[Fragment], tables: Tables) -> Iterator[Hook]:
    """Yield the function that stores a new token's columns."""
    uses = uses_of(*place)
    given = tuple((spelled(one.name), n) for n, one in enumerate(step.given) if one.name in names_of(uses, "given"))
    vectors = [
        f"{name} = {vector}.to(tl.float64)"
        for name, vector in (("k", "key"), ("v", "value"))
        if name in names_of(uses, "input")
    ]
    lines = [*vectors, *load_vectors(tensors_in(uses, "vector", step)), *load_supplied(given), *texts(place)]
    if lines:
        yield tables.hook("place", lines)


def _protecting(protect: Protection, tables: Tables) -> Iterator[Hook]:
    """Yield the function that counts protected first and last tokens."""
    first, last = _ends_counts(protect)
    yield tables.hook("ends", [f"return {first}, {last}"])


def _settling(settle: _Settle, step: Step, tables: Tables, score: list[Pass]) -> Iterator[Hook]:
    """Yield the functions that count victims and rank. `score`: the loops that rank."""
    yield tables.hook("overflow", [f"return {settle.overflow}"])
    if settle.tops:
        yield tables.hook("tops", [f"return {', '.join(texts(settle.tops))}{',' * (len(settle.tops) == 1)}"])
    reads = [
        "d, e = tl.arange(0, D_PAD), tl.arange(0, E_PAD)",
        "own_table = table",
        "if SIZE > 0:",
        "    own_table = layout.table_of(table, own_row, slots, SIZE)",
        *load_vectors(settle.vectors),
        f"first_row = layout.first_row(first_rows, own_pair, slots, {'True' if _shares(step) else 'SIZE > 0'})",
    ]
    yield tables.hook(
        "rank_slots",
        [
            *(reads if settle.reads_vectors else []),
            "lowest, where = tl.full([BLOCK], ops.ABOVE_ALL, tl.int64), tl.full([BLOCK], -1, tl.int32)",
            "certain = tl.zeros([BLOCK], tl.int32)",
            *_lines(score),
            "return lowest, where, certain",
        ],
    )


def _observing(prompt: TritonPromptPlan, tables: Tables) -> Iterator[Hook]:
    """Yield the functions that observe a prompt."""
    if prompt.over_slots:
        yield tables.hook("reduce_queries", prompt.reduce_queries())
    yield tables.hook("fold_queries", prompt.fold_queries())


def _selecting(select: _Select, step: Step, tables: Tables) -> Iterator[Hook]:
    """Yield the functions of a selection."""
    if select.paged:
        yield Hook("page_size", (f"return ops.count({tables.number(step.numbers.index('page'))})",))
    yield tables.hook("selected", [f"return {fragment('ops.count({})', number('select'))}"])
    if select.sketch_by is not None:
        q = "tl.load(query + g[:, None] * D + d[None, :], mask=(g[:, None] < G) & (d[None, :] < D), other=0.0)"
        used = numbers_in(uses_of(select.sketch_by, number("sketch_every"), number("sketch_dims")), step.numbers)
        again = (
            "g, d = tl.arange(0, G_PAD), tl.arange(0, D_PAD)",
            f"q = {q}.to(tl.float32)",
            f"by = {select.sketch_by}",
            "dims = select.highest_dims(by, d, ops.count(number_sketch_dims), width, D, D_PAD, W_PAD)",
        )
        yield Hook(
            "find_sketch",
            (
                *(f"number_{name} = {tables.number(n)}" for name, n in used),
                "j = tl.arange(0, W_PAD)",
                "dims = tl.load(sketch + own_pair * width + j, mask=j < width, other=-1)",
                "due = select.is_due(prompt, own_row, now, ops.count(number_sketch_every))",
                "if due:",
                *indented(again),
                "return dims, due",
            ),
        )


def _compared(step: Step) -> Step:
    """Replace ranks and pages by comparisons with other slots, in scores and protections."""

    def rule(expr: Expr) -> Expr:
        return compared(expr, ColumnRef(name=PAGE))

    evict = None if step.evict is None else mapped(step.evict, rule)
    return step.model_copy(update={"evict": evict, "protect": mapped(step.protect, rule)})


def _uses(passes: Iterable[Pass]) -> tuple[Use, ...]:
    return uses_of(*(Fragment("", uses=one.uses) for one in passes))


def _refused(step: Step) -> dict[str, bool]:
    """Return whether the step has each statement that kernels cannot serve: a launch sees one layer, and a program one KV head."""
    evict, select = step.evict, step.select
    return {
        "a count of `select` that reads what is cached": select is not None and select.count is not None,
        "`weight` on what is attended to": select is not None and select.weight is not None,
        "`select` by `pages` of what eviction leaves": select is not None and select.paged and evict is not None,
        "`select` by `pages` that do not begin with the text": select is not None and step.pages_after,
        "`select ... from layers`: a kernel hands its choice to no other layer": select is not None and select.reuses,
        "`victims shared by layers`": evict is not None and evict.by == "layers",
        "`group each`: a kernel chooses once for the query heads of a KV head": step.group == "each",
    }


# -- the new token -----------------------------------------------------------------------------------------------------


def _place(column: Column) -> Fragment:
    start = BlockPrinter({}).number(START.get(column.rule, 0.0))
    value = TokenPrinter().value(column.body) if column.rule == "token" else start
    return fragment(f"tl.store({column.name}_at + slot, {{}})", value)


# -- observing ---------------------------------------------------------------------------------------------------------


def _observe(step: Step) -> list[Pass]:
    folded = step.observe
    if not folded:
        return []
    loops, names = hoisted_loops(step, "visible", [column.body for column in folded])
    lines = _folds(folded, BlockPrinter(names))
    return [*loops, Pass((), (*values_of(step, "visible", uses_of(*lines)), *lines))]


def _folds(folded: Sequence[Column], printer: BlockPrinter) -> list[Fragment]:
    """Print the statements that fold the query into columns. They read each other's values from before it, so stores come last."""
    stores = [
        f"tl.store({column.name}_at + i, new_{column.name}, mask=visible)" for column in folded if column.rule != "ring"
    ]
    return [*(_fold(column, printer) for column in folded), *map(Fragment, stores)]


def _fold(column: Column, printer: BlockPrinter) -> Fragment:
    name, body = column.name, printer.value(column.body)
    old = Fragment(name, uses=(Use("column", name),))
    if column.rule == "ring":
        place = fragment(f"ops.ring_row({name}_at, column_stride, {{}}, now)", ring_size(name))
        return fragment("tl.store({} + i, {}, mask=visible)", place, body)
    if column.rule == "fold":
        new = body
    elif column.decay is not None:
        new = fragment("ops.ema({}, {}, {}, now - pos)", old, body, printer.value(column.decay))
    elif column.rule == "sum":
        new = fragment("{} + {}", old, printer.value(column.body, STRENGTH["+"] + 1))
    elif column.rule == "squares":
        new = fragment("{} + ops.square({})", old, body)
    elif column.rule == "last":
        new = body
    else:
        new = fragment(f"ops.{EXTREMES[column.rule]}({{}}, {{}})", old, body)
    return fragment(f"new_{name} = {{}}", new)


def _merged(step: Step, folding: Pass, ranking: Pass) -> Pass | None:
    """Return one loop that folds the query into the columns, if `OBSERVES`, and ranks.

    None if the ranking reads rings, which the query's own value has to be stored in before, or keys or values, in smaller blocks.
    """
    if ranking.reads or any(use.kind == "ring" for use in ranking.uses):
        return None
    columns = [name for name in names_of((*folding.uses, *ranking.uses), "column") if name != PAGE]
    folded = [
        column.name for column in step.observe if column.rule != "ring" and column.name in names_of(ranking.uses, "column")
    ]
    loads = {f"{name} = tl.load({name}_at + i, mask=inside, other=0.0)" for name in columns}
    once = [[line for line in body if line.text not in loads] for body in (folding.body, ranking.body)]
    current = [Fragment(f"{name} = tl.where(visible, new_{name}, {name})") for name in folded]
    return Pass(
        (),
        (
            *(load_column(name) for name in columns),
            Fragment("if OBSERVES:"),
            *(replace(line, text=f"    {line.text}") for line in (*once[0], *current)),
            *once[1],
        ),
    )


# -- selecting ---------------------------------------------------------------------------------------------------------


def _select(step: Step) -> _Select | None:
    select = step.select
    if select is None:
        return None
    if reads(select.by, "query_head"):
        raise NotLowerable("`select` by a query head's number")
    for vote in select.votes:
        CAN.check(vote.op, vote.over)
    form = "expression" if select.of_votes else select.form
    if form == "expression":
        raise NotLowerable(
            "`select` by anything but dot(q, k), dot(q, k over sketch), dot(q, the mean key of a page) and what the keys of a page could "
            "give at most, or these over heads"
        )
    if select.paged and form not in ("page_bound", "page_mean"):
        raise NotLowerable("`pages` that rank by their tokens")
    if form == "page_mean" and step.group == "max":
        raise NotLowerable("`select` by the mean key of a page, where the largest of a group's counts")
    if select.votes and step.heads_differ:
        raise NotLowerable("`select` by what all KV heads find, with numbers of each head")
    counts = _ends_counts(step.protect)
    chosen = uses_of(*counts, number("select"))
    if names_of(chosen, "constant"):
        raise NotLowerable("`select` with a count of `keep` that reads a tensor")
    return _Select(
        by=form,
        vote="".join(vote.op for vote in select.votes),
        sketch_by=None if step.sketch is None else _sketch_by(step.sketch, step.group),
        protects=bool(step.protect.ends),
        observed=any(reads(column.body, "attn") for column in step.columns),
        uses=chosen,
    )


def _sketch_by(by: Expr, group: str) -> Fragment:
    value = DimPrinter({}).value(by)
    if not value.needs("input", "q"):
        raise NotLowerable(SKETCHED)
    return fragment(f'ops.over_group({{}}, g, G, "{group}")', value)


# -- settling ----------------------------------------------------------------------------------------------------------


def _settle(step: Step, evict: Eviction) -> _Settle:
    rows: dict[str, int] = {}
    score = _score(step, evict, rows)
    vectors = tensors_in(_uses(score), "vector", step)
    return _Settle(
        overflow=_overflow(evict),
        counts=_ends_counts(step.protect),
        tops=[] if evict.pools else [_count(count) for count in step.protect.counts("top")],
        ends=_ends(step.protect),
        score=score,
        rows=len(rows),
        vectors=vectors,
        reads_vectors=bool(vectors) or any(one.reads for one in score),
        pools=evict.pools,
        hard_cap=evict.hard,
        prompts=evict.prompts and evict.alone and not (vectors or any(one.reads for one in score) or step.forgets),
        agrees=evict.by == "heads",
    )


def _score(step: Step, evict: Eviction, rows: dict[str, int]) -> list[Pass]:
    """Return loops that store each slot's scores in `work` and its protection class in `kept`, and find the lowest score.

    Args:
        rows: receives the rows of `work`, by the name of their value.
    """
    if evict.pools and evict.by == "heads":
        raise NotLowerable("a pool of heads that agree on their victims")
    rows |= {name: n for n, name in enumerate(name for one in reversed(step.rank) for name in one.rows)}
    found, names = list[Pass](), dict[Expr, str]()
    for number_of_pass, one in enumerate(step.rank):
        first, late = number_of_pass == 0, number_of_pass + 1 < len(step.rank)
        loops, names = hoisted_loops(step, "cached", one.values, rows, names)
        printer = BlockPrinter(names)
        values = {name: printer.value(expr) for name, expr in one.rows.items()}
        score = [fragment("score = {}", values.pop("score"))] if "score" in values else []
        lines = [
            *score,
            _keep(step.protect, printer) if first else _KEEP,
            *(fragment(f"tl.store(work + {row_at(rows[name])}i, {{}}, mask=inside)", top) for name, top in values.items()),
            Fragment("if STORES:"),
            *(Fragment("    tl.store(work + i, score, mask=inside)") for _ in score),
            *([_KEPT] if first else []),
            *(fragment(f"tl.store({c.name}_at + i, {{}}, mask=inside)", printer.value(c.body)) for c in one.columns),
            *(Fragment(_LOWER) for _ in score if evict.by != "heads"),
        ]
        body = (*values_of(step, "", uses_of(*lines), rows), *lines)
        found += [*loops, Pass((), body, tuple(_protect_tops(step.protect)) if late else ())]
    return found


def _protect_tops(protect: Protection) -> Iterator[Fragment]:
    """Yield calls that apply `keep top` before later scores depend on it."""
    yield BARRIER
    for n, count in enumerate(protect.counts("top"), 1):
        at = f"position, work + {n} * slots, kept, slots"
        yield fragment(f"evicting.protect_top({at}, {{}}, BLOCK)", _count(count))


def _keep(protect: Protection, printer: BlockPrinter) -> Fragment:
    """Return the statement that finds protected slots; `keep top` adds its own later."""
    bounds = {"first": "pos <= first", "last": "pos >= last"}
    ends = [Fragment(bound) for scope, bound in bounds.items() if protect.counts(scope)]
    kept = [printer.condition(condition) for condition in protect.conditions]
    if protect.ends_last:
        return fragment(f"keep = tl.where({{}}, {_ends(protect)}, {{}})", _any_of(ends), _any_of(kept))
    return fragment("keep = {}", _any_of([*ends, *kept]))


def _any_of(conditions: list[Fragment]) -> Fragment:
    """Join conditions by or; 0 if there are none."""
    if len(conditions) > 1:
        conditions = [fragment("({})", condition) for condition in conditions]
    return fragment(" | ".join("{}" for _ in conditions) or "0", *conditions)


def _ends(protect: Protection) -> int:
    """Return the class, see `evicting`, of protected first and last tokens: 1 as other protected slots, 2 if evicted after those."""
    return 2 if protect.ends_last else 1


def _ends_counts(protect: Protection) -> list[Fragment]:
    """Print the numbers of first and of last tokens that are protected."""
    return [_most(protect.counts(scope)) for scope in ENDS]


def _most(counts: list[Expr]) -> Fragment:
    """Print the maximum of some counts; 0 if there are none."""
    if not counts:
        return Fragment("0")
    *rest, last = map(_count, counts)
    return reduce(lambda behind, count: fragment("tl.maximum({}, {})", count, behind), reversed(rest), last)


def _count(count: Expr) -> Fragment:
    if count.kind == "number":
        return Fragment(str(whole(count.value)))
    return fragment("ops.count({})", CountPrinter()(count))


def _overflow(evict: Eviction) -> Fragment:
    found = {
        name: fragment("ops.count({})", number(name)) if default is None else Fragment(str(default))
        for name, default in evict.overflow.items()
    }
    if evict.budget is not None:
        measured = CountPrinter().value(evict.budget)
        if evict.by == "heads" and measured.needs("input", "seen"):
            raise NotLowerable("a budget that reads `seen`, of heads that agree on their victims")
        bounded = fragment("ops.minimum({}, ops.at_least_one({}))", number("capacity"), measured)
        found["capacity"] = fragment("ops.count({})", bounded)
    return fragment(", ".join("{}" for _ in found), *found.values())
