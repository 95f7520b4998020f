"""Check the ranges of reductions, and which of them count the policy's pages."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvdsl import codes
from kvdsl.helps import offer
from kvdsl.ir.nodes import Axis, Expr
from kvdsl.passes.normal import Pages, page_of_key
from kvdsl.sema.reductions import Over, Reductions
from kvdsl.sema.scope import Scope, SlotName
from kvdsl.sema.uses import Uses
from kvdsl.sema.values import Value
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn


@dataclass
class Ranges:
    """Checks ranges with the checks of the expressions in them: any, those that are fixed, and conditions.

    Attributes:
        histories: the place of each `over last N queries`, by N.
        pages: the length of pages and the tokens before the first one, from the first range by pages.
        pages_span: the place of that range.
    """

    uses: Uses
    reductions: Reductions
    check: Callable[[syn.Expr, Scope], Value | None]
    fixed: Callable[..., Value | None]
    condition: Callable[[Value, Span, str], bool]
    histories: dict[Expr, Span] = field(default_factory=dict)
    pages: Pages | None = None
    pages_span: Span | None = None

    def of(self, argument: syn.Argument, scope: Scope, default: Over) -> tuple[Over | None, Scope]:
        """Return the range of a reduction's argument, and the scope of its body."""
        over, inner = self._axis(argument.over, scope, default), scope
        if over is not None and argument.over is not None and argument.over.name is not None:
            name = argument.over.name
            if over.axis is not Axis.SLOT or over.within != "all":
                unnamed = re.sub(r"\s+as\s+\w+$", "", argument.over.span.text)
                help = offer(f"write `{unnamed}`", ", or `over slots as j`", at=argument.over.span)
                self.uses.report(codes.AXIS, name.span, "only slots have names", help)
                return None, scope
            over, inner = replace(over, axis=Axis.OTHER, within="self"), Scope({name.text: SlotName()}, scope)
        where = by = None
        if argument.only is not None:
            where = self.check(argument.only, inner)
            if where is not None and not self.condition(where, argument.only.span, "`where`"):
                where = None
        if argument.key is not None:
            by = self.check(argument.key, scope)
        if over is None or (where is None) != (argument.only is None) or (by is None) != (argument.key is None):
            return None, inner
        over, handed = replace(over, where=where, by=by), self.uses.handed
        return over if handed is None else handed.to(over, argument.over is None), inner

    def _axis(self, over: syn.Over | None, scope: Scope, default: Over) -> Over | None:
        """Return the axis of a range, or None after a report."""
        if over is None:
            return default
        if over.last is None:
            found = self.reductions.axis(over)
            if found is None or over.after is None:
                return found
            after = self.fixed(over.after, scope, "the N of `over text after N`")
            if found.within != "text":
                message = f"only `over text` takes `after N`, not `over {over.axis.text}`"
                self.uses.report(codes.AXIS, over.span, message, offer(f"write `over {over.axis.text}`"))
                return None
            return None if after is None else replace(found, after=after)
        last = self.fixed(over.last, scope, "the N of `over last N queries`", 1)
        if last is None:
            return None
        self.histories.setdefault(last.expr, self.uses.place(over.span))
        return Over(last=last)

    def is_page(self, key: Expr) -> bool:
        """Return whether a key counts the policy's pages; all pages have one size."""
        found = page_of_key(key)
        return found is not None and (self.pages is None or self.pages == found)

    def with_pages(self, node: syn.Call, over: Over, body: Value) -> tuple[Over, Value]:
        """Turn a range by a key that counts pages into a range over pages."""
        if over.by is None or over.axis is not Axis.SLOT or not self.is_page(over.by.expr):
            return over, body
        if self.pages is None:
            self.pages, self.pages_span = page_of_key(over.by.expr), self.uses.place(node.span)
        return replace(over, within="next" if over.within == "next" else "page", by=None), body
