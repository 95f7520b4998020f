"""`kvdsl check`: what is wrong with policies."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from kvdsl.cli import completion
from kvdsl.cli.common import COULD_NOT_RUN, error, exit_code, finish, kv_files, print_json, report, set_option

if TYPE_CHECKING:
    from kvdsl.diagnostics import Diagnostic


@click.command()
@click.argument("files", metavar="[FILE...|-]", nargs=-1, shell_complete=completion.policies)
@click.option("--format", "style", type=click.Choice(["human", "json", "github"]), default="human", show_default=True,
              help="For people, for programs, or as annotations of a pull request on GitHub.")  # fmt: skip
@click.option("--json", "style", flag_value="json", hidden=True)
@set_option
@click.option("--deny-warnings", is_flag=True, help="Exit with 1 for warnings, too.")
def command(files: tuple[str, ...], style: str, settings: dict[str, str], deny_warnings: bool) -> None:
    """Check policies and say what is wrong, where, and how to mend it.

    FILE is a .kv file, a folder of them, a policy that comes with kvdsl by its name, or `-` for standard input. Without any,
    all .kv files below the current folder are checked. `kvdsl explain CODE` says more about an error.

    \b
    Examples:
      kvdsl check mine.kv
      kvdsl check mine.kv --set budget=64        would it work with this budget?
      kvdsl check --format github                in a workflow
      echo 'kv 1' | kvdsl check -
    """
    names = kv_files(files, tests=True)
    if not names:
        error("there is no .kv file to check", "name the files, or start with a copy: `kvdsl list` shows policies")
        finish(COULD_NOT_RUN)
    found = [diagnostic for name in names for diagnostic in _check(name, settings)]
    code = exit_code(found, deny_warnings=deny_warnings)
    _show(found, style, len(names))
    finish(code)


def _check(name: str, settings: dict[str, str]) -> tuple[Diagnostic, ...]:
    from kvdsl.compiler import analyse, find_policy
    from kvdsl.diagnostics import DiagnosticError, Sink
    from kvdsl.syntax.reader import decode

    if name == "-":
        sink = Sink()
        source = decode(sys.stdin.buffer.read(), sink, "-")
        return sink.sorted() if source is None else analyse(source, settings=settings).diagnostics
    try:
        return analyse(find_policy(name), settings=settings).diagnostics
    except DiagnosticError as failure:
        return failure.diagnostics


def _show(found: list[Diagnostic], style: str, files: int) -> None:
    from kvdsl.diagnostics import render_github, render_json

    if style == "json":
        print_json({"diagnostics": render_json(found)})
    elif style == "github":
        click.echo(render_github(found), nl=False)
    elif found:
        report(found)
    else:
        click.echo(f"{files} file{'s' if files != 1 else ''} checked: all is well")
