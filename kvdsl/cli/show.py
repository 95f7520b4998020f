"""`kvdsl show`: a policy's source."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvdsl.cli import completion
from kvdsl.cli.common import json_option, print_json
from kvdsl.errors import KvdslError
from kvdsl.files import is_standard_input

if TYPE_CHECKING:
    from kvdsl.source import SourceFile


@click.command()
@click.argument("policy", shell_complete=completion.policies)
@click.option("--path", "only_path", is_flag=True, help="Print only its path.")
@json_option
def command(policy: str, only_path: bool, as_json: bool) -> None:
    """Print a policy's source, and its path.

    POLICY is a shipped policy, a .kv file, or `module.py:policy`, which is executed and shown as .kv; with clauses, it is shown as a file
    would contain it. The source goes to standard output, highlighted on a terminal; the path goes to standard error.

    \b
    Examples:
      kvdsl show roco
      kvdsl show roco > mine.kv         a copy to change
      kvdsl show roco --path
    """
    from kvdsl.compiler import find_policy
    from kvdsl.diagnostics import DiagnosticError, Sink, wants_color
    from kvdsl.source import Combined, SourceFile
    from kvdsl.syntax.reader import read

    found, sink = find_policy(policy), Sink()
    source: SourceFile | None
    match found:
        case Combined():
            return _show_unfiled(found, only_path, as_json)
        case SourceFile() if is_standard_input(policy):
            return _show_unfiled(found, only_path, as_json)
        case SourceFile():
            source, path = found, Path(next(found.origins(found.span(0, 0))).file.name)
        case Path():
            source, path = read(found, sink, str(policy)), found
    if source is None:
        raise DiagnosticError(sink)
    if as_json:
        print_json({"name": found.stem, "path": str(path.resolve()), "source": source.text})
    elif only_path:
        click.echo(path.resolve())
    else:
        click.echo(click.style(_short(path), dim=True), err=True, color=wants_color(sys.stderr))
        _print(source.text)


def _show_unfiled(found: SourceFile, only_path: bool, as_json: bool) -> None:
    """Print a policy that is not in a file."""
    from kvdsl.compiler import file_text

    if only_path:
        raise KvdslError(f"`{found.name if is_standard_input(found.name) else found.text}` is not in a file")
    text = found.text if is_standard_input(found.name) else file_text(found)
    if as_json:
        print_json({"name": found.stem, "path": None, "source": text})
    else:
        _print(text)


def _print(text: str) -> None:
    from kvdsl.diagnostics import wants_color

    color = wants_color(sys.stdout)
    click.echo(_highlighted(text) if color else text, nl=False, color=color)


def _short(path: Path) -> str:
    """Return the path relative to the current folder, if it is below it."""
    try:
        return path.resolve().relative_to(Path.cwd()).as_posix()
    except (OSError, ValueError):
        return str(path.resolve())


def _highlighted(text: str) -> str:
    from pygments import highlight
    from pygments.formatters import TerminalFormatter

    from kvdsl.highlight import KvLexer

    return str(highlight(text, KvLexer(), TerminalFormatter()))
