"""The pipeline, all of it: source → nodes → policy → plan → files. Every command, `load` and `import` go through here.

    source   the text of a .kv file
    nodes    what stands in it and in the files that it imports               kvdsl.syntax, kvdsl.sema.modules
    policy   what it means: the IR, or what is wrong                          kvdsl.sema
    plan     the same in the words of every target, or why one has none       kvdsl.passes, kvdsl.lower
    files    the package, text by name                                        kvdsl.emit

Imports neither torch nor transformers, and each stage only where it is reached: `check` stops at the policy, `explain` at the plan.

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
    """The file of a shipped policy, by its stem, or the path itself; of a policy that is written in Python the text that it prints as; and
    of `h2o with when prefill` the policy with those clauses.

    Args:
        named: `"h2o"`, `"mine.kv"`, `"mine.py:calm"`, which runs that file, one of these with clauses, or what `@kvdsl.policy` made.

    Raises:
        DiagnosticError: if there is no such policy or file, or if a Python file fails.
    """
    return find(str(named), _written) if isinstance(named, (str, Path)) else named.source


def _written(path: Path, name: str) -> SourceFile:
    """What a Python file writes."""
    from kvdsl.lang.modules import policy_of

    return policy_of(path, name).source


def plan_of(policy: Policy) -> PackagePlan:
    """Policy → plan: with constants folded and state columns found, as every target would have it.

    Raises:
        KvdslError: if not even torch has code for something in it.
    """
    from kvdsl.lower.plan import make_plan

    return make_plan(policy)


def package(
    policy: Policy, source: str, data: Mapping[str, bytes] | None = None, origin: str | None = None
) -> dict[str, str]:
    """Policy → plan → files, text by name.

    Args:
        source: the text of the .kv file, for its digest.
        origin: where that comes from, for the manifest.
        data: the files that are no text, from `data_of`; who writes them passes what it writes, which is what the digests are of.

    Raises:
        KvdslError: if a file that the policy reads is not there, or does not hold what the policy says.
    """
    from kvdsl.emit.render import data_of, render

    return render(plan_of(policy), source, data_of(policy) if data is None else data, origin)


@dataclass(frozen=True)
class Compiled:
    """A policy, its package and its warnings.

    Attributes:
        files, data: text by name, and what is no text.
        diagnostics: warnings.
        source, settings: what it was made from.
    """

    policy: Policy
    files: dict[str, str]
    data: dict[str, bytes]
    diagnostics: tuple[Diagnostic, ...]
    source: SourceFile | Path
    settings: Mapping[str, str]


def compile_file(named: str | Path | WrittenPolicy, settings: Mapping[str, str] = NO_SETTINGS) -> Compiled:
    """A shipped policy, by its stem, a .kv file, a policy that is written in Python, or one of them with clauses (`h2o with when prefill`),
    through all stages.

    Raises:
        DiagnosticError: if there is no such file, or if it has errors.
    """
    return compile_found(find_policy(named), settings)


def compile_found(found: Path | SourceFile, settings: Mapping[str, str] = NO_SETTINGS) -> Compiled:
    """The same of what `find_policy` has found.

    Raises:
        DiagnosticError: if it has errors.
    """
    analysis = analyse(found, settings=settings)
    if not analysis.ok:  # of a file that cannot be read, too
        raise DiagnosticError(analysis.diagnostics)
    return _compiled(analysis, text_of(found), found, settings)


def compile_text(text: str, settings: Mapping[str, str] = NO_SETTINGS) -> Compiled:
    """A policy that lies in no file, through all stages; what it imports is looked for in the current folder.

    Raises:
        DiagnosticError: if it has errors; their places are called after the policy, `<roco>` for `policy RoCo`.
    """
    from kvdsl.sema.names import problem

    stem = (policy_name(text) or "policy").lower()
    file = SourceFile(f"<{stem if problem(stem, 'package') is None else 'policy'}>", text)
    return _compiled(analyse(file, settings=settings), text, file, settings)


def _compiled(analysis: Analysis, text: str, source: SourceFile | Path, settings: Mapping[str, str]) -> Compiled:
    from kvdsl.emit.render import data_of

    data = data_of(analysis.policy)
    files = package(analysis.policy, text, data, shipped_as(source) if isinstance(source, Path) else None)
    return Compiled(analysis.policy, files, data, analysis.diagnostics, source, settings)
