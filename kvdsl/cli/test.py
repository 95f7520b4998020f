"""`kvdsl test`: run tests written in the language."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdsl.cli import completion
from kvdsl.cli.common import CLEAN, FINDINGS, exit_code, finish, json_option, kv_files, print_json, report
from kvdsl.errors import KvdslError
from kvdsl.files import is_standard_input
from kvdsl.source import SourceFile

if TYPE_CHECKING:
    from kvdsl.diagnostics import Diagnostic
    from kvdsl.scenarios.run import Failure, Outcome


@dataclass(frozen=True)
class FileRun:
    """The selected tests of a file, with outcomes; none if the file has errors."""

    name: str
    outcomes: tuple[Outcome, ...]
    diagnostics: tuple[Diagnostic, ...]


@click.command()
@click.argument("files", metavar="[FILE...|-]", nargs=-1, shell_complete=completion.policies)
@click.option("-k", "expression", metavar="EXPR", default="",
              help="Only tests whose file and title contain EXPR; words may be joined by `and`, `or` and `not`.")  # fmt: skip
@json_option
def command(files: tuple[str, ...], expression: str, as_json: bool) -> None:
    """Run tests written in the language.

    FILE is a file of tests, a .kv file with a `_test.kv` of its name next to it, a folder, `-` for standard input, or a shipped policy by
    its name. Without FILE, all `*_test.kv` below the current folder are run, or, if there are none, those of the shipped policies.

    \b
    Examples:
      kvdsl test roco                   the tests of a shipped policy
      kvdsl test mine_test.kv
      kvdsl test -k "tie and not snap"
    """
    runs = [_run(path, expression) for path in _files(files)]
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    found = [diagnostic for run in runs for diagnostic in run.diagnostics]
    code = exit_code(found)
    if not outcomes and code == CLEAN:
        raise KvdslError("no test matches" if expression else "there are no tests in these files")
    if as_json:
        print_json(_as_data(runs))
    else:
        report(found)
        _show(runs)
    finish(code or (CLEAN if all(outcome.passed for outcome in outcomes) else FINDINGS))


# -- what to run -------------------------------------------------------------------------------------------------------


def _files(names: tuple[str, ...]) -> list[Path | SourceFile]:
    """Return the test files of the names."""
    if names:
        return [path for name in names for path in _named(name)]
    return [*(list(_named(".")) or sorted(set(_shipped().values())))]


def _named(name: str) -> Iterator[Path | SourceFile]:
    from kvdsl.compiler import find_policy

    path, shipped = Path(name), _shipped()
    if is_standard_input(name):
        found = find_policy(name)
        assert isinstance(found, SourceFile)
        yield found
    elif path.is_dir():
        yield from (Path(below) for below in kv_files([name], tests=True) if below.endswith("_test.kv"))
    elif name in shipped:
        yield shipped[name]
    elif path.suffix == ".kv":
        beside = path.with_name(f"{path.stem}_test.kv")
        yield beside if beside.is_file() else path
    else:
        found = find_policy(name)
        if isinstance(found, Path):
            raise KvdslError(f"an installed kvdsl has no tests of `{name}`: they are in its repository, next to the policy")
        raise KvdslError(_no_tests(found.stem, found.stem))


def _no_tests(name: str, stem: str) -> str:
    return (
        f'`{name}` has no tests: write them in `{stem}_test.kv` next to it, which begins with `import "{stem}.kv"`; `kvdsl new` creates a '
        "policy with a test to start from"
    )


def _shipped() -> dict[str, Path]:
    """Return the tests of shipped policies, by the policies' stems and by their own."""
    from kvdsl.files import resource

    paths = list(resource("policies").rglob("*_test.kv"))
    return {path.stem.removesuffix("_test"): path for path in paths} | {path.stem: path for path in paths}


def _run(path: Path | SourceFile, expression: str) -> FileRun:
    from kvdsl.compiler import analyse
    from kvdsl.scenarios.run import run_scenario

    name = path.name if isinstance(path, SourceFile) else _shown(path)
    analysis = analyse(path)
    if analysis.ok and not analysis.scenarios:
        raise KvdslError(_no_tests(name, path.stem))
    chosen = [scenario for scenario in analysis.scenarios if _matches(expression, f"{name} {scenario.title}")]
    return FileRun(name, tuple(map(run_scenario, chosen)) if analysis.ok else (), analysis.diagnostics)


def _shown(path: Path) -> str:
    """Return the shortest form of a path."""
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except (OSError, ValueError):
        return str(path)


def _matches(expression: str, text: str) -> bool:
    """Return whether a text matches an expression of words; `not` binds tighter than `and`, and that tighter than `or`."""
    text = text.casefold()

    def holds(word: str) -> bool:
        wanted = word.strip().casefold()
        return wanted[4:].strip() not in text if wanted.startswith("not ") else wanted in text

    return any(all(map(holds, words.split(" and "))) for words in expression.split(" or "))


# -- what came out -----------------------------------------------------------------------------------------------------


def _show(runs: list[FileRun]) -> None:
    """Print a line per file, the failures, and the counts."""
    from kvdsl.diagnostics import wants_color

    color = wants_color(sys.stdout)
    ran = [run for run in runs if run.outcomes]
    width = max((len(run.name) for run in ran), default=0)
    for run in ran:
        click.echo(f"{run.name:<{width}}  {_counted(run.outcomes)}")
    for run in ran:
        for outcome in run.outcomes:
            if not outcome.passed:
                title = click.style("FAILED", fg="red", bold=True) + f" {_printable(outcome.scenario.title)}"
                click.echo(f"\n{title}\n" + "\n".join(_explained(outcome.failures, color)), color=color)
    broken = sum(exit_code(run.diagnostics) != CLEAN for run in runs)
    left_out = f", {broken} file{'s' if broken != 1 else ''} not run" if broken else ""
    click.echo(f"\n{_counted(tuple(outcome for run in runs for outcome in run.outcomes), zeros=True)}{left_out}")


def _counted(outcomes: tuple[Outcome, ...], *, zeros: bool = False) -> str:
    passed = sum(outcome.passed for outcome in outcomes)
    failed = len(outcomes) - passed
    return f"{passed} passed, {failed} failed" if failed or zeros else f"{passed} passed"


def _explained(failures: tuple[Failure, ...], color: bool) -> Iterator[str]:
    """Yield each failure with its place, then the table of the step for failures that share it."""
    from kvdsl.diagnostics import Label, excerpt

    for failure, following in zip(failures, [*failures[1:], None], strict=True):
        yield excerpt(Label(failure.span, _printable(failure.message)), color)
        if failure.state and (following is None or following.state != failure.state):
            yield "\n" + "\n".join(f"    {line}".rstrip() for line in failure.state)


def _printable(text: str) -> str:
    from kvdsl.diagnostics import printable

    return printable(text)


def _as_data(runs: list[FileRun]) -> dict[str, Any]:
    from kvdsl.diagnostics import render_json

    outcomes = [(run.name, outcome) for run in runs for outcome in run.outcomes]
    passed = sum(outcome.passed for _, outcome in outcomes)
    return {
        "passed": passed,
        "failed": len(outcomes) - passed,
        "tests": [
            {
                "file": name,
                "title": outcome.scenario.title,
                "line": outcome.scenario.test.span.file.location(outcome.scenario.test.span.start)[0],
                "passed": outcome.passed,
                "failures": [
                    {"line": one.span.file.location(one.span.start)[0], "step": one.span.text, "message": one.message}
                    for one in outcome.failures
                ],
            }
            for name, outcome in outcomes
        ],
        "diagnostics": render_json([diagnostic for run in runs for diagnostic in run.diagnostics]),
    }
