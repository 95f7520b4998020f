"""The group of all commands. A command's module is imported when it is used, and other packages as late as possible."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any

import click
from click.shell_completion import CompletionItem

from kvdsl import lab
from kvdsl.abi import VERSION
from kvdsl.busy import wait_passively
from kvdsl.cli.common import error, guarded, warnings_in_a_line
from kvdsl.files import of_a_command

GROUPS = {
    "Write": {
        "new": "Create a policy to start from, with a test.",
        "check": "Check policies, and show errors with their place and fix.",
        "test": "Run tests written in the language.",
        "fmt": "Format policies.",
        "explain": "Describe a policy, or the code of a diagnostic.",
        "diff": "Compare two policies.",
        "list": "List the shipped policies.",
        "show": "Print a policy's source, and its path.",
    },
    "Run": {
        "run": "Generate text under a policy, next to the full cache.",
        "compile": "Compile policies to Python packages.",
        "models": "Get language models by name, for --model NAME.",
    },
    "Measure": {},
    "Serve": {
        "serve": "Serve a model with vLLM under a policy.",
        "build": "Compile kernels ahead of time, and report their use of a GPU.",
    },
    "Tools": {
        "doctor": "Show what works on this machine, and what does not.",
        "lsp": "Serve editors: errors while you type, hovers, completion, renaming.",
    },
}
"""Heading -> name -> summary. `kvdsl/cli/NAME.py` holds the click command, called `command`. The laboratory adds measurements."""

COMMANDS = {name: line for own in GROUPS.values() for name, line in own.items()}
"""Name -> summary of kvdsl's own commands."""

Place = tuple[str, str]
"""The package with a command's module, and the command's summary."""


@cache
def commands() -> dict[str, Place]:
    """Return all commands by name: kvdsl's own, and those of other installed packages.

    A package adds commands by an entry point of the group `kvdsl.commands` that names a dict such as `COMMANDS`.
    """
    found = {name: ("kvdsl.cli", line) for name, line in COMMANDS.items()}
    for package, added in _added():
        found = {name: (package, line) for name, line in added.items()} | found
    return {name: found[name] for own in grouped(found).values() for name in own}


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Return commands by heading, both in order of use; commands of unknown packages come last."""
    found = {heading: list(own) for heading, own in GROUPS.items()} | {"Added": []}
    for name in names:
        if name not in COMMANDS:
            found["Measure" if name in lab.COMMANDS else "Added"].append(name)
    return {heading: own for heading, own in found.items() if own}


def _added() -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield packages with their commands. The laboratory counts if it can be imported, installed or not."""
    from importlib import metadata, util

    points = {point.module: point.attr for point in metadata.entry_points(group="kvdsl.commands")}
    points.setdefault(f"{lab.PACKAGE}.cli", "COMMANDS")
    for package, name in points.items():
        if util.find_spec(package.partition(".")[0]) is None:
            continue
        try:
            yield package, getattr(importlib.import_module(package), name)
        except Exception as failure:  # a broken package must not disable the other commands
            error(f"the commands of {package} cannot be imported: {type(failure).__name__}: {failure}")


class LazyGroup(click.Group):
    """A group that lists its commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in order of use."""
        return list(commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, imported now; None if the name is unknown."""
        package = "kvdsl.cli" if cmd_name in COMMANDS else commands().get(cmd_name, (None,))[0]
        if package is None:
            return None
        command: click.Command = importlib.import_module(f"{package}.{cmd_name}").command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete commands without importing any, and the group's own options."""
        found = [CompletionItem(name, help=line) for name, (_, line) in commands().items() if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve like click, with a help for unknown names."""
        strange = args and args[0] not in COMMANDS and not args[0].startswith("-") and args[0] not in commands()
        if strange and not ctx.resilient_parsing:  # during completion errors would appear in the prompt
            raise click.UsageError(_unknown(args[0]), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of `--help` without importing any command."""
        known = commands()
        width = max(map(len, known))
        for heading, names in grouped(known).items():
            with formatter.section(heading):
                formatter.write_dl([(f"{name:<{width}}", known[name][1]) for name in names])
        missing = [name for name in lab.COMMANDS if name not in commands()]
        if missing:
            with formatter.section("Not installed"):
                formatter.write_dl([(", ".join(missing), f"part of kvdsl-lab: {lab.INSTALL}")])


def _unknown(name: str) -> str:
    from kvdsl.diagnostics import did_you_mean, printable

    if name in lab.COMMANDS:
        return f"`kvdsl {name}` is part of kvdsl-lab, which is not installed: {lab.INSTALL}"
    if name.endswith(".kv"):
        return f"`{printable(name)}` is a file, not a command; did you mean `kvdsl compile {printable(name)}`?"
    hint = did_you_mean(name, commands())
    return f"there is no command `{printable(name)}`" + (f"; {hint}" if hint else "")


@click.command(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 success, 1 findings, 2 could not run, 130 interrupted by Ctrl-C. "
    "`kvdsl COMMAND --help` has examples.",
)
@click.version_option(VERSION, prog_name="kvdsl")
def group(**_: Any) -> None:
    """A small language for the KV-cache policies of language models, and its compiler.

    \b
    kvdsl list                  the shipped policies
    kvdsl explain roco          describe a policy
    kvdsl compile roco          makes generated/roco/, so that
                                `from generated.roco import RoCoCache` works
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line, by default the process's own, and return its exit code. Errors become one clear line."""
    # pydantic would search every installed package for plugins, a tenth of the start time.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    wait_passively()
    words = sys.argv[1:] if argv is None else list(argv)
    with _rarely_collected(), warnings_in_a_line(), of_a_command():
        return guarded(lambda: group.main(words, prog_name="kvdsl", standalone_mode=False), as_json=_wants_json(words))


def _wants_json(words: Sequence[str]) -> bool:
    """Return whether errors are reported as JSON: for `--json`, and `explain --format json`."""
    return "--json" in words or "--format=json" in words or ("--format", "json") in pairwise(words)


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Collect garbage rarely: scanning what imports create takes a tenth of a short command's time."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
