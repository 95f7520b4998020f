"""From a .kv file to the files of its package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvdsl.compiler import analyse, find_policy
from kvdsl.diagnostics import Diagnostic
from kvdsl.emit.render import render
from kvdsl.ir.nodes import Policy
from kvdsl.lower.plan import make_plan
from kvdsl.passes.fold import fold
from kvdsl.sema.names import problem
from kvdsl.shipped import policy_name
from kvdsl.source import SourceFile


def package(policy: Policy, source: str) -> dict[str, str]:
    """A checked policy's files, text by name.

    Args:
        source: the text of the .kv file, for its digest.
    """
    return render(make_plan(fold(policy)), source)


@dataclass(frozen=True)
class Compiled:
    """A policy, its package and what there is to say about it (warnings)."""

    policy: Policy
    files: dict[str, str]
    diagnostics: tuple[Diagnostic, ...]


def compile_file(name_or_path: str | Path, settings: Mapping[str, str]) -> Compiled:
    """Compile a shipped policy, by its stem, or a .kv file.

    Args:
        settings: values of params in place of their defaults.

    Raises:
        DiagnosticError: if there is no such file, or if it has errors.
    """
    path = find_policy(name_or_path)
    analysis = analyse(path, settings=settings)
    source = path.read_text(encoding="utf-8-sig")
    return Compiled(analysis.policy, package(analysis.policy, source), analysis.diagnostics)


def compile_text(text: str, settings: Mapping[str, str]) -> Compiled:
    """Compile a policy that lies in no file; what it imports is looked for in the current folder.

    Args:
        settings: values of params in place of their defaults.

    Raises:
        DiagnosticError: if it has errors; their places are called after the policy, `<roco>` for `policy RoCo`.
    """
    stem = (policy_name(text) or "policy").lower()
    analysis = analyse(SourceFile(f"<{stem if problem(stem, 'package') is None else 'policy'}>", text), settings=settings)
    return Compiled(analysis.policy, package(analysis.policy, text), analysis.diagnostics)
