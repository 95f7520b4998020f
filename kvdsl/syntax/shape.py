"""Turn Lark's tree into dataclasses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from lark import Token, Tree

from kvdsl import codes
from kvdsl.diagnostics import Sink, did_you_mean, listed
from kvdsl.helps import instead, offer
from kvdsl.ir.ops import KEEPS
from kvdsl.source import SourceFile, Span
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.parser import ANYTHING, Parsed, parse
from kvdsl.syntax.shape_tests import Child, Shaper, TestShaper, optional, token_of, tree_of, trees

MAX_DEPTH = 100


def parse_module(source: SourceFile, sink: Sink) -> syn.Module:
    """Return a file's syntax. Errors go to the sink; statements with errors are missing."""
    parsed = parse(source, sink)
    if parsed.tree is None:
        return syn.Module(source, broken=True)
    return _Shaper(source, parsed, sink).module(parsed.tree)


class _Shaper(Shaper):
    def __init__(self, source: SourceFile, parsed: Parsed, sink: Sink) -> None:
        super().__init__(source, sink)
        self.parsed = parsed
        self.depth = 0
        self.too_deep = False

    # -- files -------------------------------------------------------------------------------------------------------

    def module(self, tree: Tree[Token]) -> syn.Module:
        items: dict[type, list[Any]] = defaultdict(list)
        for child in trees(tree.children):
            item = self._item(child)
            items[type(item)].append(item)
        return syn.Module(
            self.source,
            editions=tuple(items[syn.Edition]),
            imports=tuple(items[syn.Import]),
            lets=tuple(items[syn.Let]),
            policies=tuple(items[syn.Policy]),
            tests=tuple(items[syn.Test]),
            broken=any(ANYTHING in statement.defines for statement in self.parsed.broken),
        )

    def _item(self, tree: Tree[Token]) -> syn.Edition | syn.Import | syn.Let | syn.Policy | syn.Test:
        if tree.data == "edition":
            return syn.Edition(self._span(tree), str(tree.children[0]))
        if tree.data == "import":
            return self._import(tree)
        if tree.data == "test":
            return self._test(tree)
        return self._let(tree, False) if tree.data == "let" else self._policy(tree)

    def _import(self, tree: Tree[Token]) -> syn.Import:
        name = token_of(tree.children[0])
        shipped = name.type != "STRING"
        return syn.Import(self._span(tree), self._word(name) if shipped else self._string(name), shipped)

    def _policy(self, tree: Tree[Token]) -> syn.Policy:
        name, *parents, body = tree.children
        span = self._span(tree)
        inner = tree_of(body).children
        doc, *statements = (None, *inner) if tree_of(body).data == "clauses" else inner
        broken = [s.defines for s in self.parsed.broken if span.start <= s.span.start <= span.end]
        return syn.Policy(
            span,
            self._word(name),
            self._word(parents[0]) if parents else None,
            optional(lambda part: self._string(_only(part)), doc),
            tuple(map(self._statement, trees(statements))),
            frozenset().union(*broken),
            clauses=tree.data == "with",
        )

    def _test(self, tree: Tree[Token]) -> syn.Test:
        title, *steps = tree.children
        span = self._span(tree)
        broken = any(span.start <= s.span.start <= span.end for s in self.parsed.broken)
        shaper = TestShaper(self.source, self.sink)
        return syn.Test(span, self._string(title), tuple(shaper.step(tree_of(step)) for step in steps), broken)

    # -- statements --------------------------------------------------------------------------------------------------

    def _statement(self, tree: Tree[Token], override: bool = False) -> syn.Statement:
        if tree.data == "override":
            return self._statement(tree_of(tree.children[0]), True)
        kind = str(tree.data)
        if kind == "param":
            return self._param(tree, override)
        if kind == "let":
            return self._let(tree, override)
        if kind in ("tensor", "input_file"):
            return self._tensor(tree, override)
        if kind in ("given", "input"):
            name, default = tree.children
            return syn.Given(self._span(tree), self._word(name), optional(self._expr, default), override)
        if kind == "input_span":
            name, source = tree.children
            self._named("input_span", "from", source, 1)
            return syn.Given(self._span(tree), self._word(name), None, override, self._word(source))
        if kind.startswith("keep_"):
            return self._keep(tree, override)
        return self._single(tree, override)

    def _param(self, tree: Tree[Token], override: bool) -> syn.Param:
        name, unit, value, range_ = tree.children
        return syn.Param(
            self._span(tree),
            self._word(name),
            optional(self._word, unit),
            self._expr(value),
            optional(self._range, range_),
            override,
        )

    def _range(self, child: Child) -> syn.Range:
        low, _, high = tree_of(child).children
        return syn.Range(self._span(tree_of(child)), optional(self._expr, low), optional(self._expr, high))

    def _let(self, tree: Tree[Token], override: bool) -> syn.Let:
        name, names, value = tree.children
        return syn.Let(self._span(tree), self._word(name), optional(self._parameters, names), self._expr(value), override)

    def _parameters(self, child: Child) -> tuple[syn.Parameter, ...]:
        return tuple(map(self._parameter, trees(tree_of(child).children)))

    def _parameter(self, tree: Tree[Token]) -> syn.Parameter:
        name, default = tree.children
        return syn.Parameter(self._span(tree), self._word(name), optional(self._expr, default))

    def _tensor(self, tree: Tree[Token], override: bool) -> syn.Tensor:
        name, *axes, file = tree.children
        words = tuple(self._word(axis) for axis in axes)
        return syn.Tensor(self._span(tree), self._word(name), words, self._string(file), override)

    def _keep(self, tree: Tree[Token], override: bool) -> syn.Keep:
        scope = str(tree.data).removeprefix("keep_")
        parts = zip(KEEPS[scope].parts if scope in KEEPS else (), map(self._expr, tree.children), strict=True)
        return syn.Keep(self._span(tree), scope, override=override, **dict(parts))

    def _single(self, tree: Tree[Token], override: bool) -> syn.Single:
        keyword, span, children = str(tree.data), self._span(tree), tree.children
        if keyword == "budget":
            value, most, *shared = children
            return syn.Budget(span, self._expr(value), optional(self._inside, most), *self._shared(shared), override)
        if keyword == "select":
            counted = self._expr(children[0]) if len(children) == 4 else None
            by, weight, layers = children[-3:]
            where = None if layers is None else tree_of(layers)
            range_ = self._range(_only(where)) if where is not None and where.data == "within" else None
            choosing = tuple(map(self._expr, where.children)) if where is not None and range_ is None else ()
            return syn.Select(span, counted, self._expr(by), optional(self._expr, weight), range_, choosing, override)
        if keyword == "sketch":
            count, dims, by, every, queries = children
            self._named("sketch", "sketch top N", dims)
            self._named("sketch", "sketch ... every N", queries, 1)
            return syn.Sketch(span, self._expr(count), self._expr(by), self._expr(every), override)
        if keyword == "pages":
            value, after = children
            return syn.Pages(span, self._expr(value), optional(self._expr, after), override)
        if keyword == "layers":
            return syn.Layers(span, self._range(children[0]), override)
        if keyword in _WORDS:
            number = children[1] if len(children) > 1 else None
            return syn.Setting(span, keyword, optional(self._expr, number), self._word(children[0]), override)
        return syn.Setting(span, keyword, self._expr(children[-1]), override=override)

    def _inside(self, child: Child) -> syn.Expr:
        return self._expr(_only(child))

    def _shared(self, children: Sequence[Child]) -> tuple[syn.Across | None, syn.AcrossLayers | None]:
        """Return the sharers of a budget: a layer's heads, all layers, or both."""
        found: dict[str, tuple[Span, list[syn.Expr | None]]] = {}
        for child in map(tree_of, children):
            sharers, *rest = child.children
            word = self._named("across", "across", sharers)
            by, floor = (optional(self._expr, part) for part in rest)
            if word in found:
                self.sink.report(codes.DUPLICATE, self._span(child), f"`across {word}` is given twice")
            elif word == "heads" and by is not None:
                message = "the heads of a layer share a budget by their scores, so `across heads` takes no `by`"
                help = instead("layers do: write `across layers`", "layers", self._word(sharers).span)
                self.sink.report(codes.ACROSS, by.span, message, help)
            elif word is not None:
                found[word] = self._span(child), [by, floor]
        heads, layers = found.get("heads"), found.get("layers")
        return (
            None if heads is None else syn.Across(heads[0], heads[1][1]),
            None if layers is None else syn.AcrossLayers(layers[0], *layers[1]),
        )

    def _named(self, rule: str, what: str, child: Child, place: int = 0) -> str | None:
        """Return the word at a place of a rule; None after a report that it is not allowed there."""
        word, known = self._word(child), syn.AXES[rule][place]
        if word.text in known:
            return word.text
        help = did_you_mean(word.text, known) or offer(f"write {listed(known)}")
        self.sink.report(codes.AXIS, word.span, f"`{what}` takes {listed(known)}, not `{word.text}`", help)
        return None

    # -- expressions -------------------------------------------------------------------------------------------------

    def _expr(self, child: Child) -> syn.Expr:
        if self.depth >= MAX_DEPTH:
            span = self._span(tree_of(child))
            if not self.too_deep:
                text = span.file.text[: span.start].rpartition("\n")[2]
                nested = text.count("(") - text.count(")") >= MAX_DEPTH // 2
                much = f"is nested more than {MAX_DEPTH} deep" if nested else f"has more than {MAX_DEPTH} operators in a row"
                self.sink.report(codes.TOO_DEEP, span, f"the expression {much}")
            self.too_deep = True
            return syn.Broken(span)
        self.depth += 1
        try:
            return self._expr_of(tree_of(child))
        finally:
            self.depth -= 1
            self.too_deep = self.too_deep and self.depth > 0

    def _expr_of(self, tree: Tree[Token]) -> syn.Expr:
        span, children = self._span(tree), tree.children
        if tree.data == "number":
            return self._number(span, str(children[0]))
        if tree.data == "name":
            return syn.Name(span, str(children[0]))
        if tree.data == "unary":
            return syn.Unary(span, str(children[0]), self._expr(children[1]))
        if tree.data == "binary":
            left, op, right = children
            return syn.Binary(span, str(op), self._expr(left), self._expr(right))
        if tree.data == "member":
            owner, value = children
            named = syn.Name(self._word(value).span, str(value)) if isinstance(value, Token) else self._expr(value)
            return syn.Member(span, self._word(owner), named)
        function, *arguments = children
        return syn.Call(span, self._word(function), tuple(map(self._argument, trees(arguments))))

    def _number(self, span: Span, text: str) -> syn.Expr:
        value = float(text)
        if value != float("inf"):
            return syn.Constant(span, value)
        self.sink.report(codes.NUMBER, span, f"the number `{span.quoted()}` is too large")
        return syn.Broken(span)

    def _argument(self, tree: Tree[Token]) -> syn.Argument:
        keyword, value, over, only, key = tree.children
        ranges = [self._span(part) for part in trees((over, only, key))]
        return syn.Argument(
            self._span(tree),
            self._expr(value),
            optional(self._word, keyword),
            optional(self._over, over),
            optional(self._inside, only),
            optional(self._inside, key),
            ranges[0].to(ranges[-1]) if ranges else None,
        )

    def _over(self, child: Child) -> syn.Over:
        tree = tree_of(child)
        span = self._span(tree)
        if tree.data == "over_last":
            count, queries = tree.children
            self._named("over_last", "over last N", queries)
            return syn.Over(span, syn.Word(span, "queries"), self._expr(count))
        if tree.data == "over_next":
            return syn.Over(span, syn.Word(span, "next page"))
        axis, other = tree.children
        if tree.data == "over_after":
            return syn.Over(span, self._word(axis), after=self._expr(other))
        return syn.Over(span, self._word(axis), name=optional(self._word, other))


_WORDS = {"victims", "cap", "when", "group", "positions", "storage", "rope", "prefill"}


def _only(child: Child) -> Child:
    """Return the single part of a tree."""
    (part,) = tree_of(child).children
    return part
