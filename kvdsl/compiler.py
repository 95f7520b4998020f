"""The whole pipeline: source → nodes → policy → plan → files. Every command, `load` and `import` use it.

    source   the text of a .kv file
    nodes    the syntax of the file and its imports                           kvdsl.syntax, kvdsl.sema.modules
    policy   the IR, or diagnostics                                           kvdsl.sema
    plan     the code for every target, or why it has none                    kvdsl.passes, kvdsl.lower
    files    the package, text by name                                        kvdsl.emit

Imports neither torch nor transformers, and each stage only when it is needed: `check` stops at the policy, `explain` at the plan.

>>> analyse(find_policy("roco"), settings={"budget": "256"}).ok
True
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvdsl.diagnostics import Diagnostic, DiagnosticError
from kvdsl.sema.files import NO_SETTINGS
from kvdsl.sema.files import Analysis as Analysis
from kvdsl.sema.files import analyse as analyse
from kvdsl.sema.files import file_text as file_text
from kvdsl.shipped import find, policy_name, shipped_as, text_of
from kvdsl.shipped import shipped_policies as shipped_policies
from kvdsl.source import SourceFile

if TYPE_CHECKING:
    from kvdsl.ir.nodes import Policy
    from kvdsl.lang.policies import Policy as WrittenPolicy
    from kvdsl.lower.plan import PackagePlan


def find_policy(named: str | Path | WrittenPolicy) -> Path | SourceFile:
    """Find a policy: a shipped one by its stem, a path, the text of one written in Python, or one of these with clauses.

    Args:
        named: `"h2o"`, `"mine.kv"`, `"mine.py:calm"` (the file is executed), `"h2o with when prefill"`, or a `@kvdsl.policy`.

    Raises:
        DiagnosticError: if there is no such policy or file, or a Python file fails.
    """
    return find(str(named), _written) if isinstance(named, (str, Path)) else named.source


def _written(path: Path, name: str) -> SourceFile:
    """Return the text of a policy in a Python file."""
    from kvdsl.lang.modules import policy_of

    return policy_of(path, name).source


def plan_of(policy: Policy) -> PackagePlan:
    """Lower a policy to its plan, with folded constants and state columns.

    Raises:
        KvdslError: if not even torch has code for something in it.
    """
    from kvdsl.lower.plan import make_plan

    return make_plan(policy)


def package(
    policy: Policy, source: str, data: Mapping[str, bytes] | None = None, origin: str | None = None
) -> dict[str, str]:
    """Return the text files of a policy's package by name.

    Args:
        source: the text of the .kv file, for its digest.
        origin: its location, for the manifest.
        data: the binary files from `data_of`, for their digests; pass the ones that are written.

    Raises:
        KvdslError: if a file that the policy reads is missing, or does not match the policy.
    """
    from kvdsl.emit import data_of, render

    return render(plan_of(policy), source, data_of(policy) if data is None else data, origin)


@dataclass(frozen=True)
class Compiled:
    """A policy, its package and its warnings.

    Attributes:
        files, data: text and binary files by name.
        diagnostics: warnings.
        source, settings: the input.
    """

    policy: Policy
    files: dict[str, str]
    data: dict[str, bytes]
    diagnostics: tuple[Diagnostic, ...]
    source: SourceFile | Path
    settings: Mapping[str, str]


def compile_file(named: str | Path | WrittenPolicy, settings: Mapping[str, str] = NO_SETTINGS) -> Compiled:
    """Compile a shipped policy, a .kv file or a policy written in Python, optionally with clauses (`h2o with when prefill`).

    Raises:
        DiagnosticError: if there is no such file, or it has errors.
    """
    return compile_found(find_policy(named), settings)


def compile_found(found: Path | SourceFile, settings: Mapping[str, str] = NO_SETTINGS) -> Compiled:
    """Compile a result of `find_policy`.

    Raises:
        DiagnosticError: if it has errors.
    """
    analysis = analyse(found, settings=settings)
    if not analysis.ok:  # also if the file cannot be read
        raise DiagnosticError(analysis.diagnostics)
    return _compiled(analysis, text_of(found), found, settings)


def compile_text(text: str, settings: Mapping[str, str] = NO_SETTINGS) -> Compiled:
    """Compile the text of a policy; its imports start in the current folder.

    Raises:
        DiagnosticError: if it has errors; their file is named after the policy, `<roco>` for `policy RoCo`.
    """
    from kvdsl.sema.names import problem

    stem = (policy_name(text) or "policy").lower()
    file = SourceFile(f"<{stem if problem(stem, 'package') is None else 'policy'}>", text)
    return _compiled(analyse(file, settings=settings), text, file, settings)


def _compiled(analysis: Analysis, text: str, source: SourceFile | Path, settings: Mapping[str, str]) -> Compiled:
    from kvdsl.emit import data_of

    data = data_of(analysis.policy)
    files = package(analysis.policy, text, data, shipped_as(source) if isinstance(source, Path) else None)
    return Compiled(analysis.policy, files, data, analysis.diagnostics, source, settings)
