"""Options, exit codes, JSON output and error reports that commands share."""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.exceptions import NoArgsIsHelpError

from kvdsl.cli import completion
from kvdsl.errors import KvdslError

if TYPE_CHECKING:
    from kvdsl.diagnostics import Diagnostic
    from kvdsl.ir.nodes import Policy

CLEAN, FINDINGS, COULD_NOT_RUN = 0, 1, 2
"""Exit codes."""

FORMAT_VERSION = "1.0"

# Codes for missing input, as opposed to errors in a policy.
_USAGE_CODES = frozenset({"KV0214", "KV0215", "KV0216"})
_UNREADABLE = "KV0114"


def finish(code: int) -> NoReturn:
    """End the command with this exit code."""
    raise click.exceptions.Exit(code)


# -- options -----------------------------------------------------------------------------------------------------------


def _parse_settings(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    settings: dict[str, str] = {}
    for text in values:
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise click.BadParameter(f"`{text}` is not of the form NAME=VALUE, for example `--set budget=256`")
        settings[name.strip()] = value.strip()
    return settings


set_option = click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", callback=_parse_settings, shell_complete=completion.settings,
    help="Change the default of one of the policy's params; `ratio=0.25` is a budget of a quarter of the prompt. May be repeated.",
)  # fmt: skip
"""`--set NAME=VALUE`, passed to the command as `settings: dict[str, str]`."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text, also for errors.")
"""`--json`, passed to the command as `as_json: bool`."""


# -- files -------------------------------------------------------------------------------------------------------------

_SKIPPED = {"node_modules", "__pycache__", "site-packages"}


def kv_files(names: Iterable[str], *, tests: bool = False) -> list[str]:
    """Return the names to work on, by default the current folder, with folders replaced by the .kv files in them.

    Args:
        tests: whether to include `*_test.kv` of folders.
    """
    found: list[str] = []
    for name in names or (".",):
        found += _below(Path(name), tests) if Path(name).is_dir() else [name]
    return found


def _below(folder: Path, tests: bool) -> Iterator[str]:
    """Yield the .kv files of a folder and its subfolders, except hidden and installed ones."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in _SKIPPED:
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _below(path, tests)
        elif path.suffix == ".kv" and (tests or not path.stem.endswith("_test")) and not _tests_a_grammar(path):
            yield str(path)


def _tests_a_grammar(path: Path) -> bool:
    """Return whether a file tests an editor's grammar with vscode-tmgrammar-test; such files contain deliberate errors."""
    try:
        with path.open("rb") as stream:
            return stream.read(13) == b"# SYNTAX TEST"
    except OSError:
        return False


# -- output ------------------------------------------------------------------------------------------------------------


def print_json(content: Mapping[str, Any], *, dtype: str | None = None, seed: int | None = None) -> None:
    """Print the command's JSON object, with the format's version and the environment."""
    from kvdsl.environment import environment

    whole = {"format_version": FORMAT_VERSION, "environment": environment(dtype=dtype, seed=seed), **content}
    click.echo(json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False))


def terminal_width(most: int) -> int:
    """Return the width of standard output, from 40 to `most`; `most` without a terminal."""
    return max(40, min(most, shutil.get_terminal_size((most, 24)).columns))


def params_as_data(policy: Policy) -> list[dict[str, Any]]:
    """Return the params of a policy for a JSON object; defaults are expressions of the language."""
    from kvdsl.ir.printer import print_expression

    return [
        {"name": one.name, "default": print_expression(one.default), "unit": one.unit, "low": one.low, "high": one.high}
        for one in policy.params
    ]


def error(message: str, hint: str | None = None) -> None:
    """Print an error on standard error, and optionally a second line with a fix."""
    from kvdsl.diagnostics import wants_color

    color = wants_color(sys.stderr)
    click.echo(click.style("error", fg="red", bold=True) + f": {message}", err=True, color=color)
    if hint:
        click.echo(click.style("help", fg="cyan") + f": {hint}", err=True, color=color)


def warning(message: str) -> None:
    """Print a warning on standard error."""
    from kvdsl.diagnostics import wants_color

    click.echo(click.style("warning", fg="yellow", bold=True) + f": {message}", err=True, color=wants_color(sys.stderr))


@contextmanager
def warnings_in_a_line() -> Iterator[None]:
    """Print Python's warnings for users as one line, without a source location."""
    before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if category is UserWarning:
            warning(_one_line(str(message)))
        else:
            before(message, category, *place, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def report(diagnostics: Iterable[Diagnostic]) -> None:
    """Print diagnostics on standard error; nothing without any."""
    from kvdsl.diagnostics import render_human, wants_color

    found = list(diagnostics)
    for one in found:
        if _could_not_run(one):
            error(_one_line(one.message), one.help)
    text = render_human([one for one in found if not _could_not_run(one)], color=wants_color(sys.stderr))
    if text:
        click.echo(text, err=True, nl=False, color=wants_color(sys.stderr))


def exit_code(diagnostics: Iterable[Diagnostic], *, deny_warnings: bool = False) -> int:
    """Return the exit code for diagnostics: 2 if a policy is missing or could not be checked."""
    found = list(diagnostics)
    if any(_could_not_run(one) for one in found):
        return COULD_NOT_RUN
    return FINDINGS if any(one.severity == "error" or deny_warnings for one in found) else CLEAN


def _could_not_run(found: Diagnostic) -> bool:
    # A missing imported file is an error of the policy, and its diagnostic points at the import.
    return found.code in _USAGE_CODES or (found.code == _UNREADABLE and found.span.start == found.span.end)


# -- errors ------------------------------------------------------------------------------------------------------------


def guarded(action: Callable[[], Any], as_json: bool = False) -> int:
    """Run a command; turn every failure into a clear message and an exit code.

    Args:
        as_json: whether to report failures in the command's JSON object.
    """
    try:
        code = action()
        sys.stdout.flush()
        return code if isinstance(code, int) else CLEAN
    except BrokenPipeError:
        # The reader closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLEAN
    except (KeyboardInterrupt, click.Abort):
        error("interrupted")
        return 130
    except Exception as failure:
        return report_failure(failure, as_json)


def report_failure(failure: Exception, as_json: bool) -> int:
    """Report a failure; return its exit code."""
    from kvdsl.diagnostics import DiagnosticError, render_json, summary

    match failure:
        case DiagnosticError():
            report(failure.diagnostics)
            if as_json:
                errors = [one for one in failure.diagnostics if one.severity == "error"]
                several = {"message": summary(failure.diagnostics), "help": None}
                told = {"message": errors[0].message, "help": errors[0].help} if len(errors) == 1 else several
                print_json({"error": told, "diagnostics": render_json(failure.diagnostics)})
            return exit_code(failure.diagnostics)
        case NoArgsIsHelpError():
            click.echo(failure.format_message(), err=True)
            return COULD_NOT_RUN
    known = _in_words(failure)
    if known is None and os.environ.get("KVDSL_DEBUG") == "1":
        traceback.print_exception(failure)
    message, hint = known or _internal(failure)
    error(message, hint)
    if as_json:
        print_json({"error": {"message": message, "help": hint}, "diagnostics": []})
    return COULD_NOT_RUN


def _in_words(failure: Exception) -> tuple[str, str | None] | None:
    """Return a failure's message and fix; None for an internal error."""
    match failure:
        case click.ClickException():
            return _usage(failure)
        case KvdslError():
            return _one_line(str(failure)), None
        case OSError(strerror=reason, filename=name) if reason:
            return f"{name}: {reason}" if name is not None else reason, None
        case ModuleNotFoundError(name=name) if not (name or "").startswith("kvdsl"):
            return f"this needs {name}, which is not installed", "`kvdsl doctor` shows what is missing"
    return None


def _internal(failure: Exception) -> tuple[str, str]:
    text = _one_line(str(failure))[:200]
    hint = "please file an issue with the command and the policy; KVDSL_DEBUG=1 shows the traceback"
    return f"internal error: {type(failure).__name__}: {text}", hint


def _usage(failure: click.ClickException) -> tuple[str, str]:
    ctx = getattr(failure, "ctx", None)
    path = ctx.command_path if ctx is not None else "kvdsl"
    message = _one_line(failure.format_message()).rstrip(".")
    return message[:1].lower() + message[1:] if message[1:2].islower() else message, f"see `{path} --help`"


def _one_line(text: str) -> str:
    from kvdsl.diagnostics import printable

    return printable(" ".join(text.split()))
