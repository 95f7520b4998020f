"""The compiler's front end: from a .kv file to a checked policy. Imports neither torch nor transformers.

>>> analysis = analyse(find_policy("roco"), settings={"budget": "256"})
>>> analysis.ok
True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvdsl import codes
from kvdsl.diagnostics import Diagnostic, DiagnosticError, Label, Sink, did_you_mean, nearest
from kvdsl.ir.nodes import Policy
from kvdsl.resources import read_resource, resource
from kvdsl.sema.check import Checker
from kvdsl.sema.lets import check_library, prelude_scope
from kvdsl.sema.modules import Loader, Module
from kvdsl.sema.names import check_stem
from kvdsl.sema.resolve import resolve
from kvdsl.sema.scope import Scope
from kvdsl.sema.settings import read_settings
from kvdsl.shipped import shipped_policies
from kvdsl.source import SourceFile
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.reader import normalized, read
from kvdsl.syntax.shape import parse_module

if TYPE_CHECKING:
    from kvdsl.scenarios.scenario import Scenario

_NO_SETTINGS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Analysis:
    """What a file means, and what is to be said about it.

    Attributes:
        policies: the file's policy, flat and checked; empty if there are errors, or if the file is a library of lets.
        diagnostics: errors and warnings, by place.
        scenarios: the file's tests that have no errors, if it is a file of tests.
    """

    policies: tuple[Policy, ...]
    diagnostics: tuple[Diagnostic, ...]
    scenarios: tuple[Scenario, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there are no errors."""
        return all(found.severity != "error" for found in self.diagnostics)

    @property
    def policy(self) -> Policy:
        """The file's policy.

        Raises:
            DiagnosticError: if there is none.
        """
        if self.ok and self.scenarios:
            span, help = self.scenarios[0].test.title.span, "`kvdsl test` runs them"
            message = "there are tests in this file, but no policy"
            raise DiagnosticError([Diagnostic(codes.ONE_POLICY.id, "error", message, span, help)])
        if not self.policies:
            raise DiagnosticError(self.diagnostics)
        return self.policies[0]


def analyse(source: SourceFile | Path | str, *, settings: Mapping[str, str] = _NO_SETTINGS) -> Analysis:
    """Parses and checks a file.

    Args:
        source: the file, or its path.
        settings: values of params in place of their defaults, as `--set NAME=VALUE` gives them.
    """
    sink = Sink()
    text = _read(source, sink)
    module = None if text is None else Loader(sink).load(text)
    policy: Policy | None = None
    scenarios: tuple[Scenario, ...] = ()
    if module is not None and module.syntax.tests:
        scenarios = _scenarios(module, settings, sink)
    elif module is not None:
        policy = _analyse(module, settings, sink)
    found = sink.sorted(first=text)
    shown = tuple(one for one in found if one.severity == "error" or one.span.file in (text, None))
    return Analysis(() if policy is None or sink.failed() else (policy,), shown, scenarios)


def _read(source: SourceFile | Path | str, sink: Sink) -> SourceFile | None:
    if isinstance(source, SourceFile):
        return normalized(source, sink)
    return read(Path(source), sink, name=str(source))


def _scenarios(module: Module, settings: Mapping[str, str], sink: Sink) -> tuple[Scenario, ...]:
    from kvdsl.scenarios.check import check_scenarios  # few files have tests

    read_settings(settings, [], sink)
    return check_scenarios(module, _prelude, sink)


def _analyse(module: Module, settings: Mapping[str, str], sink: Sink) -> Policy | None:
    policy = _only_policy(module, settings, sink)
    if policy is None:
        return None
    check_stem(module.file, sink)
    if (policy.doc is None or not policy.doc.text.strip()) and not sink.failed():
        name = policy.name
        help = "begin the policy with a string that says what it does and where it comes from"
        sink.report(codes.NO_DOCSTRING, name.span, f"`{name.text}` has no docstring", help)
    flat = resolve(policy, module, sink)
    params = [name for name, placed in flat.names.items() if isinstance(placed.statement, syn.Param)]
    given = {} if flat.broken else read_settings(settings, params, sink)
    return Checker(flat, _prelude(), sink, given).check()


def _only_policy(module: Module, settings: Mapping[str, str], sink: Sink) -> syn.Policy | None:
    """The policy of a file; None for a library, whose lets are checked, and after a report."""
    policies = module.syntax.policies
    for policy in policies[1:]:
        labels = [Label(policies[0].name.span, "the first one")]
        help = "put each into a file of its own; `import` and `extends` connect them"
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
    return prelude_scope(_prelude_syntax())


@lru_cache(maxsize=1)
def _prelude_syntax() -> syn.Module:
    sink = Sink()
    path = resource("grammar", "prelude.kv")
    module = parse_module(SourceFile("prelude.kv", read_resource("grammar", "prelude.kv"), path), sink)
    assert not sink.failed(), "the prelude has syntax errors"
    return module


# -- by name ----------------------------------------------------------------------------------------------------------


def find_policy(name_or_path: str | Path) -> Path:
    """The file of a shipped policy, by its stem, or the path itself.

    Raises:
        DiagnosticError: if there is no such policy or file.
    """
    text = str(name_or_path)
    shipped = {path.stem: path for path in shipped_policies()}
    if text in shipped:
        return shipped[text]
    path = Path(name_or_path)
    try:
        if path.is_file():
            return path
    except (OSError, ValueError):
        pass
    raise _no_such_policy(text, path, shipped)


def _no_such_policy(text: str, path: Path, shipped: Mapping[str, Path]) -> DiagnosticError:
    """What to say of a name or path that is neither a shipped policy's nor a file's."""
    sink = Sink()
    name = " ".join(text.split())
    source = SourceFile("<policy>", name)
    if "\n" in text:
        message, help = (
            "this is a text, not a policy's name or path",
            "`kvdsl.compile` takes a policy that is given as a string",
        )
    elif path.suffix == ".kv" or len(path.parts) > 1:
        message, help = f"there is no file `{name}`", _near_file(path, shipped)
    else:
        near = did_you_mean(name, [*shipped, *_kv_files(Path())])
        message, help = f"there is no policy `{name}`", near or f"{_LIST}; your own is named by its file, `mine.kv`"
    sink.report(codes.NO_SUCH_POLICY, source.span(0, len(name)), message, help)
    return DiagnosticError(sink)


_LIST = "`kvdsl list` shows the shipped policies"


def _near_file(path: Path, shipped: Mapping[str, Path]) -> str:
    """The file that was perhaps meant: one in the same folder, or a shipped policy."""
    near = nearest(path.name, _kv_files(path.parent))
    if near is not None:
        return f"did you mean `{path.with_name(near)}`?"
    if path.stem in shipped:
        return f"`{path.stem}`, without `.kv`, is the shipped policy"
    near = nearest(path.stem, shipped)
    return f"did you mean `{near}`, the shipped policy?" if near else f"paths are relative to the current folder; {_LIST}"


def _kv_files(folder: Path) -> list[str]:
    """The names of a folder's .kv files; none where it cannot be read."""
    try:
        return [path.name for path in folder.glob("*.kv")]
    except (OSError, ValueError):
        return []
