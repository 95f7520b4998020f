"""Check a flat policy and build its IR."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvdsl import codes
from kvdsl.diagnostics import Sink
from kvdsl.helps import offer
from kvdsl.ir import nodes as ir
from kvdsl.ir.ops import INPUTS
from kvdsl.ir.visitors import walk
from kvdsl.passes.normal import is_mixed
from kvdsl.sema.combinations import Combinations
from kvdsl.sema.expressions import Expressions
from kvdsl.sema.lets import check_lets, module_scope
from kvdsl.sema.names import check_stem
from kvdsl.sema.params import Params
from kvdsl.sema.parts import COUNTS, Fields, Parts
from kvdsl.sema.protected import Protected
from kvdsl.sema.resolve import FlatPolicy, Placed
from kvdsl.sema.scope import Bound, Definition, GivenName, LetName, ParamName, Scope, TensorName
from kvdsl.sema.settings import Setting
from kvdsl.sema.statements import Statements
from kvdsl.sema.statics import Statics
from kvdsl.sema.tensors import check_tensor
from kvdsl.sema.values import Value, per_token
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.parser import ANYTHING


@dataclass
class Checker:
    """Checker of one policy."""

    flat: FlatPolicy
    prelude: Scope
    sink: Sink
    settings: Mapping[str, Setting] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.broken = self.flat.broken
        self.expressions = Expressions(self.sink, lenient=ANYTHING in self.broken)
        self.params = Params(self.flat, self.settings, self._value, self.sink)
        outer = {module: module_scope(module, self.prelude, self.sink) for module in self.flat.modules}
        self.scopes = [Scope({}, outer[module]) for module in self.flat.modules]
        self.own: dict[str, Definition] = {}

    def check(self) -> ir.Policy | None:
        """Return the policy's IR, or None after reports."""
        self._define()
        self.params.check()
        parts = Statements(self.flat, Fields(self.params, self.expressions, self._scope_at, self.sink)).check()
        inside = [number.part for number in self.expressions.bounded]
        Combinations(self.flat, parts, self.sink, self.params, self._tensors(), inside).check()
        read = self._read(parts)
        self._unused(read)
        if not self.sink.failed():
            self._statics(parts)
        check_stem(self.flat.module.file, self.sink)  # last, so that it hides no other error
        if self.sink.failed():
            return None
        return self._policy(parts, read)

    # -- names -------------------------------------------------------------------------------------------------------

    def _define(self) -> None:
        """Define the policy's own names, except `budget`: in expressions it means the tokens kept, not the param."""
        for name, placed in self.flat.names.items():
            if (definition := self._definition(name, placed)) is not None:
                self._own(name, definition, placed.since)
        for name in self.broken - self.own.keys():
            self._own(name, Bound(None), 0)

    def _definition(self, name: str, placed: Placed) -> Definition | None:
        match placed.statement:
            case syn.Let() as let:
                return LetName(let, self.scopes[placed.level])
            case syn.Tensor() as statement:
                tensor = check_tensor(statement, placed.module.file, self.sink)
                return Bound(None) if tensor is None else TensorName(tensor)
            case syn.Given() as given:
                return self._given(given, placed)
        return None if name == "budget" else ParamName(name)

    def _own(self, name: str, definition: Definition, since: int) -> None:
        """Define a name for the level that introduced it and later ones; earlier levels see it only if they have no such name."""
        self.own[name] = definition
        for level, scope in enumerate(self.scopes):
            if level >= since or scope.find(name) is None:
                scope.names[name] = definition

    def _given(self, statement: syn.Given, placed: Placed) -> Definition:
        """Define a span, or a value from the caller whose default is a constant."""
        if statement.source is not None:
            return GivenName(ir.Given(name=statement.name.text, default=0, source="spans"))
        default = None
        if statement.default is not None:
            value = self._value(statement.default, placed)
            if value is None:
                return Bound(None)
            if value.constant is None:
                span = statement.default.span
                message = f"the default of a given value is a constant, but `{span.quoted()}` is not"
                self.sink.report(
                    codes.GIVEN_DEFAULT,
                    span,
                    message,
                    offer(f"for example `given {statement.name.text} = 0`", at=statement.span),
                )
                return Bound(None)
            default = value.constant
        return GivenName(ir.Given(name=statement.name.text, default=default))

    @property
    def scope(self) -> Scope:
        """The scope of the policy's own statements, as opposed to inherited ones."""
        return self.scopes[-1]

    def _tensors(self) -> list[ir.Tensor]:
        return [one.tensor for one in syn.of_kind(self.own.values(), TensorName)]

    def _scope_at(self, placed: Placed) -> Scope:
        return self.scopes[placed.level]

    def _value(self, node: syn.Expr, placed: Placed) -> Value | None:
        return self.expressions.check(node, self._scope_at(placed))

    # -- the policy as a whole ---------------------------------------------------------------------------------------

    def _read(self, parts: Parts) -> set[str]:
        """Collect the params, tensors and given values that statements read, directly or through the defaults of params."""
        read: set[str] = set()
        exprs = [part.expr for part in parts]
        while exprs:
            found = {part.name for expr in exprs for part in walk(expr) if part.kind in ("param", "tensor", "given")} - read
            read |= found
            exprs = [self.params.checked[name].ir.default for name in found if name in self.params.checked]
        return read

    def _unused(self, read: set[str]) -> None:
        """Check lets that no statement uses; warn of them and of unread params, tensors and given values."""
        outer = self.scope.outer
        definitions = [*self.own.values(), *(() if outer is None else outer.names.values())]
        lets = [one for one in syn.of_kind(definitions, LetName) if not one.used]
        check_lets(lets, self.expressions)
        if self.broken or self.sink.failed():
            return
        rest = [placed.statement for name, placed in self.flat.names.items() if name not in read]
        unread = [statement.name for statement in rest if isinstance(statement, (syn.Param, syn.Tensor, syn.Given))]
        for word in [*(definition.let.name for definition in lets), *unread]:
            if word.span.file is self.flat.module.file:
                self.sink.report(codes.UNUSED, word.span, f"`{word.text}` is never used")
        for word in unread:
            if self._is_dropped(word.text, read) and word.text in self.settings:
                help = f"`{self.flat.syntax.name.text}` overrides what read it"
                message = f"nothing reads the inherited param `{word.text}` any more"
                self.sink.report(codes.UNKNOWN_SETTING, self.settings[word.text].span, message, help)

    def _is_dropped(self, name: str, read: set[str]) -> bool:
        """Return whether a param is inherited and no longer read; the policy then does not have it."""
        return name not in read and self.flat.names[name].module is not self.flat.module

    def _statics(self, parts: Parts) -> None:
        """Check what follows from the policy's numbers with the params at their defaults."""
        defaults = {name: param.ir.default for name, param in self.params.checked.items()}
        statics = Statics(self.sink, defaults, newest=int(self._edition(parts) == 1))
        statics.check_budget(parts.exprs.get("budget"))
        for number in [*self.expressions.bounded, *parts.bounded]:
            statics.check_bounds(number)
        statics.check_layers(parts.exprs)
        keeps = [(keep.ir.scope, keep.count, keep.span) for keep in parts.keeps if keep.count is not None]
        statics.check_keeps(keeps, parts.exprs)
        if not self.sink.failed():
            Protected(self.sink, parts, statics.known, grows=bool(self.flat.settings.get("budget"))).check()
            statics.warn_of_drops(parts.exprs, parts.words["cap"] == "hard")
            if parts.words["when"] == "both" and "layers" not in self.flat.settings:
                statics.warn_of_selection(parts.exprs)
            statics.warn_of_histories([part.expr for part in parts], self.expressions.ranges.histories)

    def _edition(self, parts: Parts) -> int | None:
        """Return the edition of the file that first defined a budget or selection; None without either.

        In edition 1 the newest token stays without a `keep last`, and all kinds of `keep` yield alike.
        """
        placed = [self.flat.settings[keyword][0].level for keyword in ("budget", "select") if keyword in self.flat.settings]
        if "budget" in self.flat.names and parts.expr("budget") is not None:
            placed.append(self.flat.names["budget"].since)
        return self.flat.modules[min(placed)].edition if placed else None

    def _select(self, parts: Parts, keeps: list[ir.Keep]) -> Any:
        """Build the `select` statement with its choosing layers. `select where c` counts the slots where c holds."""
        found = _built(ir.Select, "select", parts)
        if found is None:
            return None
        choosing = [part.expr for name, part in parts.exprs.items() if name.startswith("select.choosing.")]
        statement = self.flat.settings["select"][-1].statement
        counts = isinstance(statement, syn.Select) and statement.count is None
        measured = _held(found.by, keeps) if counts else found.measured
        return found.model_copy(update={"choosing": tuple(choosing), "measured": measured})

    def _policy(self, parts: Parts, read: set[str]) -> ir.Policy:
        keeps, edition = [keep.ir for keep in parts.keeps], self._edition(parts)
        if edition == 1 and not any(keep.scope == "last" for keep in keeps):
            keeps.append(ir.Keep(scope="last", count=ir.Number(value=1)))
        nothing = ir.Keep(scope="last", count=ir.Number(value=0))
        keeps = [keep for keep in keeps if keep != nothing]
        words: dict[str, Any] = dict(parts.words)
        words["victims"] = "own" if words["victims"] == "nobody" else words["victims"]
        fields: dict[str, Any] = {name: expr for name in COUNTS if (expr := parts.expr(name)) is not None}
        fields |= {
            name: parts.expr(name)
            for name in ("budget", "measured", "across", "score", "pages", "pages_after", "block", "prefill_block")
        }
        return ir.Policy(
            name=self.flat.syntax.name.text,
            stem=self.flat.module.file.stem,
            doc=_docstring(self.flat.syntax),
            params=tuple(param.ir for name, param in self.params.checked.items() if not self._is_dropped(name, read)),
            tensors=tuple(tensor for tensor in self._tensors() if tensor.name in read),
            given=self._per_token(read),
            keeps=tuple(keeps),
            ends_last=edition != 1 and parts.expr("budget") is not None and is_mixed(keeps),
            select=self._select(parts, keeps),
            sketch=_built(ir.Sketch, "sketch", parts),
            across_layers=_built(ir.AcrossLayers, "across_layers", parts),
            layers=_built(ir.LayerRange, "layers", parts),
            **fields,
            **words,
        )

    def _per_token(self, read: set[str]) -> tuple[ir.Given, ...]:
        """Return the per-token values that are read: declared ones, then inputs."""
        own = [one.given for one in syn.of_kind(self.own.values(), GivenName) if one.given.name in read]
        return (*own, *(per_token(name) for name, row in INPUTS.items() if row.per_token and name in read))


def _docstring(policy: syn.Policy) -> str:
    """Return the policy's docstring, or for a clause-only policy a description of its clauses."""
    if policy.doc is not None:
        return clean_docstring(policy.doc.text)
    if policy.parent is None or not policy.clauses:
        return ""
    return f"{policy.parent.text} with {', '.join(f'`{statement.span.quoted()}`' for statement in policy.statements)}."


def _held(condition: ir.Expr, keeps: list[ir.Keep]) -> ir.Expr:
    """Count the slots that a condition, `keep first` or `keep last` selects: those two are always selected."""
    for keep in keeps:
        if keep.row.place and keep.count is not None:
            within = ir.call("<", ir.Input(name=keep.row.place), ir.call("floor", keep.count))
            condition = ir.call("or", condition, within)
    return ir.Reduce(op="sum", axis=ir.Axis.SLOT, body=condition)


def _built(node: type[Any], keyword: str, parts: Parts) -> Any:
    """Build the IR node of a statement from its expressions; None without any."""
    fields = {name: parts.expr(f"{keyword}.{name}") for name in node.model_fields if f"{keyword}.{name}" in parts.exprs}
    return node(**fields) if fields else None


def clean_docstring(text: str) -> str:
    """Remove the indentation of a docstring's lines."""
    first, *rest = text.strip().split("\n")
    margin = min((len(line) - len(line.lstrip()) for line in rest if line.strip()), default=0)
    return "\n".join([first.rstrip(), *(line[margin:].rstrip() for line in rest)])
