"""Shell completion of commands, policies, files and params. `docs/howto/editors.md` describes how to enable it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from kvdsl.budget import offers_ratio
from kvdsl.errors import KvdslError
from kvdsl.shipped import all_policies, separate

POLICY = "roco"
"""The commands' default policies."""

_NAMING = ("named", "names", "policy", "policies", "files", "what")
"""The names of arguments and options that take policies."""


class _Bash(BashComplete):
    """click's completion, but without a space after incomplete words: `budget=` and `folder/`."""

    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)", "COMPREPLY+=($value)\n            [[ $value == *[=/] ]] && compopt -o nospace"
    )


add_completion_class(_Bash)


def policies(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete shipped policies, .kv files and folders; in a list `A,B` the last item."""
    before, comma, last = incomplete.rpartition(",")
    shipped = (path.stem for path in all_policies()) if "/" not in last else ()
    return [CompletionItem(before + comma + name) for name in [*shipped, *_paths(last)] if name.startswith(last)]


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete .kv files and folders."""
    return [CompletionItem(path) for path in _paths(incomplete) if path.startswith(incomplete)]


def policies_or_codes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete policies, and codes of diagnostics after `KV`."""
    from kvdsl.codes import CODES

    prefix = incomplete.upper()
    codes = CODES.values() if prefix.startswith("KV") else ()
    found = [CompletionItem(code.id, help=code.title) for code in codes if code.id.startswith(prefix)]
    return found + policies(ctx, param, incomplete)


def settings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete `NAME=` for params of the policies named earlier on the command line."""
    items: dict[str, CompletionItem] = {}
    for policy in _named(ctx):
        for name, default in _params(policy):
            items.setdefault(name, CompletionItem(f"{name}=", help=f"{policy}: {default}"))
        if offers_ratio([name for name, _ in _params(policy)]):
            items.setdefault("ratio", CompletionItem("ratio=", help=f"{policy}: the budget as a ratio of the prompt"))
    return [item for name, item in items.items() if name.startswith(incomplete)]


def _paths(start: str) -> Iterator[str]:
    """Yield the .kv files and folders that start with this path."""
    folder = start[: start.rfind("/") + 1]
    try:
        found = sorted(Path(folder or ".").iterdir())
    except OSError:
        return
    for path in found:
        hidden = path.name.startswith((".", "__"))
        if not hidden and (path.suffix == ".kv" or path.is_dir()):
            yield f"{folder}{path.name}{'/' if path.is_dir() else ''}"


def _named(ctx: click.Context) -> Iterable[str]:
    """Return the policies named so far, or the command's default."""
    found = [
        word for word in ctx.args if not word.startswith("-")
    ]  # click counts words after an option without a value as arguments
    for name in _NAMING:
        value = ctx.params.get(name)
        for one in (value,) if isinstance(value, str) else value or ():
            found += separate(one)
    return found or [POLICY]


def _params(policy: str) -> Iterator[tuple[str, str]]:
    """Yield a policy's params with their defaults; none if it cannot be read."""
    from kvdsl.compiler import analyse, find_policy
    from kvdsl.ir.printer import print_expression

    if ".py" in policy:  # completion must not execute code
        return
    try:
        checked = analyse(find_policy(policy)).policy
    except KvdslError:
        return
    for param in checked.params:
        yield param.name, print_expression(param.default)
