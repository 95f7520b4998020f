"""A policy as Triton: the last launch of a decode step (`settle`), and the first two of one whose query attends to a selection (`look` and
`choose`), as a generated `kernels_triton.py` has them.

`ops.py`, `evicting.py` and `select.py` of `kvdsl/runtime/gpu` have what the text calls; `kvdsl/lower/triton_loops.py` has the loops over
slots, and `triton_expressions.py` the expressions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvdsl.ir.nodes import Axis, Column, ColumnRef, Expr, Keep, Number, Policy, Reduce, is_call, walk
from kvdsl.ir.ops import POOLS
from kvdsl.ir.visitors import mapped
from kvdsl.lower.expression import (
    Fragment,
    NotLowerable,
    Use,
    form_of_select,
    fragment,
    in_layers,
    names_of,
    reads,
    texts,
    uses_of,
)
from kvdsl.lower.numbers import heads_differ
from kvdsl.lower.spelling import spelled
from kvdsl.lower.triton_expressions import (
    CAN,
    SKETCHED,
    STRENGTH,
    BlockPrinter,
    CountPrinter,
    DimPrinter,
    Loop,
    Pass,
    TokenPrinter,
    number,
    ring_size,
)
from kvdsl.lower.triton_loops import BARRIER, EXTREMES, INITIAL, INT_MAX, PAGE, hoisted_loops, row_at, values_of
from kvdsl.passes.normal import compared
from kvdsl.passes.parts import in_parts

_LOWER = "lowest, where, certain = evicting.lower(lowest, where, certain, i, pos, score, keep, first, last)"
_KEPT = Fragment("tl.store(kept + i, keep, mask=inside)")
_OVERFLOW = {"capacity": "", "trigger": "1", "slack": "0", "max_drop": "0"}


@dataclass(frozen=True)
class TritonSelect:
    """Parts of the kernels `look` and `choose`, one statement a line.

    Attributes:
        by: what slots rank by: `dot`, `sketch_dot`, or `page_bound` or `page_mean` (which rank pages). `vote`: how what the KV heads of
            a layer find is reduced; empty where each goes by what it finds itself.
        sketch_by: what the sketch ranks the dims by, per query head; empty if there is none.
        sketch_numbers, choose_numbers: what the search for the dims and `choose` read of the policy's numbers, as in `TritonPlan`.
            `page_number`: the place of the one that says how many tokens a page has.
        protect: what the first and last tokens are that are attended to in any case. `first`, `last`: whether there are such.
        observed: whether the policy remembers what slots were given.
    """

    by: str
    vote: str
    sketch_by: str
    sketch_numbers: tuple[tuple[str, int], ...]
    choose_numbers: tuple[tuple[str, int], ...]
    page_number: int
    protect: tuple[str, ...]
    first: bool
    last: bool
    observed: bool

    @property
    def paged(self) -> bool:
        """Whether pages are chosen."""
        return self.by in ("page_bound", "page_mean")


@dataclass(frozen=True)
class TritonPlan:
    """Parts of the kernel `settle`, one statement a line.

    Attributes:
        args: names of what it is given beyond what every policy's is.
        numbers: what it reads of the policy's numbers: name and place in the table. `constants`, `vectors`: of its tensors of files,
            those that have a number for the head, and those that have one for every dim, which `place` reads; `scored`: that `score`
            reads.
        supplied: what of the caller's it reads, likewise.
        columns: names of the columns that it writes or reads, and the rows of the table where they begin. `rings`: of the rings,
            the same, with the place of each among the rings instead.
        place: stores of a new token's columns. `reads_key`, `reads_value`: whether they need its key, its value.
        observe: loops that fold the query into the columns.
        settles: whether a decode step settles; then `overflow` are the arguments of the call that says how many must leave,
            `first` and `last` how many tokens at either end stay, `score` the loops that compute the rows of scores, `scores` how
            many those are, with those that the loops work in, `tops` how many slots each `keep top` protects, and `ends` which of
            `evicting`'s classes those at either end are. `reads_vectors`: whether the loops read keys, values or such tensors.
            `hard_cap`: whether it does so before its token is placed, as well.
        settles_prompts: whether a kernel says who leaves behind a prompt: where each KV head decides by itself, from its columns.
        pools: whether a score pools, so that it is known before what may not leave. `pairs`: whether slots are compared with each other.
        spreads: whether several programs share a KV head's slots: there are loops over them, and no value depends on other slots.
        select: None where the policy's queries attend to everything.
        compact: whether keys are turned, so that ranks and lengths are to be kept up to date, and rotated halves where there are any.
        agrees: whether the KV heads of a layer agree on who leaves, in one more kernel.
        shares: whether they share a budget, or have budgets of their own, so that some may have more slots than others.
    """

    args: tuple[str, ...]
    numbers: tuple[tuple[str, int], ...]
    constants: tuple[tuple[str, int], ...]
    vectors: tuple[tuple[str, int], ...]
    scored: tuple[tuple[str, int], ...]
    supplied: tuple[tuple[str, int], ...]
    columns: tuple[tuple[str, int], ...]
    rings: tuple[tuple[str, int], ...]
    place: tuple[str, ...]
    reads_key: bool
    reads_value: bool
    observe: tuple[Loop, ...]
    settles: bool
    hard_cap: bool
    settles_prompts: bool
    overflow: str
    first: str
    last: str
    score: tuple[Loop, ...]
    scores: int
    reads_vectors: bool
    tops: tuple[str, ...]
    ends: int
    pools: bool
    pairs: bool
    spreads: bool
    select: TritonSelect | None
    compact: bool
    agrees: bool
    shares: bool

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
    policy = in_parts(_compared(policy), CAN.knows)
    CAN.check_columns(policy.columns)
    settles = policy.budget is not None and policy.when != "prefill"
    folded = [column for column in policy.columns if column.rule not in ("token", "prune")]
    observe = _observe(policy, folded)
    if policy.forgets:  # prompts observe, by the same rules
        observe = []
    rows: dict[str, int] = {}
    score = _settle(policy, rows) if settles else []
    first, last = (_kept_at(policy, scope) if settles else Fragment("0") for scope in ("first", "last"))
    place = [_place(column) for column in policy.columns if column.rule != "ring"]
    overflow = _overflow(policy, numbers) if settles else Fragment("")
    tops = [_count(keep) for keep in policy.keeps if keep.scope == "top"] if settles and not pools(policy) else []
    select = _select(policy, numbers)
    page = [] if select is None or policy.pages is None else [number("page")]
    uses = uses_of(*place, first, last, overflow, *tops, *page, Fragment("", uses=_uses([*observe, *score])))
    used = _numbers_in(uses, numbers)
    constants = tensors_in(uses, "constant", policy)
    vectors, scored = (tensors_in(of, "vector", policy) for of in (uses_of(*place), _uses(score)))
    vectors_are_read = bool(scored) or any(one.reads for one in score)
    own = policy.victims not in ("heads", "layers") and not policy.heads_share
    singles = [column.name for column in policy.columns if column.rule != "ring"]
    rings = [column.name for column in policy.columns if column.rule == "ring"]
    return TritonPlan(
        args=_args(policy, uses, bool(used), bool(constants or vectors or scored), settles),
        numbers=used,
        constants=constants,
        vectors=vectors,
        scored=scored,
        supplied=tuple(
            (spelled(given.name), n) for n, given in enumerate(policy.given) if given.name in names_of(uses, "given")
        ),
        columns=tuple((name, n) for n, name in enumerate(singles)),
        rings=() if policy.forgets else tuple((name, n) for n, name in enumerate(rings)),
        place=texts(place),
        reads_key=any(line.needs("input", "k") for line in place),
        reads_value=any(line.needs("input", "v") for line in place),
        observe=tuple(one.printed() for one in observe),
        settles=settles,
        hard_cap=settles and policy.cap == "hard",
        settles_prompts=settles and policy.when != "decode" and own and not (vectors_are_read or policy.forgets),
        overflow=overflow.text,
        first=first.text,
        last=last.text,
        score=tuple(one.printed() for one in score),
        scores=len(rows),
        reads_vectors=vectors_are_read,
        tops=texts(tops),
        ends=_ends(policy),
        pools=settles and pools(policy),
        pairs=any(one.inner for one in score) or (settles and pools(policy)),
        spreads=bool(observe or score) and len(observe) <= 1 and len(score) <= 1,
        select=select,
        compact=policy.positions == "compact",
        shares=policy.heads_share or heads_differ(policy),
        agrees=settles and policy.victims == "heads",
    )


def _compared(policy: Policy) -> Policy:
    """The policy with ranks and pages as comparisons with the other slots, where it is found who leaves."""

    def rule(expr: Expr) -> Expr:
        return compared(expr, ColumnRef(name=PAGE))

    changed = {
        "score": None if policy.score is None else rule(policy.score),
        "keeps": tuple(mapped(keep, rule) for keep in policy.keeps),
        "columns": tuple(mapped(one, rule) if one.rule == "prune" else one for one in policy.columns),
    }
    return policy.model_copy(update=changed)


def _args(policy: Policy, uses: tuple[Use, ...], numbered: bool, reads_tensors: bool, settles: bool) -> tuple[str, ...]:
    """The arguments of `settle` that not every policy needs."""
    inputs, helpers = names_of(uses, "input"), names_of(uses, "helper")
    remembered = [column for column in policy.columns if not (policy.forgets and column.rule == "ring")]
    args = {
        "columns": bool(remembered),
        "numbers": numbered or policy.sketch is not None,
        "constants": reads_tensors,
        "supplied": bool(names_of(uses, "given")),
        "logits": bool({"attn", "logit"} & {*inputs}),
        "ring_rows": any(column.rule == "ring" for column in remembered),
        "window": "window" in helpers,
        "seed": "random_key" in helpers,
        "work": settles,
    }
    return tuple(name for name, wanted in args.items() if wanted)


def _uses(passes: Iterable[Pass]) -> tuple[Use, ...]:
    return uses_of(*(Fragment("", uses=one.uses) for one in passes))


def _refuse_statements(policy: Policy) -> None:
    """The statements that the kernels do not know: a launch sees one layer, and a program of it one KV head."""
    selects_pages = policy.pages is not None and policy.select is not None
    refused = {
        "a count of `select` that reads what is cached": policy.select is not None and policy.select.measured is not None,
        "`weight` on what is attended to": policy.weighs,
        "`select` by `pages` of what eviction leaves": selects_pages and policy.budget is not None,
        "`select` by `pages` that do not begin with the text": selects_pages and policy.pages_after is not None,
        "`select ... from layers`: a kernel hands its choice to no other layer": policy.reuses,
        "`victims shared by layers`": policy.victims == "layers",
        "`group each`: a kernel chooses once for the query heads of a KV head": policy.group == "each",
    }
    found = [statement for statement, stated in refused.items() if stated]
    if found:
        raise NotLowerable(", ".join(found))


def _numbers_in(uses: Iterable[Use], numbers: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    used = names_of(uses, "number")
    return tuple((name, n) for n, name in enumerate(numbers) if name in used)


def tensors_in(uses: Iterable[Use], kind: str, policy: Policy) -> tuple[tuple[str, int], ...]:
    """The tensors that are used as `constant` or `vector`: how kernels call them, and the place of each among the policy's."""
    used = names_of(uses, kind)
    return tuple((spelled(tensor.name), n) for n, tensor in enumerate(policy.tensors) if tensor.name in used)


# -- the new token -----------------------------------------------------------------------------------------------------


def _place(column: Column) -> Fragment:
    initial = Fragment(INITIAL.get(column.rule, "0.0"))
    value = TokenPrinter().value(column.body) if column.rule == "token" else initial
    return fragment(f"tl.store({column.name}_at + slot, {{}})", value)


# -- observing ---------------------------------------------------------------------------------------------------------


def _observe(policy: Policy, folded: list[Column]) -> list[Pass]:
    if not folded:
        return []
    loops, names = hoisted_loops(policy, "visible", [column.body for column in folded])
    printer = BlockPrinter(names)
    # Folds read each other as they were before the query, so that they are stored last.
    folds = [column.name for column in folded if column.rule == "fold"]
    lines = [_fold(column, printer) for column in folded]
    lines += [Fragment(f"tl.store({name}_at + i, new_{name}, mask=visible)") for name in folds]
    return [*loops, Pass((), (*values_of(policy, "visible", uses_of(*lines)), *lines))]


def _fold(column: Column, printer: BlockPrinter) -> Fragment:
    name, body = column.name, printer.value(column.body)
    old = Fragment(name, uses=(Use("column", name),))
    if column.rule == "ring":
        place = fragment(f"ops.ring_row({name}_at, column_stride, {{}}, now)", ring_size(name))
        return fragment("tl.store({} + i, {}, mask=visible)", place, body)
    if column.rule == "fold":
        return fragment(f"new_{name} = {{}}", body)
    if column.decay is not None:
        new = fragment("ops.ema({}, {}, {}, now - pos)", old, body, printer.value(column.decay))
    elif column.rule == "sum":
        new = fragment("{} + {}", old, printer.value(column.body, STRENGTH["+"] + 1))
    elif column.rule == "squares":
        new = fragment("{} + ops.square({})", old, body)
    elif column.rule == "last":
        new = body
    else:
        new = fragment(f"ops.{EXTREMES[column.rule]}({{}}, {{}})", old, body)
    return fragment(f"tl.store({name}_at + i, {{}}, mask=visible)", new)


# -- selecting ---------------------------------------------------------------------------------------------------------


def _select(policy: Policy, numbers: tuple[str, ...]) -> TritonSelect | None:
    if policy.select is None:
        return None
    if reads(policy.select.by, "query_head"):
        raise NotLowerable("`select` by a query head's number")
    ranked, vote = policy.select.by, ""
    if isinstance(ranked, Reduce) and ranked.axis is Axis.HEAD and ranked.op in ("sum", "mean", "max", "min"):
        vote, ranked = ranked.op, ranked.body
    by = form_of_select(ranked)
    if by == "expression":
        raise NotLowerable(
            "`select` by anything but dot(q, k), dot(q, k over sketch), dot(q, the mean key of a page) and what the keys of a page could "
            "give at most, or these over heads"
        )
    if policy.pages is not None and by not in ("page_bound", "page_mean"):
        raise NotLowerable("`pages` that rank by their tokens")
    if by == "page_mean" and policy.group == "max":
        raise NotLowerable("`select` by the mean key of a page, where the largest of a group's counts")
    if vote and heads_differ(policy):
        raise NotLowerable("`select` by what all KV heads find, with numbers of each head")
    protect = _protect(policy)
    sketch_by = Fragment("") if policy.sketch is None else _sketch_by(policy, policy.sketch.by)
    sketched = uses_of(sketch_by, number("sketch_every"), number("sketch_dims"))
    chosen = uses_of(*protect.values(), number("select"), number("page"))
    if names_of(chosen, "constant"):
        raise NotLowerable("`select` with a count of `keep` that reads a tensor")
    return TritonSelect(
        by=by,
        vote=vote,
        sketch_by=sketch_by.text,
        sketch_numbers=_numbers_in(sketched, numbers),
        choose_numbers=_numbers_in(chosen, numbers),
        page_number=numbers.index("page") if policy.pages is not None else 0,
        protect=texts(protect.values()),
        first="first" in protect,
        last="last" in protect,
        observed=any(reads(column.body, "attn") for column in policy.columns),
    )


def _sketch_by(policy: Policy, by: Expr) -> Fragment:
    value = DimPrinter({}).value(by)
    if not value.needs("input", "q"):
        raise NotLowerable(SKETCHED)
    return fragment(f'ops.over_group({{}}, g, G, "{policy.group}")', value)


# -- settling ----------------------------------------------------------------------------------------------------------


def _settle(policy: Policy, rows: dict[str, int]) -> list[Pass]:
    """The loops that leave every slot's scores in `work` and what protects it in `kept`, and find the lowest score.

    Args:
        rows: gets the rows of `work` by the names of what lies in them.
    """
    assert policy.score is not None
    tops = [keep.by for keep in policy.keeps if keep.scope == "top" and keep.by is not None]
    conditions = [keep.by for keep in policy.keeps if keep.scope == "where" and keep.by is not None]
    prunes = [column for column in policy.columns if column.rule == "prune"]
    rows |= {f"score_{n}": n for n in range(1 + len(tops))}
    if pools(policy):  # goes by what may not leave, so that it comes behind all else
        if policy.victims == "heads":
            raise NotLowerable("a pool of heads that agree on who leaves")
        loops, names = hoisted_loops(policy, "cached", [*tops, *conditions], rows)
        lines = [_keep(policy, conditions, BlockPrinter(names)), *_stored(tops, BlockPrinter(names)), _KEPT]
        counts = [_count(keep) for keep in policy.keeps if keep.scope == "top"]
        protects = [
            fragment(f"evicting.protect_top(position, work + {n} * slots, kept, slots, {{}}, BLOCK)", count)
            for n, count in enumerate(counts, 1)
        ]
        loops.append(Pass((), (*values_of(policy, "", uses_of(*lines), rows), *lines), (BARRIER, *protects)))
        late, names = hoisted_loops(policy, "cached", [policy.score, *(one.body for one in prunes)], rows, names)
        loops, protected, last = [*loops, *late], [Fragment("keep = tl.load(kept + i, mask=inside, other=0)")], []
    else:
        loops, names = hoisted_loops(
            policy, "cached", [policy.score, *tops, *conditions, *(one.body for one in prunes)], rows
        )
        protected = [_keep(policy, conditions, BlockPrinter(names))]
        last = [*_stored(tops, BlockPrinter(names)), _KEPT]
    printer = BlockPrinter(names)
    lines = [
        fragment("score = {}", printer.value(policy.score)),
        *protected,
        Fragment("tl.store(work + i, score, mask=inside)"),
        *last,
        *(fragment(f"tl.store({one.name}_at + i, {{}}, mask=inside)", printer.value(one.body)) for one in prunes),
    ]
    if policy.victims != "heads":
        lines.append(Fragment(_LOWER))
    return [*loops, Pass((), (*values_of(policy, "", uses_of(*lines), rows), *lines))]


def pools(policy: Policy) -> bool:
    """Whether a score pools."""
    return policy.score is not None and any(is_call(part, *POOLS) for part in walk(policy.score))


def _keep(policy: Policy, conditions: list[Expr], printer: BlockPrinter) -> Fragment:
    """What may not leave, but for what `keep top` protects."""
    scopes = {keep.scope for keep in policy.keeps}
    ends = [Fragment(f"pos {compare} {scope}") for scope, compare in (("first", "<="), ("last", ">=")) if scope in scopes]
    kept = [printer.condition(condition) for condition in conditions]
    if policy.ends_last:
        return fragment(f"keep = tl.where({{}}, {_ends(policy)}, {{}})", _any_of(ends), _any_of(kept))
    return fragment("keep = {}", _any_of([*ends, *kept]))


def _stored(tops: list[Expr], printer: BlockPrinter) -> Iterator[Fragment]:
    """What each `keep top` ranks by."""
    for n, expr in enumerate(tops, 1):
        yield fragment(f"tl.store(work + {row_at(n)}i, {{}}, mask=inside)", printer.value(expr))


def _any_of(conditions: list[Fragment]) -> Fragment:
    """Whether one of these holds."""
    if len(conditions) > 1:
        conditions = [fragment("({})", condition) for condition in conditions]
    return fragment(" | ".join("{}" for _ in conditions) or "0", *conditions)


def _ends(policy: Policy) -> int:
    """The class of `evicting` of the first and last tokens that are kept: as whatever is protected, or the one behind."""
    return 2 if policy.ends_last else 1


def _kept_at(policy: Policy, scope: str) -> Fragment:
    """How many tokens `keep first` or `keep last` lines protect."""
    counts = [_count(keep) for keep in policy.keeps if keep.scope == scope]
    return _nested("tl.maximum", counts) if counts else Fragment("0")


def _protect(policy: Policy) -> dict[str, Fragment]:
    """By `first` and `last`, as far as the policy keeps such: up to and from which position."""
    return {
        scope: fragment(
            f"{scope} = evicting.{scope}_protected(position, slots, now, live, {{}}, BLOCK)", _kept_at(policy, scope)
        )
        for scope in ("first", "last")
        if any(keep.scope == scope for keep in policy.keeps)
    }


def _nested(function: str, values: list[Fragment]) -> Fragment:
    first, *rest = values
    return fragment(f"{function}({{}}, {{}})", first, _nested(function, rest)) if rest else first


def _count(keep: Keep) -> Fragment:
    assert keep.count is not None
    if isinstance(keep.count, Number):
        return Fragment(str(max(0, min(int(keep.count.value // 1), INT_MAX))))
    return fragment("ops.count({})", CountPrinter()(keep.count))


def _overflow(policy: Policy, numbers: tuple[str, ...]) -> Fragment:
    counts = {name: number(name) for name in _OVERFLOW if name in numbers}
    if policy.measured is not None:
        low, high = (None, None) if policy.layers is None else (policy.layers.low, policy.layers.high)
        measured = CountPrinter().value(in_layers(policy.measured, low, high))
        if policy.victims == "heads" and measured.needs("input", "seen"):
            raise NotLowerable("a budget that reads `seen`, of heads that agree on who leaves")
        counts["capacity"] = fragment("ops.minimum({}, ops.at_least_one({}))", counts["capacity"], measured)
    found = [
        fragment("ops.count({})", counts[name]) if name in counts else Fragment(default)
        for name, default in _OVERFLOW.items()
    ]
    return fragment(", ".join("{}" for _ in found), *found)
