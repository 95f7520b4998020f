"""`kvdsl diff`: compare two policies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdsl.cli import completion
from kvdsl.cli.common import CLEAN, COULD_NOT_RUN, FINDINGS, finish, json_option, print_json, report_failure, set_option

if TYPE_CHECKING:
    from kvdsl.explain.difference import Difference
    from kvdsl.explain.facts import Facts
    from kvdsl.ir.nodes import Policy
    from kvdsl.scenarios.witness import Search, Witness
    from kvdsl.source import SourceFile

    Source = Path | SourceFile


@click.command()
@click.argument("a", shell_complete=completion.policies)
@click.argument("b", shell_complete=completion.policies)
@set_option
@json_option
def command(a: str, b: str, settings: dict[str, str], as_json: bool) -> None:
    """Compare two policies: statements, state per token, bytes, and kept tokens.

    A and B are shipped policies or .kv files, optionally with clauses (`h2o with when prefill`). Inherited statements count; names,
    docstrings, comments and lets do not. The command searches for a small text on which the two keep, or attend to, different tokens
    in the reference interpreter, and prints it as a test that one passes and the other fails.

    \b
    Examples:
      kvdsl diff h2o tova
      kvdsl diff roco mine.kv --set budget=64

    Exit codes: 0 equivalent, 1 different, 2 a policy cannot be read, or has errors.
    """
    from kvdsl.compiler import analyse, find_policy
    from kvdsl.diagnostics import DiagnosticError
    from kvdsl.explain.difference import difference
    from kvdsl.explain.facts import facts

    paths = find_policy(a), find_policy(b)
    try:
        first, second = (facts(analyse(path, settings=settings).policy) for path in paths)
    except DiagnosticError as failure:  # exit code 1 is for different policies
        report_failure(failure, as_json)
        finish(COULD_NOT_RUN)
    found = difference(first, second)
    search = None if not found.changes or found.in_memory_only else _search(paths, settings)
    if as_json:
        print_json(_as_data((first, second), found, search))
    else:
        click.echo("\n".join(_in_words((a, b), found, search)))
    finish(FINDINGS if found.changes else CLEAN)


def _search(paths: tuple[Source, Source], fixed: Mapping[str, str]) -> Search:
    from kvdsl.compiler import analyse
    from kvdsl.scenarios.witness import Variant, find_witness

    def variant(path: Source) -> Variant:
        names = {param.name for param in analyse(path, settings=fixed).policy.params}

        def make(settings: Mapping[str, str]) -> Policy | None:
            analysis = analyse(path, settings={name: value for name, value in settings.items() if name in names})
            return analysis.policy if analysis.ok else None

        return make

    return find_witness(variant(paths[0]), variant(paths[1]), fixed=fixed)


def _in_words(names: tuple[str, str], found: Difference, search: Search | None) -> list[str]:
    from kvdsl.scenarios.write import as_test, passing

    if not found.changes:
        return ["no difference in meaning"]
    lines: list[str] = []
    for change in found.changes:
        before, after = (
            [click.style(f"  {sign} {line}", fg=colour) for line in lines_of]
            for sign, colour, lines_of in (("-", "red", change.before), ("+", "green", change.after))
        )
        lines += [click.style(change.title, bold=True), *before, *after, ""]
    if search is None:
        return [*lines, "Both keep the same tokens: only their memory layout differs."]
    if search.why_not:
        return [*lines, f"No text was tried: {search.why_not}."]
    if search.witness is None:
        return [*lines, f"Of {search.tried} small texts both kept the same tokens; that is no proof of equivalence."]
    which = passing(search.witness)
    return [*lines, f"A test that {names[which]} passes and {names[1 - which]} fails:", "", as_test(search.witness, names)]


def _as_data(both: tuple[Facts, Facts], found: Difference, search: Search | None) -> dict[str, Any]:
    a, b = both
    return {
        "a": {"name": a.policy.name, "stem": a.policy.stem, "bytes_per_token": a.bytes_per_token},
        "b": {"name": b.policy.name, "stem": b.policy.stem, "bytes_per_token": b.bytes_per_token},
        "same": not found.changes,
        "in_memory_only": found.in_memory_only,
        "changes": [{"title": one.title, "a": one.before, "b": one.after} for one in found.changes],
        "texts_tried": 0 if search is None else search.tried,
        "scenario": None if search is None or search.witness is None else _scenario(search.witness),
    }


def _scenario(found: Witness) -> dict[str, Any]:
    from kvdsl.scenarios.write import as_test, passing

    return {
        "settings": found.settings,
        "layer": found.layer,
        "layers": found.layers,
        "tokens": found.tokens,
        "what": found.what,
        "a": found.found[0],
        "b": found.found[1],
        "passes": "ab"[passing(found)],
        "test": as_test(found, ("a", "b")),
    }
