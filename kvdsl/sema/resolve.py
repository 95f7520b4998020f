"""Make one flat policy of a policy and those that it extends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvdsl import codes
from kvdsl.diagnostics import Label, Sink, did_you_mean, listed, nearest
from kvdsl.helps import Help, leave_out, offer, prefix
from kvdsl.ir.ops import KEEPS
from kvdsl.sema.editions import override_of
from kvdsl.sema.modules import Module, import_of
from kvdsl.sema.names import check_definition, check_name
from kvdsl.source import Span
from kvdsl.syntax import habits
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.parser import ANYTHING

MAX_STATEMENTS = 256


@dataclass(frozen=True)
class Placed:
    """A statement and its place.

    Attributes:
        module: the file.
        level: the policy's index in the line of inheritance, 0 for the base.
        since: for a name, the level that first defined it.
    """

    statement: syn.Named | syn.Single | syn.Keep
    module: Module
    level: int
    since: int = 0


@dataclass
class FlatPolicy:
    """A policy with everything that it inherits.

    Attributes:
        modules: the files of the policies in the line of inheritance, the base first.
        names: params, lets, tensors and given values by name, in the order of their first definition.
        settings: statements by keyword, for those that stand once, the base first; `budget` keeps the overridden ones.
        broken: what statements with errors may define (see `kvdsl.syntax.parser`).
    """

    syntax: syn.Policy
    module: Module
    modules: list[Module] = field(default_factory=list)
    names: dict[str, Placed] = field(default_factory=dict)
    settings: dict[str, list[Placed]] = field(default_factory=dict)
    keeps: list[Placed] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)

    @property
    def params(self) -> list[str]:
        """The names of its params."""
        return [name for name, placed in self.names.items() if placed.statement.keyword == "param"]


def resolve(policy: syn.Policy, module: Module, sink: Sink) -> FlatPolicy:
    """Return the policy with everything that it inherits."""
    check_name(policy.name, "policy", sink)
    flat = FlatPolicy(policy, module)
    for level, (syntax, where) in enumerate(reversed(_ancestry(policy, module, flat, sink))):
        flat.modules.append(where)
        _Level(flat, syntax, where, sink, level).add()
    return flat


def _ancestry(policy: syn.Policy, module: Module, flat: FlatPolicy, sink: Sink) -> list[tuple[syn.Policy, Module]]:
    """Return the policy, its parent, its parent's parent, and so on."""
    line = [(policy, module)]
    while (parent := line[-1][0].parent) is not None:
        where = line[-1][1]
        found = [item for item in where.policies() if item[0].name.text == parent.text]
        if not found:
            flat.broken.add(ANYTHING)
            if not where.broken:
                _unknown_parent(parent, where, sink)
            break
        if _is_ambiguous(parent, found, where, sink):
            flat.broken.add(ANYTHING)
            break
        if any(item[0] is found[0][0] for item in line):
            flat.broken.add(ANYTHING)
            help = "give one of the two another name" if len(found) > 1 else None
            sink.report(codes.CYCLE, parent.span, f"`{policy.name.text}` extends itself", help)
            break
        line.append(found[0])
    return line


def _is_ambiguous(name: syn.Word, found: list[tuple[syn.Policy, Module]], where: Module, sink: Sink) -> bool:
    """Report a name that several imported files define and the file itself does not; return whether it is one."""
    (first, origin), *others = found
    if origin is where or not others:
        return False
    labels = [Label(first.name.span, "here"), Label(others[0][0].name.span, "and here")]
    message = f"two imported files have a policy `{name.text}`"
    sink.report(codes.DUPLICATE, name.span, message, "import one of them, or give one another name", labels)
    return True


def _unknown_parent(parent: syn.Word, module: Module, sink: Sink) -> None:
    known = [policy.name.text for policy, _ in module.policies() if policy.parent is not parent]
    help = did_you_mean(parent.text, known)
    if help is None:
        help = import_of(parent.text)
    sink.report(codes.UNKNOWN_POLICY, parent.span, f"unknown policy `{parent.text}`", help)


def _without_override(statement: syn.Named | syn.Single | syn.Keep, text: str = "leave out `override`") -> Help:
    """Return a help that removes an `override` without a target, with a bare `keep`, which is no statement."""
    bare = isinstance(statement, syn.Keep) and statement.scope == "nothing"
    return leave_out(text, override_of(statement).to(statement.span) if bare else override_of(statement))


class _Level:
    """Adds the statements of one policy to those that it inherits."""

    def __init__(self, flat: FlatPolicy, policy: syn.Policy, module: Module, sink: Sink, level: int) -> None:
        self.flat, self.policy, self.module, self.sink, self.level = flat, policy, module, sink, level
        self.own: dict[str, Span] = {}
        self.inherited: dict[str, Span] = {}
        self.dropped = False
        self.clauses = policy.clauses or module.edition > 1  # editions above 1 report `extends` and `override` themselves

    def add(self) -> None:
        """Add all statements."""
        self.flat.broken |= self.policy.broken
        if self.module.broken:
            self.flat.broken.add(ANYTHING)
        if len(self.policy.statements) > MAX_STATEMENTS:
            message = f"`{self.policy.name.text}` has more than {MAX_STATEMENTS} statements"
            self.sink.report(codes.TOO_LARGE, self.policy.name.span, message)
        for statement in self.policy.statements[:MAX_STATEMENTS]:
            match statement:
                case syn.Param() | syn.Let() | syn.Tensor() | syn.Given():
                    self._named(statement)
                case syn.Keep():
                    self._keep(statement)
                case _:
                    self._single(statement)

    def _named(self, statement: syn.Named) -> None:
        name = statement.name.text
        if not check_definition(statement, self.sink):
            self.flat.broken.add(name)
            return
        if not self._once(statement, name, codes.DUPLICATE, f"`{name}` is defined twice"):
            return
        before = self.flat.names.get(name)
        if before is not None and before.level != self.level:
            self.inherited[name] = before.statement.span
        if not self._may_change(statement, f"`{name}`", None if before is None else before.statement.span):
            return
        if self.clauses and before is not None:
            statement = _of_new_default(statement, before.statement)
        if before is not None and type(before.statement) is not type(statement):
            del self.flat.names[name]
        since = self.level if before is None else before.since
        self.flat.names[name] = Placed(statement, self.module, self.level, since)

    def _single(self, statement: syn.Single) -> None:
        keyword = statement.keyword
        if not self._once(statement, f"{keyword} ", codes.STATEMENT_TWICE, f"`{keyword}` is given twice"):
            return
        before = self.flat.settings.get(keyword, [])
        inherited = before[-1].statement.span if before else None
        if keyword == "budget" and inherited is None and self.level > 0 and "budget" in self.flat.names:
            param = self.flat.names["budget"]  # possibly overridden here; it still counts as inherited
            inherited = self.inherited.get("budget") if param.level == self.level else param.statement.span
        if self._may_change(statement, f"`{keyword}`", inherited):
            self.flat.settings[keyword] = [*before, Placed(statement, self.module, self.level)]

    def _keep(self, statement: syn.Keep) -> None:
        if self.clauses:
            self._may_change(statement, "`keep`", None)
            self._replace_keeps(statement)
        elif statement.override and not self.dropped:
            self.dropped = True
            inherited = [keep for keep in self.flat.keeps if keep.level != self.level]
            self._may_change(statement, "`keep`", inherited[0].statement.span if inherited else None)
            self.flat.keeps = [keep for keep in self.flat.keeps if keep.level == self.level]
        if statement.scope != "nothing":
            self.flat.keeps.append(Placed(statement, self.module, self.level))
        elif not statement.override:
            help = offer("for example `keep last 16`")
            self.sink.report(codes.SYNTAX, statement.span, f"expected {listed(KEEPS)} after `keep`", help)

    def _replace_keeps(self, statement: syn.Keep) -> None:
        """Remove the inherited `keep` statements of the clause's kind."""
        self.flat.keeps = [one for one in self.flat.keeps if one.level == self.level or _scope(one) != statement.scope]

    def _once(self, statement: syn.Named | syn.Single, key: str, code: codes.Code, message: str) -> bool:
        if key not in self.own:
            self.own[key] = statement.span
            return True
        help = leave_out("leave out one of them", statement.span, self.own[key])
        self.sink.report(code, statement.span, message, help, labels=[Label(self.own[key], "first here")])
        return False

    def _may_change(self, statement: syn.Named | syn.Single | syn.Keep, what: str, inherited: Span | None) -> bool:
        """Return whether `override` is present exactly where it is needed; report it otherwise."""
        if self.clauses:
            if statement.override and self.policy.clauses and self.module.edition == 1:
                message = "`override` is not needed after `with`"
                self.sink.report(
                    codes.NOTHING_TO_OVERRIDE, statement.span, message, _without_override(statement, habits.OVERRIDE)
                )
            return True
        if statement.override and inherited is None:
            if ANYTHING not in self.flat.broken:
                self._nothing_to_override(statement, what)
            return statement.keyword != "keep"
        if not statement.override and inherited is not None:
            first = " ".join(statement.span.text.split()[:1])
            message = f"{what} is inherited, so changing it needs `override`"
            help = prefix(f"write `override {first} ...`", "override")
            labels = [Label(inherited, "inherited from here")]
            self.sink.report(codes.NEEDS_OVERRIDE, statement.span, message, help, labels)
            return False
        return True

    def _nothing_to_override(self, statement: syn.Named | syn.Single | syn.Keep, what: str) -> None:
        parent = self.policy.parent
        if parent is None:
            message = f"{what} overrides nothing: `{self.policy.name.text}` extends no policy"
        else:
            message = f"`{parent.text}` has no {what} to override"
        help = None
        if isinstance(statement, syn.Named):
            near = nearest(statement.name.text, self.flat.names)
            help = None if near is None else offer(f"did you mean `{near}`?", at=statement.name.span)
        self.sink.report(codes.NOTHING_TO_OVERRIDE, statement.span, message, help or _without_override(statement))


def _scope(placed: Placed) -> str:
    assert isinstance(placed.statement, syn.Keep)
    return placed.statement.scope


def _of_new_default(statement: syn.Named, before: syn.Statement) -> syn.Named:
    """Let a clause `param x = 5` inherit the param's unit and range; return other clauses as they are."""
    match statement, before:
        case syn.Param(unit=unit, range=limits), syn.Param():
            return replace(statement, unit=unit or before.unit, range=limits or before.range)
    return statement
