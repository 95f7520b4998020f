"""What a shell completes: the names of commands, policies, files and params. `docs/howto/editors.md` says how to turn it on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from click.shell_completion import BashComplete, CompletionItem, add_completion_class

from kvdsl.budget import offers_ratio
from kvdsl.errors import KvdslError
from kvdsl.shipped import all_policies, separate

POLICY = "roco"
"""What commands take that are given none."""

_NAMING = ("named", "names", "policy", "policies", "files", "what")
"""What commands call the arguments and options that name policies."""


class _Bash(BashComplete):
    """As click's, but no space follows what is not complete yet: `budget=` and `folder/`."""

    source_template = BashComplete.source_template.replace(
        "COMPREPLY+=($value)", "COMPREPLY+=($value)\n            [[ $value == *[=/] ]] && compopt -o nospace"
    )


add_completion_class(_Bash)


def policies(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Shipped policies, and .kv files and folders; of a list `A,B` the last."""
    before, comma, last = incomplete.rpartition(",")
    shipped = (path.stem for path in all_policies()) if "/" not in last else ()
    return [CompletionItem(before + comma + name) for name in [*shipped, *_paths(last)] if name.startswith(last)]


def files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """.kv files, and folders."""
    return [CompletionItem(path) for path in _paths(incomplete) if path.startswith(incomplete)]


def policies_or_codes(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What `kvdsl explain` explains: policies, and the codes of diagnostics once `KV` stands there."""
    from kvdsl.codes import CODES

    prefix = incomplete.upper()
    codes = CODES.values() if prefix.startswith("KV") else ()
    found = [CompletionItem(code.id, help=code.title) for code in codes if code.id.startswith(prefix)]
    return found + policies(ctx, param, incomplete)


def settings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """`NAME=` for the params of the policies that the command line names before."""
    items: dict[str, CompletionItem] = {}
    for policy in _named(ctx):
        for name, default in _params(policy):
            items.setdefault(name, CompletionItem(f"{name}=", help=f"{policy}: {default}"))
        if offers_ratio([name for name, _ in _params(policy)]):
            items.setdefault("ratio", CompletionItem("ratio=", help=f"{policy}: the budget as a ratio of the prompt"))
    return [item for name, item in items.items() if name.startswith(incomplete)]


def _paths(start: str) -> Iterator[str]:
    """The .kv files and the folders whose path begins so."""
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
    """The policies that are named so far; the command's own default without any."""
    found = [word for word in ctx.args if not word.startswith("-")]  # an option without a value keeps them out of the params
    for name in _NAMING:
        value = ctx.params.get(name)
        for one in (value,) if isinstance(value, str) else value or ():
            found += separate(one)
    return found or [POLICY]


def _params(policy: str) -> Iterator[tuple[str, str]]:
    """A policy's params with their defaults; none of one that cannot be read."""
    from kvdsl.compiler import analyse, find_policy
    from kvdsl.ir.printer import print_expression

    if ".py" in policy:  # a shell that completes runs nobody's code
        return
    try:
        checked = analyse(find_policy(policy)).policy
    except KvdslError:
        return
    for param in checked.params:
        yield param.name, print_expression(param.default)
