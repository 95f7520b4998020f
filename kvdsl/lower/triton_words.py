"""Sentences of a generated `kernels_triton.py`, and what it imports: everything that depends on which launches there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdsl.lower.triton import TritonPlan


@dataclass(frozen=True)
class TritonWords:
    """What templates place beside statements.

    Attributes:
        launches: which of a step's launches are here. legend: what each does, and what names mean, a line each.
        modules: of `kvdsl.runtime.gpu`, those that the kernels call.
        settle: what the kernel of this name does.
        looked_at: what `look` grades. graded: the same, and the new token where that is graded, too.
        taken: for whom `choose` notes what is attended to.
    """

    launches: str
    legend: tuple[str, ...]
    modules: tuple[str, ...]
    settle: str
    looked_at: str
    graded: str
    taken: str


def triton_words(plan: TritonPlan) -> TritonWords:
    """The sentences for a plan."""
    choosing = plan.select
    pages = choosing is not None and choosing.paged
    several = choosing or plan.hard_cap or plan.agrees
    return TritonWords(
        launches=(
            "the launches of a decode step, all but the one before `settle`, which is `kvdsl.runtime.gpu.attend`."
            if several
            else "the second launch of a decode step. The first is `kvdsl.runtime.gpu.attend`."
        ),
        legend=tuple(_legend(plan)),
        modules=tuple(_modules(plan)),
        settle=f"Combine, place{', observe' if plan.observe else ''}{', settle' if plan.settle else ''}; the grid is (PIECES + 1, H, B).",
        looked_at="pages" if pages else "slots",
        graded="pages" if pages else "slots and, behind them, of the new token",
        taken="for `settle`" if choosing is not None and choosing.observed else "if anybody asked",
    )


def _modules(plan: TritonPlan) -> Iterator[str]:
    protects = plan.select is not None and bool(plan.select.protect)
    wanted = {
        "evicting": plan.settle is not None or protects,
        "layout": True,
        "neighbours": plan.settle is not None and plan.settle.pools,
        "observing": plan.prompt is not None,
        "ops": True,
        "rotate": plan.compact,
        "select": plan.select is not None,
    }
    return (name for name, needed in wanted.items() if needed)


def _legend(plan: TritonPlan) -> Iterator[str]:
    choosing = plan.select
    if plan.hard_cap and plan.agrees:
        yield "`make_room`, before everything else: one program ranks a KV head's slots where a hard cap asks for room."
    elif plan.hard_cap:
        yield "`make_room`, before everything else: one program frees what of a KV head's slots a hard cap asks for."
    if choosing:
        looked_at = "pages" if choosing.paged else "slots"
        yield (f"`look`: one program grades the {looked_at} of one of S splits of a KV head, and counts them by level.")
        if choosing.vote:
            yield f"`vote`: one program grades those of a split anew, for all KV heads of a row, by the {choosing.vote} of what they found."
        yield (
            f"`choose`: PIECES programs share a KV head's {looked_at}, and keep those that may be chosen; "
            "the last to arrive chooses the highest."
        )
    yield from _settles(plan)
    if plan.agrees:
        after = ", and after `make_room`" if plan.hard_cap else ""
        yield f"`agree`, the last{after}: one program frees the same slots of all KV heads of one row, by the mean of their scores."
    yield (
        "B, H, N: rows, KV heads, slots per KV head. G: query heads per KV head. D, E: size of a key, of a value. "
        "S: splits of `attend`."
    )
    yield "R: rows of the cache; B, unless the step is of some of them. own_row, own_pair: where a row and its KV head are there."
    yield "now: the new token's position in the text. pos: those of the tokens in slots i, below 0 where a slot is free."
    if choosing and choosing.sketch_by:
        yield "W: dims of the sketch. dims: which those are, -1 behind them."
    if choosing and choosing.by == "page_bound":
        yield "P: pages that there is room for. Nothing ever leaves, so that the token at position p is in slot p."
    if choosing and choosing.by == "page_mean":
        yield "Nothing ever leaves, so that the token at position p is in slot p."
    yield "SIZE: slots of a block, if slots lie so; `kvdsl.runtime.gpu.layout` says where, and has given the new token's slot one."
    if plan.reads_vectors:
        yield "k, v: keys and values of slots i. first_row: where those of the head begin. d, e: their dims."
    if plan.compact:
        yield "rank: where a token stands, to attention, which turns its key accordingly; see `kvdsl.runtime.gpu.rotate`."


def _settles(plan: TritonPlan) -> Iterator[str]:
    """What the programs of `settle` do, in a line or two."""
    name = "`settle`: one" if plan.agrees or plan.hard_cap else "`settle`, the last: one" if plan.select else "One"
    yield f"{name} program combines what `attend` found for one KV head of one row. Beside it"
    frees = "ranks the slots where some must leave" if plan.agrees else "frees the slots of those that must leave"
    if not plan.spreads or not (plan.observe or plan.settle):
        does = ["puts the new token into a free slot"]
        does += ["lets its query be observed"] if plan.observe else []
        does += [frees] if plan.settle else []
        yield f"another {', '.join(does[:-1])}{', and ' if does[1:] else ''}{does[-1]}."
        return
    does = ["the one that has the first free slot puts the new token there"]
    does += ["each lets the query be observed"] if plan.observe else []
    does += [f"{'each' if plan.agrees else 'the last to arrive'} {frees}"] if plan.settle else []
    yield f"PIECES others share its slots: {', '.join(does[:-1])}, and {does[-1]}."
