"""`kvdsl check`: check policies."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from kvdsl.cli import completion
from kvdsl.cli.common import (
    COULD_NOT_RUN,
    error,
    exit_code,
    finish,
    kv_files,
    print_json,
    report,
    report_failure,
    set_option,
)
from kvdsl.errors import KvdslError
from kvdsl.shipped import file_of

if TYPE_CHECKING:
    from kvdsl.diagnostics import Diagnostic

FORMATS = ("text", "json", "sarif", "github")


class _Format(click.Choice[str]):
    """An output format; `human` is an old name of `text`."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return super().convert("text" if value == "human" else value, param, ctx)


@click.command()
@click.argument("files", metavar="[FILE...|-]", nargs=-1, shell_complete=completion.policies)
@click.option("--format", "style", type=_Format(FORMATS), default="text", show_default=True,
              help="Text, JSON, SARIF 2.1.0 for code hosts and editors, or annotations for GitHub.")  # fmt: skip
@click.option("--json", "style", flag_value="json", hidden=True)
@set_option
@click.option("--deny-warnings", is_flag=True, help="Exit with 1 for warnings, too.")
@click.option("--watch", "watching", is_flag=True, help="Check again whenever a file changes, until Ctrl-C.")
def command(files: tuple[str, ...], style: str, settings: dict[str, str], deny_warnings: bool, watching: bool) -> None:
    """Check policies, and show errors with their place and fix.

    FILE is a .kv file, a folder of them, a shipped policy by its name, `mine.py:calm` for a policy written in Python, or `-` for
    standard input. A Python file is executed, so name only trusted ones. Without FILE, all .kv files below the current folder are
    checked. `kvdsl explain CODE` explains an error.

    \b
    Examples:
      kvdsl check mine.kv
      kvdsl check mine.kv --set budget=64        would it work with this budget?
      kvdsl check --format github                in a workflow
      kvdsl check policies --watch               while you write
      echo 'kv 1' | kvdsl check -

    Exit codes: 0 no errors, 1 errors (with --deny-warnings also warnings), 2 a file could not be read, or the command line is
    wrong. `--watch` exits with the code of the last check.
    """
    if watching and "-" in files:
        raise click.UsageError("standard input cannot be watched")
    check = _Check(files, style, settings, deny_warnings)
    if watching:
        watch(check.findings, check.show, check.files)
    else:
        check.show(check.findings())
    finish(check.code)


@dataclass
class _Check:
    """A check of a command line: the `names` of files, all files `read`, and its exit code."""

    named: tuple[str, ...]
    style: str
    settings: dict[str, str]
    deny_warnings: bool
    names: list[str] = field(default_factory=list)
    read: set[Path] = field(default_factory=set)
    code: int = COULD_NOT_RUN

    def findings(self) -> list[Diagnostic]:
        """Return the diagnostics of all files."""
        self.names = kv_files(self.named, tests=True)
        self.read.clear()
        # A file that several others import is read repeatedly, but reported once.
        told: dict[tuple[object, ...], Diagnostic] = {}
        for one in (one for name in self.names for one in self._check(name)):
            told.setdefault((one.code, one.file, one.span.start, one.span.end, one.message), one)
        found = list(told.values())
        self.code = exit_code(found, deny_warnings=self.deny_warnings) if self.names else COULD_NOT_RUN
        return found

    def files(self) -> set[Path]:
        """Return the files that the check depends on: named ones, even missing ones, and their imports."""
        return self.read | {file_of(name) for name in kv_files(self.named, tests=True)}

    def _check(self, name: str) -> tuple[Diagnostic, ...]:
        from kvdsl.compiler import analyse, find_policy
        from kvdsl.diagnostics import DiagnosticError

        try:
            analysis = analyse(find_policy(name), settings=self.settings)
        except DiagnosticError as failure:
            return failure.diagnostics
        self.read.update(analysis.read)
        return analysis.diagnostics

    def show(self, found: list[Diagnostic]) -> None:
        """Print the diagnostics."""
        if not self.names:
            nothing = "there is no .kv file to check"
            if self.style == "json":
                report_failure(KvdslError(nothing), as_json=True)
                return
            error(nothing, "name the files, or start with a copy: `kvdsl list` lists policies")
        if self.style == "json":
            from kvdsl.diagnostics import render_json

            print_json({"diagnostics": render_json(found)})
        elif self.style == "sarif":
            from kvdsl.sarif import render_sarif

            click.echo(json.dumps(render_sarif(found, self.code), indent=2, ensure_ascii=False))
        elif self.style == "github":
            from kvdsl.diagnostics import render_github

            click.echo(render_github(found), nl=False)
        elif found:
            report(found)
        elif self.names:
            click.echo(f"{len(self.names)} file{'s' if len(self.names) != 1 else ''} checked: no problems")


# -- --watch ------------------------------------------------------------------------------------------------------------

SECONDS = 0.2
"""Seconds between checks of the files. Polling works on every system and network share."""

Stamps = dict[Path, tuple[int, int] | None]
T = TypeVar("T")


def watch(read: Callable[[], T], show: Callable[[T], object], files: Callable[[], Iterable[Path]]) -> None:
    """Read and show, and again after each change, until Ctrl-C.

    Args:
        files: the files that were read, if known.
    """
    try:
        while True:
            before, result = _read(read, files)
            show(result)
            while _stamps(files()) == before:
                time.sleep(SECONDS)
    except KeyboardInterrupt:
        return


def _read(read: Callable[[], T], files: Callable[[], Iterable[Path]]) -> tuple[Stamps, T]:
    """Return the result of a read with its files' stamps from before; a file first found while reading triggers another read."""
    while True:
        before = _stamps(files())
        result = read()
        if before.keys() >= set(files()):
            return before, result


def _stamps(files: Iterable[Path]) -> Stamps:
    return {path: _stamp(path) for path in files}


def _stamp(path: Path) -> tuple[int, int] | None:
    """Return a file's modification time and size; None if it is inaccessible."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
