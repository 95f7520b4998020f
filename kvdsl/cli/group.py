"""The group of all commands. A command's file is imported when the command is used, and other packages when they may have it."""

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
        "new": "Write a policy to begin with, and a test of it.",
        "check": "Check policies and say what is wrong, where, and how to mend it.",
        "test": "Run tests that are written in the language.",
        "fmt": "Lay out policies in the canonical way.",
        "explain": "Say in words what a policy does, or what an error code means.",
        "diff": "Say what is different between two policies.",
        "list": "List the policies that come with kvdsl.",
        "show": "Print a policy's source, and say where it lies.",
    },
    "Run": {
        "run": "Generate text under a policy, next to the full cache.",
        "compile": "Turn policies into Python packages.",
        "models": "Get language models by name, for --model NAME.",
    },
    "Measure": {},
    "Serve": {
        "serve": "Serve a model by vLLM, with a cache that a policy bounds.",
        "build": "Compile kernels ahead of time, and say what they take of a GPU.",
    },
    "Tools": {
        "doctor": "Say what works on this machine, and why the rest does not.",
        "lsp": "Serve editors: errors while you type, hovers, completion, renaming.",
    },
}
"""Heading -> name -> one line of help. `kvdsl/cli/NAME.py` holds the click command, called `command`. What measures is the laboratory's."""

COMMANDS = {name: line for own in GROUPS.values() for name, line in own.items()}
"""Name -> one line of help: kvdsl's own commands."""

Place = tuple[str, str]
"""The package that holds a command's module, and the command's line of help."""


@cache
def commands() -> dict[str, Place]:
    """All commands by name: kvdsl's own, and those of packages that are installed beside it.

    A package adds commands by an entry point of the group `kvdsl.commands` that names a dict such as `COMMANDS`.
    """
    found = {name: ("kvdsl.cli", line) for name, line in COMMANDS.items()}
    for package, added in _added():
        found = {name: (package, line) for name, line in added.items()} | found
    return {name: found[name] for own in grouped(found).values() for name in own}


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Commands by heading, both in the order in which they are useful. Those of packages that nobody here knows come last."""
    found = {heading: list(own) for heading, own in GROUPS.items()} | {"Added": []}
    for name in names:
        if name not in COMMANDS:
            found["Measure" if name in lab.COMMANDS else "Added"].append(name)
    return {heading: own for heading, own in found.items() if own}


def _added() -> Iterator[tuple[str, Mapping[str, str]]]:
    """Packages that are there, with the commands that they add. The laboratory counts where it can be imported, installed or not."""
    from importlib import metadata, util

    points = {point.module: point.attr for point in metadata.entry_points(group="kvdsl.commands")}
    points.setdefault(f"{lab.PACKAGE}.cli", "COMMANDS")
    for package, name in points.items():
        if util.find_spec(package.partition(".")[0]) is None:
            continue
        try:
            yield package, getattr(importlib.import_module(package), name)
        except Exception as failure:  # a broken package must not take the other commands away
            error(f"the commands of {package} cannot be imported: {type(failure).__name__}: {failure}")


class LazyGroup(click.Group):
    """A group that knows its commands' names and summaries without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order in which they are useful."""
        return list(commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, imported now; None if the name is unknown."""
        package = "kvdsl.cli" if cmd_name in COMMANDS else commands().get(cmd_name, (None,))[0]
        if package is None:
            return None
        command: click.Command = importlib.import_module(f"{package}.{cmd_name}").command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands that begin so, without importing any; and the group's own options."""
        found = [CompletionItem(name, help=line) for name, (_, line) in commands().items() if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with a help for names that are no commands."""
        strange = args and args[0] not in COMMANDS and not args[0].startswith("-") and args[0] not in commands()
        if strange and not ctx.resilient_parsing:  # a shell that completes shows errors in the prompt
            raise click.UsageError(_unknown(args[0]), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `--help`, without importing anything."""
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
    epilog="Exit codes: 0 all is well, 1 something was found, 2 could not run, 130 interrupted by Ctrl-C. "
    "`kvdsl COMMAND --help` has examples.",
)
@click.version_option(VERSION, prog_name="kvdsl")
def group(**_: Any) -> None:
    """A small language for the KV-cache policies of language models, and its compiler.

    \b
    kvdsl list                  what comes with it
    kvdsl explain roco          what a policy does, in words
    kvdsl compile roco          makes generated/roco/, so that
                                `from generated.roco import RoCoCache` works
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (the process's own by default) and give its exit code. Errors become one clear line."""
    # pydantic would look for plugins in every installed package, which takes a tenth of the time to start.
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    wait_passively()
    words = sys.argv[1:] if argv is None else list(argv)
    with _rarely_collected(), warnings_in_a_line(), of_a_command():
        return guarded(lambda: group.main(words, prog_name="kvdsl", standalone_mode=False), as_json=_wants_json(words))


def _wants_json(words: Sequence[str]) -> bool:
    """Whether what goes wrong is to be told as JSON: `--json`, and `explain --format json`."""
    return "--json" in words or "--format=json" in words or ("--format", "json") in pairwise(words)


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """What imports make stays: looking it through for garbage again and again takes a tenth of the time of a short command."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
