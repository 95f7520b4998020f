"""Check a policy's statements one by one; `kvdsl.sema.combinations` checks them against each other."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from kvdsl import codes
from kvdsl.diagnostics import did_you_mean, listed
from kvdsl.helps import both, offer
from kvdsl.ir import nodes as ir
from kvdsl.ir.ops import KEEPS
from kvdsl.sema.budget import Budget
from kvdsl.sema.needs import SELECTED, is_measured, looks_back, reads_data, reads_heads, selects, sketches
from kvdsl.sema.parts import RANKS, SCORE, WEIGHS, CheckedKeep, Fields, Parts
from kvdsl.sema.resolve import FlatPolicy, Placed
from kvdsl.sema.statics import Bounded, Part
from kvdsl.sema.values import Value
from kvdsl.source import Span
from kvdsl.syntax import habits
from kvdsl.syntax import nodes as syn

MAX_HEAD_SIZE = 256

_BLOCKS = {"storage": ("block", "storage blocks 16"), "prefill": ("prefill_block", "prefill blocks of 512")}


class Statements:
    """Checks the statements of one policy."""

    def __init__(self, flat: FlatPolicy, fields: Fields) -> None:
        self.flat, self.fields, self.sink = flat, fields, fields.sink
        self.expressions, self.parts = fields.expressions, fields.parts

    def check(self) -> Parts:
        """Check all statements."""
        if "pages" in self.flat.settings:
            self._pages(self.flat.settings["pages"][-1])
        Budget(self.flat, self.fields).check()
        for keyword in self.flat.settings:
            placed = self.flat.settings[keyword][-1]
            match placed.statement:
                case syn.Select() as statement:
                    self._select(statement, placed)
                case syn.Sketch() as statement:
                    self._sketch(statement, placed)
                case syn.Layers(range=layers):
                    self.fields.range("layers", "`layers`", layers, placed)
                case syn.Setting() as statement:
                    self._setting(statement, placed)
        for keyword, known in syn.WORDS.items():
            self.parts.words.setdefault(keyword, known[0])
        self.parts.keeps = [keep for placed in self.flat.keeps if (keep := self._keep(placed)) is not None]
        self._pages_of_keys()
        return self.parts

    # -- single statements -------------------------------------------------------------------------------------------

    def _setting(self, statement: syn.Setting, placed: Placed) -> None:
        keyword = statement.keyword
        if statement.word is not None:
            self._word(keyword, statement.word, statement.value, placed)
        elif statement.value is not None and keyword == "score":
            self._score(statement.value, placed)
        elif statement.value is not None:
            self.fields.number(keyword, statement.value, placed, f"`{keyword}`")

    def _word(self, keyword: str, word: syn.Word, value: syn.Expr | None, placed: Placed) -> None:
        known = syn.WORDS[keyword]
        self.parts.words[keyword] = word.text
        if word.text not in known:
            meant = habits.SETTINGS.get(keyword, {}).get(word.text)
            help = did_you_mean(word.text, known) if meant is None else offer(f"write `{meant}`")
            help = help or both(f"`{keyword}` is ", offer(listed(known)))
            self.sink.report(codes.OPTION, word.span, f"`{keyword}` cannot be `{word.text}`", help)
        elif word.text == "blocks" and value is None:
            help = offer(f"for example `{_BLOCKS[keyword][1]}`", at=placed.statement.span)
            self.sink.report(codes.BLOCKS, word.span, f"`{keyword} blocks` needs the number of tokens in a block", help)
        elif keyword == "when" and value is not None:
            self.parts.words["prefill"] = "blocks"
            self.fields.number("prefill_block", value, placed, "the size of a prompt's blocks", 1)
        elif word.text == "blocks" and value is not None:
            self.fields.number(_BLOCKS[keyword][0], value, placed, f"the size of `{keyword} blocks`", 1)
        elif value is not None:
            message = f"`{keyword} {word.text}` takes no number"
            help = offer(f"did you mean `{_BLOCKS[keyword][1]}`?", at=placed.statement.span)
            self.sink.report(codes.BLOCKS, value.span, message, help)

    def _score(self, node: syn.Expr, placed: Placed) -> None:
        value = self.fields.value(node, placed, SCORE)
        mean = None if value is None else _mean_over_heads(value)
        if value is not None and mean is not None and not {"across", "across_layers.floor"} & self.parts.exprs.keys():
            self.parts.words["victims"] = "heads"
            value = replace(value, expr=mean.body)
        if value is not None and self.fields.orders_slots(value, node.span, SCORE):
            self.parts.exprs["score"] = Part(value.expr, node.span)
        else:
            self.flat.broken.add("score")

    def _select(self, statement: syn.Select, placed: Placed) -> None:
        if statement.count is not None:
            self._select_count(statement.count, placed)
        value = self.fields.value(statement.by, placed, RANKS)
        if (
            value is not None
            and selects(value, statement.by.span, self.sink, RANKS)
            and (statement.count is not None or self._holds_of_slots(value, statement.by.span))
        ):
            self.parts.exprs["select.by"] = Part(value.expr, statement.by.span)
            if statement.count is None:
                self.parts.exprs["select.count"] = Part(ir.Input(name="everything"), statement.by.span)
        if statement.weight is not None:
            self._select_weight(statement.weight, placed)
        if statement.range is not None:
            self.fields.range("select", "`select`", statement.range, placed)
        for index, node in enumerate(statement.choosing):
            self.fields.layer(
                f"select.choosing.{index}", node, placed, "a layer that chooses", "a layer that chooses for those above"
            )

    def _holds_of_slots(self, value: Value, span: Span) -> bool:
        """Return whether `select where` can use a value; report it otherwise."""
        return self.expressions.condition(value, span, "`select where`") and self._asks_no_heads(
            value, span, "`select where`"
        )

    def _asks_no_heads(self, value: Value, span: Span, what: str) -> bool:
        if reads_heads(value.expr):
            message = f"{what} is for the tokens of one KV head, and cannot read `over heads`"
            self.sink.report(codes.ACROSS, span, message, "write `select top N by ...`, with which heads choose together")
            return False
        return True

    def _select_weight(self, node: syn.Expr, placed: Placed) -> None:
        value = self.fields.value(node, placed, WEIGHS)
        if (
            value is None
            or not selects(value, node.span, self.sink, WEIGHS)
            or not self._asks_no_heads(value, node.span, WEIGHS)
        ):
            return
        self.parts.exprs["select.weight"] = Part(value.expr, node.span)

    def _select_count(self, node: syn.Expr, placed: Placed) -> None:
        """Add the number of selected tokens: fixed, or computed by each query."""
        value = self.expressions.check(node, self.fields.scope(placed))
        if value is None or not reads_data(value.expr):
            self.fields.number("select.count", node, placed, SELECTED, 1)
        elif self.fields.may_read(value, node.span, SELECTED) and self._asks_ahead(value, node.span, SELECTED):
            self.parts.exprs["select.measured"] = Part(value.expr, node.span)
            self.parts.exprs["select.count"] = Part(ir.Input(name="everything"), node.span)

    def _asks_ahead(self, value: Value, span: Span, what: str) -> bool:
        """Return whether a query can compute a count before it attends; report it otherwise."""
        return not looks_back(value, span, what, self.sink) and is_measured(
            replace(value, axes=value.axes - {ir.Axis.QUERY}), span, what, self.sink.report
        )

    def _sketch(self, statement: syn.Sketch, placed: Placed) -> None:
        self.fields.number("sketch.count", statement.count, placed, "the count of `sketch`", 1, MAX_HEAD_SIZE)
        self.fields.number("sketch.every", statement.every, placed, "the interval of `sketch`", 1)
        value = self.fields.value(statement.by, placed, "what `sketch` ranks by")
        if value is not None and value.spaces - {""}:
            self.expressions.reductions.mixed(statement.by.span, value)
        elif value is not None and sketches(value, statement.by.span, self.sink):
            self.parts.exprs["sketch.by"] = Part(value.expr, statement.by.span)

    def _pages(self, placed: Placed) -> None:
        statement = cast(syn.Pages, placed.statement)
        self.fields.number("pages", statement.value, placed, "`pages`", 1)
        if statement.after is not None:
            self.fields.number("pages_after", statement.after, placed, "the beginning of `pages`")
        size, after = (self.parts.expr(name) for name in ("pages", "pages_after"))
        self.expressions.ranges.pages = None if size is None else (size, after)

    def _pages_of_keys(self) -> None:
        """Add the pages that ranges use, if no statement defines them."""
        if self.expressions.ranges.pages is None or self.expressions.ranges.pages_span is None:
            return
        span = self.expressions.ranges.pages_span
        for name, expr, least in zip(("pages", "pages_after"), self.expressions.ranges.pages, (1, 0), strict=True):
            if expr is not None:
                self.parts.exprs[name] = Part(expr, span)
                self.parts.bounded.append(
                    Bounded("the size of a page" if least else "the first page's beginning", Part(expr, span), least)
                )

    # -- keeps -------------------------------------------------------------------------------------------------------

    def _keep(self, placed: Placed) -> CheckedKeep | None:
        statement = cast(syn.Keep, placed.statement)
        form = f"`keep {statement.scope}`"
        count = by = None
        if statement.count is not None:
            count = self.fields.part(statement.count, placed, f"the count of {form}", per_head=True)
        if statement.by is not None:
            by = self._keep_by(statement.by, placed, form, condition=KEEPS[statement.scope].holds)
        if (statement.count is not None and count is None) or (statement.by is not None and by is None):
            return None
        if count is not None:
            self.parts.bounded.append(Bounded(form, count, counts=True))
        exprs = {name: part.expr for name, part in (("count", count), ("by", by)) if part is not None}
        keep = ir.Keep(scope=statement.scope, **exprs)
        return CheckedKeep(keep, count, by, statement.span)

    def _keep_by(self, node: syn.Expr, placed: Placed, form: str, *, condition: bool) -> Part | None:
        what = "a condition on slots" if condition else f"what {form} ranks by"
        value = self.fields.value(node, placed, what)
        if value is None or (condition and not self.expressions.condition(value, node.span, form)):
            return None
        return Part(value.expr, node.span) if self.fields.orders_slots(value, node.span, what) else None


def _mean_over_heads(value: Value) -> ir.Reduce | None:
    """Return a score that is a mean over heads, so that all KV heads of a layer evict the same tokens; None for others."""
    match value.expr:
        case ir.Reduce(op="mean", axis=ir.Axis.HEAD, where=None) as mean if ir.Axis.SLOT in value.axes:
            return mean
    return None
