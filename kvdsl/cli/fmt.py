"""`kvdsl fmt`: format policies."""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdsl.cli import completion
from kvdsl.cli.common import CLEAN, COULD_NOT_RUN, FINDINGS, finish, json_option, kv_files, print_json, report
from kvdsl.errors import KvdslError
from kvdsl.files import write_whole

if TYPE_CHECKING:
    from kvdsl.diagnostics import Diagnostic


@dataclass(frozen=True)
class Formatted:
    """A file before and after formatting; None after syntax errors, which are in `diagnostics`."""

    name: str
    before: str
    after: str | None
    diagnostics: tuple[Diagnostic, ...] = ()

    @property
    def changed(self) -> bool:
        """Whether formatting changes the file."""
        return self.after is not None and self.after != self.before


@click.command()
@click.argument("files", metavar="[FILE...|-]", nargs=-1, shell_complete=completion.files)
@click.option(
    "--check", is_flag=True, help="Write nothing; list the files that would change, and exit with 1 if there are any."
)
@click.option(
    "--upgrade",
    is_flag=True,
    help="Also rewrite files of an older edition in the newest one, if the meaning stays the same.",
)
@json_option
@click.option("--diff", is_flag=True, help="Write nothing; show the changes, and exit with 1 if there are any.")
def command(files: tuple[str, ...], check: bool, upgrade: bool, diff: bool, as_json: bool) -> None:
    """Format policies.

    FILE is a .kv file, a folder of them, or `-`, which reads standard input and writes to standard output. Without FILE, all .kv
    files below the current folder are formatted. Comments, strings and numbers stay as written; files with syntax errors are
    skipped. With --upgrade, files that need manual changes are skipped, too, and reported; rewritten files keep the same tokens.

    \b
    Examples:
      kvdsl fmt mine.kv
      kvdsl fmt --diff mine.kv       what would change?
      kvdsl fmt --check policies     for CI: is everything formatted?
      kvdsl fmt - < mine.kv
      kvdsl fmt --upgrade --diff .   what would change in `kv 2`?
    """
    if "-" in files and len(files) > 1:
        raise click.UsageError("`-` cannot be combined with other files")
    names = kv_files(files, tests=True)
    if not names:
        raise KvdslError("there is no .kv file to format")
    found = [_formatted(name, upgrade) for name in names]
    for one in found:
        report(one.diagnostics)
        if as_json and not check and not diff and one.name != "-":
            _write(one, quietly=True)
        elif as_json:
            continue
        elif diff and one.changed:
            click.echo(_difference(one), nl=False)
        elif check and one.changed:
            click.echo(f"would change {one.name}")
        elif not check and not diff:
            _write(one)
    if as_json:
        print_json({"files": [_as_data(one) for one in found]})
    elif files != ("-",) and not diff:
        click.echo(_summary(found, "would change" if check else "formatted"))
    if any(one.after is None for one in found):
        finish(COULD_NOT_RUN)
    finish(FINDINGS if (check or diff) and any(one.changed for one in found) else CLEAN)


def _formatted(name: str, upgrade: bool) -> Formatted:
    from kvdsl.diagnostics import Sink
    from kvdsl.syntax.formatter import format_source
    from kvdsl.syntax.reader import decode, read_bytes

    sink = Sink()
    path = None if name == "-" else Path(name)
    data = sys.stdin.buffer.read() if path is None else read_bytes(path, sink, name)
    source = None if data is None else decode(data, sink, name, path)
    if data is None or source is None:
        return Formatted(name, "", None, sink.sorted())
    if upgrade:
        from kvdsl.sema.upgrade import upgraded

        return Formatted(name, data.decode(), upgraded(source, sink), sink.sorted())
    return Formatted(name, data.decode(), format_source(source, sink), sink.sorted())


def _as_data(one: Formatted) -> dict[str, Any]:
    from kvdsl.diagnostics import render_json

    return {"file": one.name, "changed": one.changed, "text": one.after, "diagnostics": render_json(one.diagnostics)}


def _write(one: Formatted, *, quietly: bool = False) -> None:
    """Replace the file's text atomically."""
    if one.name == "-":
        click.echo(one.after or "", nl=False)
        return
    if not one.changed or one.after is None:
        return
    write_whole(Path(one.name), one.after)
    if not quietly:
        click.echo(f"formatted {one.name}")


def _difference(one: Formatted) -> str:
    before, after = one.before.splitlines(keepends=True), (one.after or "").splitlines(keepends=True)
    lines = difflib.unified_diff(before, after, f"{one.name} (there)", f"{one.name} (formatted)")
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _summary(found: list[Formatted], done: str) -> str:
    """`1 file formatted, 3 unchanged, 1 with syntax errors`."""
    counts = {
        done: sum(one.changed for one in found),
        "unchanged": sum(one.after == one.before for one in found),
        "with syntax errors": sum(one.after is None for one in found),
    }
    shown = [f"{count} {what}" for what, count in counts.items() if count]
    return f"{len(found)} file{'' if len(found) == 1 else 's'}: {', '.join(shown)}"
