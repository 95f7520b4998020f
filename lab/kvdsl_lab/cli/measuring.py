"""What evaluations share: the options for the model and the text, loading them, and printing tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdsl.budget import spelled
from kvdsl.cli.common import json_option, print_json, warning
from kvdsl.cli.options import BACKENDS, dtype_option, model_option, refuse_triton, texts
from kvdsl.precheck import settings_by_policy
from kvdsl_lab.eval.names import ASKER, parse_budgets, parse_policies

if TYPE_CHECKING:
    from kvdsl_lab.eval.caches import Policies


def text_option(command: Any) -> Any:
    """Add `--text`, which the command receives as `text: Path | None`, an existing file."""
    option = click.option(
        "--text", type=click.Path(path_type=Path, exists=True, dir_okay=False, allow_dash=True),
        help="A text file [default: the book that ships with kvdsl-lab].",
    )  # fmt: skip
    return option(texts("text")(command))


def model_and_text(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `Measured`'s arguments, and `as_json`."""
    for option in reversed((
        model_option, text_option,
        click.option("--backend", type=BACKENDS, default="auto", show_default=True, help="Backend of the policies."),
        click.option("--threads", type=click.IntRange(1), help="CPU threads [default: torch's]."),
        dtype_option, json_option,
    )):  # fmt: skip
        command = option(command)
    return command


def minutes_option(what: str) -> Callable[[Any], Any]:
    """Return the option `--minutes`, whose value `end_of` takes.

    Args:
        what: what happens to unfinished measurements, for the help.
    """
    return click.option(
        "--minutes", type=click.FloatRange(min=0, min_open=True), metavar="N",
        help=f"Time limit, including the time to load the model: {what}.",
    )  # fmt: skip


def end_of(minutes: float | None) -> float | None:
    """Return the `time.monotonic()` at which a command that starts now must end, or None without a limit."""
    return None if minutes is None else time.monotonic() + 60 * minutes


def quick_option(**small: Any) -> Callable[[Any], Any]:
    """Return the option `--quick`, which replaces the defaults of the named options; values that the user gives stay."""

    def shrink(ctx: click.Context, param: click.Parameter, quick: bool) -> None:
        if quick:
            ctx.default_map = {**(ctx.default_map or {}), **small}

    told = ", ".join(f"--{name.replace('_', '-')} {value}" for name, value in small.items())
    return click.option(
        "--quick", is_flag=True, is_eager=True, expose_value=False, callback=shrink,
        help=f"Quick look: defaults become {told}.",
    )  # fmt: skip


class Measured:
    """A model and a text, loaded from the options."""

    def __init__(self, model: str | None, text: Path | None, backend: str, threads: int | None, dtype: str | None) -> None:
        refuse_triton(backend)
        from kvdsl.busy import use_threads
        from kvdsl.generation.models import load_model
        from kvdsl.generation.text import read_text

        if told := use_threads(threads):
            warning(told)
        self.backend = backend
        self.text = read_text(text)
        self.model, self.tokenizer = load_model(model, dtype)

    def stretches(self, length: int, count: int) -> Any:
        """Return pieces of the text, int64 [count, length]; raise an error if they exceed the model's context."""
        from kvdsl.generation.models import check_length, windows

        check_length(self.model, length)
        return windows(self.tokenizer, self.text, length, count, apart=True)

    def print_json(self, content: Mapping[str, Any], seed: int | None = None) -> None:
        """Print the command's one JSON object."""
        print_json(content, dtype=str(self.model.dtype).removeprefix("torch."), seed=seed)


class Setting(Measured):
    """The common setting of an evaluation of policies."""

    def __init__(self, policies: str, budgets: str, settings: Mapping[str, str], **given: Any) -> None:
        if settings.keys() & {"budget", "ratio"}:
            raise click.UsageError("give budgets with --budgets, not with --set")
        self.budgets, names = parse_budgets(budgets), parse_policies(policies)
        settings_by_policy(names, settings, ASKER)
        from kvdsl_lab.eval.caches import Policies

        self.policies: Policies = Policies(names, settings, given["backend"])
        super().__init__(**given)
        self.pairs = len(list(self.policies.pairs(self.budgets)))

    def finish(self, rows: Sequence[Mapping[str, Any]], as_json: bool, seed: int | None = None, **facts: Any) -> None:
        """Print the result."""
        if as_json:
            self.print_json({**facts, "rows": list(rows)}, seed)
        else:
            show(rows)


# -- rows --------------------------------------------------------------------------------------------------------------

_FOR_PROGRAMS = ("depths", "curve", "by_length", "evicted", "most_held", "losses", "behind_full")


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of rows with the same keys."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    columns = [
        name for name in rows[0] if name not in _FOR_PROGRAMS and (name != "note" or any(row["note"] for row in rows))
    ]
    for name in columns:
        is_text = any(isinstance(row[name], str) for row in rows) or name == "note"
        table.add_column("" if name == "note" else name.replace("_", " "), justify="left" if is_text else "right")
    for row in rows:
        table.add_row(*(_cell(row[name], name) for name in columns))
    Console(highlight=False).print(table)


def _cell(value: Any, name: str) -> str:
    if value is None:
        return "" if name == "note" else "-"
    if name == "budget":
        return spelled(value)
    if isinstance(value, list):
        return " ".join(f"{one:.2f}" for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def tell(findings: Mapping[str, Mapping[str, Any]], of: str) -> None:
    """Print whether a paper's claims hold, one per line; `of` is the key of the number of comparisons."""
    for claim, found in findings.items():
        if found[of]:
            click.echo(f"{'holds' if found['holds'] else 'does not hold'}: {claim} ({found['held']} of {found[of]})")


# -- lists -------------------------------------------------------------------------------------------------------------


def names(text: str) -> list[str]:
    """Split `a,b` into words without duplicates."""
    return list(dict.fromkeys(piece.strip() for piece in text.split(",") if piece.strip()))


def whole_numbers(text: str) -> list[int]:
    """Split a list of numbers of at least 1, separated by commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise click.BadParameter(f"`{text}` is not a list of whole numbers above 0")
    return found
