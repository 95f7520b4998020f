"""Check a policy's statements against each other: missing, contradictory and unread ones.

A statement counts as missing only if no statement with a syntax error could be it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvdsl import codes
from kvdsl.codes import Code
from kvdsl.diagnostics import Label, Sink, nearest
from kvdsl.helps import Help, add, both, instead, leave_out, offer
from kvdsl.ir.nodes import Axis, Rank, Reduce, Tensor
from kvdsl.ir.printer import print_expression
from kvdsl.ir.visitors import has, parts_of, reads
from kvdsl.sema.needs import (
    READS_TENSORS,
    asks_query_heads,
    differing_inside,
    of_query_heads_unpooled,
    reads_heads,
    reads_text,
)
from kvdsl.sema.params import Params
from kvdsl.sema.parts import COUNTS, PER_HEAD, Parts
from kvdsl.sema.resolve import FlatPolicy
from kvdsl.sema.statics import Part
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.parser import A_STATEMENT, ANYTHING

_OF_ALL_HEADS = (
    "pages",
    "pages_after",
    "sketch.count",
    "sketch.every",
    "block",
    "prefill_block",
    "across",
    "across_layers.floor",
)
"""Numbers of the IR that all KV heads of a layer share."""

_SAID_BY = {"victims": "score", "prefill": "when"}
"""Statements of edition 1, and those that express them now: `score mean(x over heads)`, `when prefill every 512`."""

_OF_A_QUERY = ("select.by", "select.measured", "select.weight")
"""Expressions that a query evaluates before it attends."""
_ABOUT_EVICTION = ("score", *COUNTS, "cap", "victims", "layers", "when", "positions", "prefill")


@dataclass
class Said:
    """A policy's statements, with helpers for reports."""

    flat: FlatPolicy
    parts: Parts
    sink: Sink

    def _is(self, keyword: str, word: str) -> bool:
        return self.parts.words[keyword] == word

    def _has(self, keyword: str) -> bool:
        return keyword in self.flat.settings

    def _lacks(self, *keywords: str) -> bool:
        """Return whether the policy certainly has none of these statements."""
        return not self.flat.broken & {ANYTHING, A_STATEMENT, *keywords} and not any(map(self._has, keywords))

    def _span(self, keyword: str) -> Span:
        said = keyword if keyword in self.flat.settings else _SAID_BY.get(keyword, keyword)
        return self.flat.settings[said][-1].statement.span

    def _refuse(self, code: Code, keyword: str, message: str, help: str | None, other: str | None = None) -> None:
        """Report a statement, with a label on the one that it contradicts."""
        labels = [] if other is None else [Label(self._span(other), "because of this")]
        self.sink.report(code, self._span(keyword), message, help, labels)

    def _without(self, text: str, *places: str | tuple[str, str]) -> Help:
        """Return a help that removes statements, or parts of them given as (keyword, first words)."""
        spans = [self._span(place) if isinstance(place, str) else self._clause(*place) for place in places]
        return leave_out(text, *spans)

    def _clause(self, keyword: str, words: str) -> Span:
        """Return the part of a statement from these words to the next `across`."""
        span = self._span(keyword)
        pattern = r"\s+".join(map(re.escape, words.split())) + r".*?(?=\s+across\b|$)"
        at = re.search(pattern, span.text, re.DOTALL)
        return span if at is None else span.file.span(span.start + at.start(), span.start + at.end())

    def _prefill(self) -> Help:
        """Return a help that adds `when prefill`."""
        if self._has("when"):
            return instead("add `when prefill`", "when prefill", self._span("when"))
        return add("add `when prefill`")

    def _compact(self) -> Help:
        """Return a help that adds `positions compact`."""
        if self._has("positions"):
            return instead("add `positions compact`", "positions compact", self._span("positions"))
        return add("add `positions compact`")


@dataclass
class Combinations(Said):
    """Check a policy's statements against each other.

    Attributes:
        tensors: the policy's tensors.
        inside: numbers inside expressions, such as a count of queries or neighbours.
    """

    params: Params
    tensors: Sequence[Tensor] = ()
    inside: Sequence[Part] = ()

    def check(self) -> None:
        """Run all checks."""
        self._budget()
        self._measured()
        self._text()
        self._phases()
        self._across()
        self._victims()
        self._heads()
        self._votes()
        self._compared()
        self._reused()
        self._each()
        self._of_a_condition()
        self._positions()
        self._reads()

    # -- budget and score --------------------------------------------------------------------------------------------

    def _budget(self) -> None:
        """Report a budget without a score, or the reverse, unless the missing one may have a syntax error."""
        if self.flat.broken & {ANYTHING, A_STATEMENT, "budget", "score"}:
            return
        if "budget" not in self.parts.exprs and "budget" not in self.flat.names:
            self._without_budget()
        elif "score" not in self.parts.exprs:
            name = self.flat.syntax.name.span
            self.sink.report(
                codes.NO_SCORE, name, "the policy has a budget but no score", add("add `score sum(attn)`", ", say")
            )

    def _a_budget(self) -> str:
        """Return what to add to a policy without a budget."""
        return "add `param budget = 512`" + ("" if self._has("score") else " and `score sum(attn)`")

    def _budget_instead_of(self, near: str) -> Help:
        """Return a help for a budget under another name."""
        return offer("did you mean `budget`", f", not `{near}`?", at=self.flat.names[near].statement.name.span)  # type: ignore[union-attr]

    def _without_budget(self) -> None:
        near = nearest("budget", self.flat.params)
        help = add(self._a_budget(), ", say") if near is None else self._budget_instead_of(near)
        pointless = [self._span(keyword) for keyword in _ABOUT_EVICTION if self._has(keyword)]
        pointless += [keep.span for keep in self.parts.keeps if not (keep.ir.row.place and self._has("select"))]
        if pointless:
            span = pointless[0]
            words = span.text.split()
            statement = " ".join(words[:2] if words[0] == "keep" and self._has("select") else words[:1])
            message = f"without a budget nothing is evicted, so `{statement}` has no meaning"
            self.sink.report(codes.NO_BUDGET, span, message, help)
        readers = [part.span for part in self.parts if reads(part.expr, "budget")]
        readers += [self.params.checked[name].span for name, inputs in self.params.inputs.items() if "budget" in inputs]
        for span in readers:
            self.sink.report(codes.NO_BUDGET, span, "the policy has no budget that could be read here", help)

    def _measured(self) -> None:
        """Report statements that contradict a budget that depends on the data, whose value only a settle knows."""
        if "measured" not in self.parts.exprs:
            return
        rule = "a budget that depends on the data is computed when tokens are evicted"
        shared = {"across": "heads", "across_layers.floor": "layers"}
        for sharers in [sharers for name, sharers in shared.items() if name in self.parts.exprs][:1]:
            message = f"a budget that {sharers} share cannot depend on the data"
            self._refuse(
                codes.MEASURED,
                "budget",
                message,
                self._without(f"leave out `across {sharers}`", ("budget", f"across {sharers}")),
            )
        if self._is("cap", "hard"):
            message = f"{rule}, but `cap hard` needs it before a token is placed"
            self._refuse(
                codes.MEASURED, "cap", message, self._without("leave out `cap`: the default is `soft`", "cap"), "budget"
            )
        if self._is("victims", "layers"):
            message = f"{rule} in its own layer, so layers cannot agree on the victims"
            self._refuse(codes.MEASURED, "victims", message, offer("write `victims shared by heads`"), "budget")
        for part in [*self.parts, *(Part(one.ir.default, one.span) for one in self.params.checked.values())]:
            if "budget" in self.params.inputs_of(part.expr):
                message = f"{rule}, so `{part.span.quoted()}` cannot read `budget`"
                labels = [Label(self._span("budget"), "because of this")]
                self.sink.report(codes.MEASURED, part.span, message, "write a number, or a param of another name", labels)
                return

    # -- the prompt's queries ----------------------------------------------------------------------------------------

    def _text(self) -> None:
        """Report `over text` in a score that is evaluated after the prompt's queries are gone."""
        score = self.parts.exprs.get("score")
        if score is None or not reads_text(score.expr):
            return
        if not self._is("when", "prefill") and (self._has("when") or self._lacks("when")):
            message = "the prompt's queries are dropped once it has settled, so `over text` needs `when prefill`"
            labels = [Label(self._span("when"), "because of this")] if self._has("when") else []
            self.sink.report(codes.TEXT, score.span, message, self._prefill(), labels)
        elif self._is("prefill", "blocks"):
            message = "a prompt in blocks settles before all its queries exist, so the score cannot read `over text`"
            self._refuse(codes.TEXT, "prefill", message, self._without("leave out `prefill blocks`", "prefill"), "score")

    # -- phases ------------------------------------------------------------------------------------------------------

    def _phases(self) -> None:
        if self._is("when", "prefill"):
            counts = [keyword for keyword in COUNTS if self._has(keyword)]
            for keyword in counts + (["cap"] if self._is("cap", "hard") else []):
                message = f"under `when prefill` nothing is evicted while decoding, so `{keyword}` has no meaning"
                self._refuse(
                    codes.PHASE,
                    keyword,
                    message,
                    self._without(f"leave out `{keyword}` or `when prefill`", keyword, "when"),
                    "when",
                )
        if self._is("when", "decode") and self._is("prefill", "blocks"):
            message = "under `when decode` nothing is evicted while the prompt is read, so `prefill blocks` has no meaning"
            self._refuse(codes.PHASE, "prefill", message, self._without("leave out one of them", "prefill", "when"), "when")

    # -- heads and layers that act together --------------------------------------------------------------------------

    def _across(self) -> None:
        heads, layers = "across" in self.parts.exprs, "across_layers.floor" in self.parts.exprs
        pool = layers and "across_layers.by" not in self.parts.exprs and "budget" not in self.flat.broken
        sharers, words = ("layers", "across layers") if layers else ("heads", "across heads")
        if not heads and not layers:
            return
        if not self._is("when", "prefill") and (self._has("when") or self._lacks("when")):
            message = f"{sharers} share a budget once, after the prompt, so `{words}` needs `when prefill`"
            self._refuse(codes.ACROSS, "budget", message, self._prefill(), "when" if self._has("when") else None)
        elif self._is("victims", "layers") and layers:
            message = "layers that share a budget keep different tokens, so they cannot agree on the victims"
            self._refuse(
                codes.ACROSS,
                "victims",
                message,
                self._without("leave out `victims` or `across layers`", "victims", ("budget", "across layers")),
                "budget",
            )
        elif not self._is("victims", "nobody") and (heads or pool):
            message = "heads that share a budget keep different tokens, so they cannot agree on the victims"
            self._refuse(
                codes.ACROSS,
                "victims",
                message,
                self._without(f"leave out `victims` or `{words}`", "victims", ("budget", words)),
                "budget",
            )
        elif heads and pool:
            message = "`across layers` without `by` is one pool of all layers and heads, so `across heads` has no meaning"
            help = "leave out `across heads`, or weigh the layers: `across layers by ...`"
            help = self._without(help, ("budget", "across heads"))
            self._refuse(codes.ACROSS, "budget", message, help)
        elif layers and self._is("prefill", "blocks"):
            message = "a block is evicted before the next layer has seen it, so layers cannot share a budget"
            self._refuse(
                codes.ACROSS,
                "prefill",
                message,
                self._without("leave out `prefill blocks` or `across layers`", "prefill", ("budget", "across layers")),
                "budget",
            )

    def _victims(self) -> None:
        if not self._is("victims", "layers"):
            return
        if self._is("prefill", "blocks"):
            message = "a block is evicted before the next layer has seen it, so layers cannot agree on its victims"
            by_heads = offer("write `victims shared by heads`", at=self._span("victims"))
            help = both(by_heads, self._without(", or leave out `prefill blocks`", "prefill"))
            self._refuse(codes.SHARED, "prefill", message, help, "victims")
        counts = [self.parts.exprs[name] for name in ("budget", *COUNTS) if name in self.parts.exprs]
        for part in [*counts, *(keep.count for keep in self.parts.keeps if keep.count is not None)]:
            for name in sorted(self.params.inputs_of(part.expr) & {"layer", *self._by_layer()}):
                message = (
                    f"layers with the same victims keep the same number of tokens, but `{part.span.quoted()}` reads `{name}`"
                )
                labels = [Label(self._span("victims"), "because of this")]
                help = offer("write `victims shared by heads`", at=self._span("victims"))
                self.sink.report(codes.SHARED, part.span, message, help, labels)

    def _by_layer(self) -> set[str]:
        return {tensor.name for tensor in self.tensors if "layers" in tensor.axes}

    def _heads(self) -> None:
        """Report numbers that read per-head tensors where all KV heads of a layer need the same number."""
        differing = {tensor.name for tensor in self.tensors if "heads" in tensor.axes}
        differs = {name for name, part in self.parts.exprs.items() if self.params.inputs_of(part.expr) & differing}
        if "budget" in differs:
            differing.add("budget")
        keeps = [keep.count for keep in self.parts.keeps if keep.count is not None]
        together = [self.parts.exprs[name] for name in PER_HEAD if name in self.parts.exprs] + keeps
        common = [part for name, part in self.parts.exprs.items() if name in _OF_ALL_HEADS] + [*self.inside]
        if "across" in self.parts.exprs or "across_layers.floor" in self.parts.exprs:
            self._alike(together, differing, codes.ACROSS, "heads that share a budget have equal shares", "budget")
        if not self._is("victims", "nobody"):
            self._alike(
                together, differing, codes.SHARED, "heads with the same victims keep the same number of tokens", "victims"
            )
        for part in common:
            self._alike([part], differing, codes.NOT_HERE, "this is one number for all KV heads of a layer")

    def _votes(self) -> None:
        """Report heads that select together but evict separately."""
        by = self.parts.exprs.get("select.by")
        if by is None or not reads_heads(by.expr) or "budget" not in self.parts.exprs or not self._is("victims", "nobody"):
            return
        message = "KV heads that choose together hold the same tokens, but each evicts by itself"
        labels = [Label(self._span("select"), "because of this")]
        name = self.flat.syntax.name.span
        self.sink.report(
            codes.ACROSS, name, message, add("add `victims shared by heads`", ", or leave out the budget"), labels
        )

    def _compared(self) -> None:
        """Report a score over heads that share no budget, or that reads per-slot values of other heads."""
        score = self.parts.exprs.get("score")
        if score is None or not reads_heads(score.expr):
            return
        if "across" not in self.parts.exprs:
            message = (
                "a score belongs to one KV head, and cannot read `over heads`, which is for `across layers by`, for `select`, and for "
                "heads that share a budget"
            )
            help = "`victims shared by heads` averages scores; `budget ... across heads` compares them"
            self.sink.report(codes.ACROSS, score.span, message, help)
        if of_query_heads_unpooled(score.expr):
            message = "a value per query head, as from `over text`, cannot be compared between KV heads by `over heads`"
            self.sink.report(
                codes.ACROSS, score.span, message, "reduce it over the GQA group with a pool: `mean_pool(..., 1)`, say"
            )
        for part in parts_of(score.expr, Reduce, axis=Axis.HEAD):
            if (found := differing_inside(part)) is not None:
                inner = print_expression(found)
                message = f"heads that share a budget hold different tokens, so `over heads` needs one number per head, not `{inner}`"
                self.sink.report(codes.REDUCTION, score.span, message, f"reduce it first: `sum({inner} over slots)`")
                return

    def _of_a_condition(self) -> None:
        """Report a `select where` whose condition differs within a page or group, and a weight in layers that reuse a choice."""
        by, weight = self.parts.exprs.get("select.by"), self.parts.exprs.get("select.weight")
        if weight is not None and "select.choosing.0" in self.parts.exprs:
            message = "a weight belongs to the layer that selects, and layers that reuse its choice have none"
            self.sink.report(codes.REUSED, weight.span, message, "leave out `weight`, or `from layers`")
        statement = self.flat.settings["select"][-1].statement if self._has("select") else None
        if by is None or not isinstance(statement, syn.Select) or statement.count is not None:
            return
        if self._has("pages"):
            message = "`select where` tests single tokens, but `pages` selects whole pages"
            self._refuse(codes.NOT_HERE, "pages", message, "leave out `pages`, or write `select top N by ...`")
        if asks_query_heads(by.expr) and not self._is("group", "each"):
            message = f"`{by.span.quoted()}` may differ between query heads, which select together"
            self.sink.report(codes.EACH, by.span, message, "write `group each`, or `select top N by ...`")

    def _reused(self) -> None:
        """Report layers that reuse the selection of a layer whose tokens differ."""
        if "select.choosing.0" not in self.parts.exprs or "budget" not in self.parts.exprs:
            return
        message = (
            "a layer that reuses a choice must hold the same tokens as the layer that selects, but each evicts by itself"
        )
        labels = [Label(self._span("select"), "because of this")]
        name = self.flat.syntax.name.span
        self.sink.report(
            codes.REUSED, name, message, self._without("leave out the budget, or `from layers`", "select"), labels
        )

    def _each(self) -> None:
        """Report `group each` without a `select`, or where the KV head needs one number."""
        if not self._is("group", "each"):
            return
        if not self._has("select"):
            if self._lacks("select"):
                message = "under `group each` every query head selects for itself, but the policy has no `select`"
                help = offer("write `group mean`, `group max` or `group sum`", ", or add a `select`")
                self._refuse(codes.EACH, "group", message, help)
            return
        own = [self.parts.exprs[name] for name in _OF_A_QUERY if name in self.parts.exprs]
        common = [(part.expr, part.span) for part in self.parts if part not in own]
        common += [(inner, part.span) for part in own for inner in parts_of(part.expr, Reduce, axis=Axis.HEAD)]
        for expr, span in common:
            if asks_query_heads(expr):
                message = f"`group each` reduces nothing, but `{print_expression(expr)}` is one number per KV head"
                labels = [Label(self._span("group"), "because of this")]
                more = ", so that the query heads also select together"
                help = offer("write `group mean`, `group max` or `group sum`", more, at=self._span("group"))
                self.sink.report(codes.EACH, span, message, help, labels)

    def _alike(self, parts: Iterable[Part], differing: set[str], code: Code, rule: str, other: str | None = None) -> None:
        """Report the first number that reads a name in `differing`; `other` is the statement that forbids it."""
        for part in parts:
            for name in sorted(self.params.inputs_of(part.expr) & differing):
                message = f"{rule}, but `{part.span.quoted()}` reads `{name}`, which differs between them"
                labels = [] if other is None else [Label(self._span(other), "because of this")]
                shared = "across layers" if "across_layers.floor" in self.parts.exprs else "across heads"
                help = {"budget": f"leave out `{shared}`", "victims": "leave out `victims`"}.get(other or "", READS_TENSORS)
                self.sink.report(code, part.span, message, help, labels)
                return

    # -- positions ---------------------------------------------------------------------------------------------------

    def _positions(self) -> None:
        if self._is("positions", "compact"):
            for keyword in ("sketch", "pages"):
                if self._has(keyword):
                    message = f"`{keyword}` reads keys as stored, but compact positions rotate them differently"
                    self._refuse(
                        codes.COMPACT,
                        keyword,
                        message,
                        self._without(f"leave out `{keyword}` or `positions`", "positions"),
                        "positions",
                    )
        elif self._has("rope") and (self._has("positions") or self._lacks("positions")):
            message = "`rope` says how compact positions are computed, but this policy uses original positions"
            other = "positions" if self._has("positions") else None
            self._refuse(
                codes.ROPE,
                "rope",
                message,
                both(self._compact(), self._without(", or leave out `rope`", "rope")),
                other,
            )

    # -- pages, sketches, selections ---------------------------------------------------------------------------------

    def _reads(self) -> None:
        self._pages()
        self._sketches()
        if not self._has("select"):
            return
        for part in self.parts:
            if part is not self.parts.exprs.get("select.by") and reads(part.expr, "logit"):
                message = "a query that selects computes no `logit` for skipped tokens, so the policy cannot read it"
                labels = [Label(self._span("select"), "because of this")]
                self.sink.report(
                    codes.LOGIT,
                    part.span,
                    message,
                    instead("read `attn`, which is 0 there", re.sub(r"\blogit\b", "attn", part.span.text)),
                    labels,
                )

    def _pages(self) -> None:
        readers = [part for part in self.parts if _reads_within(part, "page") or _reads_within(part, "next")]
        if readers and "pages" not in self.parts.exprs and self._lacks("pages") and self.flat.module.edition == 1:
            message = "`over page` needs the length of a page"
            self.sink.report(codes.NO_PAGES, readers[0].span, message, add("add `pages 16`", ", say"))
        elif self._has("pages") and not readers and not self._has("select"):
            self._never_read(
                "pages", self._without("select by page, read `max(k over page)`, or leave out `pages`", "pages")
            )
        elif "pages" in self.parts.exprs and not self._has("pages") and self._has("select"):
            self._pages_of_a_selection(readers)

    def _pages_of_a_selection(self, readers: Sequence[Part]) -> None:
        """Report a selection of single tokens in a policy with pages, where whole pages are selected."""
        selecting = [self.parts.exprs[name] for name in ("select.by", "select.measured") if name in self.parts.exprs]
        if selecting and not any(part in readers for part in selecting):
            message = "a policy that reads pages selects whole pages, but this `select` ranks single tokens"
            help = "rank pages: `max(x over slots by page(16))`, with the same key"
            self.sink.report(codes.KEY, self._span("select"), message, help, [Label(readers[0].span, "reads pages")])

    def _sketches(self) -> None:
        by = self.parts.exprs.get("select.by")
        selecting = [self.parts.exprs[name] for name in _OF_A_QUERY if name in self.parts.exprs]
        reads = any(_reads_within(part, "sketch") for part in selecting)
        if by is not None and reads and self._lacks("sketch"):
            message = "`over sketch` needs a statement that chooses dims"
            help = add("add `sketch top 16 dims by abs(q) every 64 queries`", ", say")
            self.sink.report(codes.NO_SKETCH, by.span, message, help)
        elif self._has("sketch") and not reads:
            self._never_read("sketch", self._sketched())

    def _sketched(self) -> Help:
        """Return a help that reads the sketch in `select`."""
        text = "for example `select top 2048 by dot(q, k over sketch)`"
        return offer(text, at=self._span("select")) if self._has("select") else add(text)

    def _never_read(self, keyword: str, help: str) -> None:
        """Report a statement whose result nothing reads, unless a reader may have an error."""
        if not self.flat.broken and not self.sink.failed():
            self._refuse(codes.NEVER_READ, keyword, f"nothing reads what `{keyword}` finds", help)


def _reads_within(part: Part, within: str) -> bool:
    return has(part.expr, Rank, within=within) or has(part.expr, Reduce, within=within)
