"""Check whole files: a policy, a library of lets, or tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvdsl import codes
from kvdsl.diagnostics import Diagnostic, DiagnosticError, Label, Sink
from kvdsl.files import read_resource, resource
from kvdsl.ir.nodes import Policy
from kvdsl.sema.check import Checker
from kvdsl.sema.lets import check_library, prelude_scope
from kvdsl.sema.modules import Loader, Module
from kvdsl.sema.resolve import resolve
from kvdsl.sema.scope import Scope
from kvdsl.sema.settings import read_settings
from kvdsl.source import Combined, SourceFile
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.reader import read_source
from kvdsl.syntax.shape import parse_module

if TYPE_CHECKING:
    from kvdsl.scenarios.check import Scenario


@dataclass(frozen=True)
class Analysis:
    """The result of checking a file.

    Attributes:
        policies: the file's flat, checked policy; empty after errors and for a library.
        diagnostics: errors and warnings, sorted by place.
        scenarios: the error-free tests of a file of tests.
        read: the files read: this one and its imports.
        text: the source, if it could be read.
    """

    policies: tuple[Policy, ...]
    diagnostics: tuple[Diagnostic, ...]
    scenarios: tuple[Scenario, ...] = ()
    read: frozenset[Path] = frozenset()
    text: SourceFile | None = field(default=None, compare=False)

    @property
    def ok(self) -> bool:
        """Whether the file has no errors."""
        return all(found.severity != "error" for found in self.diagnostics)

    @property
    def policy(self) -> Policy:
        """The file's policy.

        Raises:
                DiagnosticError: if there is none.
        """
        if self.policies:
            return self.policies[0]
        if not self.ok or self.text is None:
            raise DiagnosticError(self.diagnostics)
        what, help, span = "lets", "import it from a policy, and name that", self.text.span(0, 0)
        if self.scenarios:
            what, help, span = "tests", "`kvdsl test` runs them", self.scenarios[0].test.title.span
        message = f"there are {what} in this file, but no policy"
        raise DiagnosticError([Diagnostic(codes.ONE_POLICY.id, "error", message, span, help)])

    @staticmethod
    def of(
        found: Policy | tuple[Scenario, ...] | None, text: SourceFile | None, sink: Sink, read: Iterable[Path] = ()
    ) -> Analysis:
        """Build the result. Of imported files only errors are shown."""
        policies: tuple[Policy, ...] = ()
        tests: tuple[Scenario, ...] = ()
        match found:
            case Policy() if not sink.failed():
                policies = (found,)
            case tuple():
                tests = found
        said = sink.sorted(first=text)
        shown = tuple(one for one in said if one.severity == "error" or one.span.file in (text, None))
        moved = tuple(one.at_origin() for one in shown)
        return Analysis(policies, moved, tests, frozenset(read), text)


NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


def analyse(source: SourceFile | Path | str, *, settings: Mapping[str, str] = NO_SETTINGS) -> Analysis:
    """Check a file.

    Args:
        source: the file, or its path.
        settings: values of params, as `--set NAME=VALUE` gives them.
    """
    sink = Sink()
    text = read_source(source, sink)
    loader = Loader(sink)
    module = None if text is None else loader.load(text)
    return Analysis.of(None if module is None else check_file(module, settings, sink), text, sink, loader.read)


def file_text(source: SourceFile) -> str:
    """Return the text of a file with the policy. A policy with clauses becomes flat, since a file holds one policy.

    Raises:
        DiagnosticError: if the policy has errors.
    """
    from kvdsl.ir.printer import print_policy

    root: SourceFile | Path = source
    while isinstance(root, Combined):
        root = root.base
    return source.as_file if root is source or isinstance(root, Path) else print_policy(analyse(source).policy)


def check_file(module: Module, settings: Mapping[str, str], sink: Sink) -> Policy | tuple[Scenario, ...] | None:
    """Return a file's policy or tests; None for a library, and for a policy with errors."""
    return _scenarios(module, settings, sink) if module.syntax.tests else _policy(module, settings, sink)


def _scenarios(module: Module, settings: Mapping[str, str], sink: Sink) -> tuple[Scenario, ...]:
    from kvdsl.scenarios.check import check_scenarios  # few files have tests

    read_settings(settings, [], sink)
    return check_scenarios(module, _prelude, sink)


def _policy(module: Module, settings: Mapping[str, str], sink: Sink) -> Policy | None:
    checker = policy_checker(module, settings, sink)
    return None if checker is None else checker.check()


def policy_checker(module: Module, settings: Mapping[str, str], sink: Sink) -> Checker | None:
    """Return the checker of a file's policy; None after a report, and for a library, whose lets are checked instead."""
    policy = _only_policy(module, settings, sink)
    if policy is None:
        return None
    if (policy.doc is None or not policy.doc.text.strip()) and not policy.clauses and not sink.failed():
        name = policy.name
        help = "begin the policy with a string that states what it does and its source"
        sink.report(codes.NO_DOCSTRING, name.span, f"`{name.text}` has no docstring", help)
    flat = resolve(policy, module, sink)
    given = {} if flat.broken else read_settings(settings, flat.params, sink)
    return Checker(flat, _prelude(), sink, given)


def _only_policy(module: Module, settings: Mapping[str, str], sink: Sink) -> syn.Policy | None:
    """Return the policy of a file; None after a report, and for a library, whose lets are checked."""
    policies = module.syntax.policies
    for policy in policies[1:]:
        labels = [Label(policies[0].name.span, "the first one")]
        help = "put each into a file of its own; `import` and `with` connect them"
        sink.report(codes.ONE_POLICY, policy.name.span, "a file holds one policy", help, labels)
    if policies:
        return policies[0]
    if module.syntax.lets:
        check_library(module, _prelude(), sink)
        if settings:
            read_settings(settings, [], sink)
    elif not module.broken:
        help = "a policy begins with `policy NAME {`"
        sink.report(codes.ONE_POLICY, module.file.span(0, 0), "there is no policy in this file", help)
    return None


def _prelude() -> Scope:
    return prelude_scope(prelude_syntax())


@lru_cache(maxsize=1)
def prelude_syntax() -> syn.Module:
    """Return the syntax of the prelude, which every policy can use without an import."""
    sink = Sink()
    path = resource("grammar", "prelude.kv")
    module = parse_module(SourceFile("prelude.kv", read_resource("grammar", "prelude.kv"), path), sink)
    assert not sink.failed(), "the prelude has syntax errors"
    return module
