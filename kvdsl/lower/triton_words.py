"""The comments and imports of a generated `kernels_triton.py` that depend on its launches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdsl.lower.triton import TritonPlan


@dataclass(frozen=True)
class TritonWords:
    """The text that templates insert beside statements.

    Attributes:
        launches: the step's launches in this module.
        legend: one line per launch and per name.
        modules: the modules of `kvdsl.runtime.gpu` that the kernels call.
        settle: the docstring of the kernel `settle`.
        looked_at: `slots` or `pages`, which `look` scores.
        graded: `looked_at`, with the new token if `look` scores it, too.
        taken: the reader of the list that `choose` writes.
    """

    launches: str
    legend: tuple[str, ...]
    modules: tuple[str, ...]
    settle: str
    looked_at: str
    graded: str
    taken: str


def triton_words(plan: TritonPlan) -> TritonWords:
    """Return the text for the kernels of a plan."""
    choosing = plan.select
    pages = choosing is not None and choosing.paged
    several = choosing or plan.hard_cap or plan.agrees
    return TritonWords(
        launches=(
            "the launches of a decode step, except `kvdsl.runtime.gpu.attend`, which runs before `settle`."
            if several
            else "the second launch of a decode step. The first is `kvdsl.runtime.gpu.attend`."
        ),
        legend=tuple(_legend(plan)),
        modules=tuple(_modules(plan)),
        settle=f"Combine splits, place the token{', update statistics' if plan.observe else ''}{', rank slots' if plan.settle else ''}; "
        "the grid is (PIECES + 1, H, B).",
        looked_at="pages" if pages else "slots",
        graded="pages" if pages else "slots and of the new token",
        taken="for `settle`" if choosing is not None and choosing.observed else "if requested",
    )


def _modules(plan: TritonPlan) -> Iterator[str]:
    protects = plan.select is not None and bool(plan.select.protect)
    wanted = {
        "evicting": plan.settle is not None or protects,
        "layout": True,
        "neighbours": plan.settle is not None and plan.settle.pools,
        "observing": plan.prompt is not None,
        "ops": True,
        "packed": True,
        "rotate": plan.compact,
        "select": plan.select is not None,
    }
    return (name for name, needed in wanted.items() if needed)


def _legend(plan: TritonPlan) -> Iterator[str]:
    choosing = plan.select
    if plan.hard_cap and plan.agrees:
        yield "`make_room`, before everything else: one program ranks a KV head's slots if the hard cap needs room."
    elif plan.hard_cap:
        yield "`make_room`, before everything else: one program evicts from a KV head if the hard cap needs room."
    if choosing:
        looked_at = "pages" if choosing.paged else "slots"
        yield (
            f"`look`: one program scores the {looked_at} of one of S splits of a KV head, and counts the scores in each of 256 levels."
        )
        if choosing.vote:
            yield f"`vote`: one program replaces a split's scores by their {choosing.vote} over the KV heads of a row."
        yield (
            f"`choose`: PIECES programs share a KV head's {looked_at} and collect candidates; "
            "the last one to finish selects the highest."
        )
    yield from _settles(plan)
    if plan.agrees:
        after = ", and after `make_room`" if plan.hard_cap else ""
        yield f"`agree`, the last{after}: one program evicts the same slots from all KV heads of a row, by their mean score."
    yield (
        "B, H, N: rows, KV heads, slots per KV head. G: query heads per KV head. D, E: dims of a key, of a value. "
        "S: splits of `attend`."
    )
    yield "R: rows of the cache; equals B unless the step covers some of them. own_row, own_pair: indices into these rows."
    yield "now: position of the new token in the text. pos: positions of the tokens in slots i, negative for a free slot."
    if choosing and choosing.sketch_by:
        yield "W: dims of the sketch. dims: their indices, padded with -1."
    if choosing and choosing.by == "page_bound":
        yield "P: the page capacity. Nothing is evicted, so the token at position p is in slot p."
    if choosing and choosing.by == "page_mean":
        yield "Nothing is evicted, so the token at position p is in slot p."
    yield "SIZE: slots per block, for the block layout; `kvdsl.runtime.gpu.layout` maps slots to blocks and has allocated the new token's."
    if plan.reads_vectors:
        yield "k, v: keys and values of slots i. d, e: their dims. first_row: first row of the KV head in `keys` and `values`."
    if plan.compact:
        yield "rank: the position that attention uses for a token's rotation; see `kvdsl.runtime.gpu.rotate`."


def _settles(plan: TritonPlan) -> Iterator[str]:
    """Yield what the programs of `settle` do, in two or three lines."""
    name = "`settle`: one" if plan.agrees or plan.hard_cap else "`settle`, the last: one" if plan.select else "One"
    yield f"{name} program per KV head and row combines the splits of `attend`."
    evicts = "ranks the slots if it has to evict" if plan.agrees else "evicts"
    if not plan.spreads or not (plan.observe or plan.settle):
        does = ["stores the new token in a free slot"]
        does += ["updates statistics"] if plan.observe else []
        does += [evicts] if plan.settle else []
        yield f"Another one {', '.join(does[:-1])}{' and ' if does[1:] else ''}{does[-1]}."
        return
    does = ["the one with the first free slot stores the new token"]
    does += ["each updates statistics for its slots"] if plan.observe else []
    does += [f"{'each' if plan.agrees else 'the last one to finish'} {evicts}"] if plan.settle else []
    yield "PIECES others share the head's slots."
    yield f"{does[0].capitalize()}, {', '.join([*does[1:-1], f'and {does[-1]}'])}."
