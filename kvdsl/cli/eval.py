"""`kvdsl eval`: what a policy costs in quality."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdsl.cli.bench import BACKENDS, refuse_triton
from kvdsl.cli.common import json_option, print_json, set_option
from kvdsl.cli.run import dtype_option, model_option

if TYPE_CHECKING:
    from kvdsl.eval.caches import Policies

_POLICIES = "full,window,streaming_llm,h2o,roco"


def shared(command: Callable[..., None]) -> Callable[..., None]:
    """The options that all evaluations have."""
    for option in reversed((
        click.option("--policies", default=_POLICIES, show_default=True, metavar="A,B", help="Shipped policies, or .kv files."),
        click.option("--budgets", default="64,128,256", show_default=True, metavar="N,M", help="Budgets to run each with."),
        set_option, model_option,
        click.option("--text", type=click.Path(path_type=Path, exists=True, dir_okay=False),
                     help="A text file [default: the book that ships with kvdsl]."),
        click.option("--backend", type=BACKENDS, default="auto", show_default=True, help="What runs the policies."),
        click.option("--threads", type=click.IntRange(1), help="CPU threads [default: torch's own]."),
        dtype_option, json_option,
    )):  # fmt: skip
        command = option(command)
    return command


@click.group()
def command() -> None:
    """Measure what a policy costs in quality: perplexity, fidelity to the full cache's text, recall."""


class Setting:
    """What every evaluation begins with."""

    def __init__(
        self, policies: str, budgets: str, settings: Mapping[str, str], model: str | None, text: Path | None, backend: str,
        threads: int | None, dtype: str | None,
    ) -> None:  # fmt: skip
        refuse_triton(backend)
        import torch

        from kvdsl.eval.caches import Policies, parse_budgets, parse_policies
        from kvdsl.eval.models import load_model, read_text

        self.budgets = parse_budgets(budgets)
        self.policies: Policies = Policies(parse_policies(policies), settings, backend)
        if threads:
            torch.set_num_threads(threads)
        self.text = read_text(text)
        self.model, self.tokenizer = load_model(model, dtype)
        self.pairs = len(list(self.policies.pairs(self.budgets)))

    def finish(self, rows: Sequence[Mapping[str, Any]], as_json: bool, seed: int | None = None, **facts: Any) -> None:
        """Print the result."""
        if as_json:
            print_json({**facts, "rows": list(rows)}, dtype=str(self.model.dtype).removeprefix("torch."), seed=seed)
        else:
            _show(rows)


@command.command()
@shared
@click.option("--tokens", type=click.IntRange(2), default=1024, show_default=True, help="Length of a stretch of text.")
@click.option("--stretches", type=click.IntRange(1), default=8, show_default=True, help="Stretches, evenly over the text.")
@click.option("--chunk", type=click.IntRange(1), default=1, show_default=True, help="Tokens fed at a time.")
@click.option(
    "--by", type=click.IntRange(1), metavar="N",
    help="A row for every N tokens of a stretch, which may then be longer than the model was made for.",
)  # fmt: skip
def ppl(tokens: int, stretches: int, chunk: int, by: int | None, as_json: bool, **setting: Any) -> None:
    """Perplexity of tokens that are predicted through the cache.

    The text is fed chunk by chunk (1 is token by token, as while generating); the policy evicts after each.

    \b
    Examples:
      kvdsl eval ppl --policies full,window,streaming_llm,roco --budgets 32,128 --tokens 1024
      kvdsl eval ppl --policies streaming_llm,window --budgets 512 --tokens 20001 --stretches 1 --by 2000
    """
    begun = Setting(**setting)
    from kvdsl.cli.progress import progress
    from kvdsl.eval.models import check_length, windows
    from kvdsl.eval.perplexity import perplexities, steps

    if by is None:
        check_length(begun.model, tokens)
    ids = windows(begun.tokenizer, begun.text, tokens, stretches)
    with progress("perplexity", begun.pairs * steps(tokens, chunk)) as tick:
        rows = perplexities(begun.model, ids, begun.policies, begun.budgets, chunk, tick, by)
    begun.finish(rows, as_json, stretches=stretches, stretch_tokens=tokens, chunk=chunk)


@command.command()
@shared
@click.option("--prompt-tokens", type=click.IntRange(2), default=512, show_default=True, help="Length of a prompt.")
@click.option("--new-tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens to generate after each.")
@click.option("--prompts", type=click.IntRange(1), default=8, show_default=True, help="Prompts, evenly over the text.")
@click.option("--chunk", type=click.IntRange(1), help="Tokens of the prompt fed at a time [default: all].")
def fidelity(prompt_tokens: int, new_tokens: int, prompts: int, chunk: int | None, as_json: bool, **setting: Any) -> None:
    """Greedy text under a policy against the full cache's: ROUGE, BLEU, equal first tokens.

    \b
    Example:
      kvdsl eval fidelity --policies h2o,roco --budgets 64,128
    """
    from kvdsl.eval.fidelity import check_installed, fidelities

    check_installed()
    begun = Setting(**setting)
    from kvdsl.cli.progress import progress
    from kvdsl.eval.models import check_length, windows

    check_length(begun.model, prompt_tokens + new_tokens)
    ids = windows(begun.tokenizer, begun.text, prompt_tokens, prompts)
    with progress("fidelity", begun.pairs + 1) as tick:
        rows = fidelities(begun.model, begun.tokenizer, ids, new_tokens, begun.policies, begun.budgets, chunk, tick)
    begun.finish(rows, as_json, prompts=prompts, prompt_tokens=prompt_tokens, new_tokens=new_tokens, chunk=chunk)


@command.command()
@shared
@click.option("--length", type=click.IntRange(64), default=1024, show_default=True, help="Tokens of a prompt.")
@click.option("--trials", type=click.IntRange(1), default=10, show_default=True, help="Trials for every task and depth.")
@click.option(
    "--pairs", type=click.IntRange(1, 48), default=8, show_default=True, help="Named numbers in a key-value prompt."
)
@click.option("--chunk", type=click.IntRange(1), help="Tokens of the prompt fed at a time [default: all].")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the tasks.")
def retrieval(length: int, trials: int, pairs: int, chunk: int | None, seed: int, as_json: bool, **setting: Any) -> None:
    """Pass-keys and named numbers hidden at several depths of a text, asked for at its end.

    \b
    Example:
      kvdsl eval retrieval --policies full,h2o,roco --budgets 128,256 --length 1024
    """
    begun = Setting(**setting)
    from kvdsl.cli.progress import progress
    from kvdsl.eval.models import check_length
    from kvdsl.eval.retrieval import make_trials, retrievals

    check_length(begun.model, length + 8)
    made = make_trials(begun.tokenizer, begun.text, length, trials, seed, pairs)
    with progress("retrieval", begun.pairs * len(made)) as tick:
        rows = retrievals(begun.model, made, begun.policies, begun.budgets, chunk, tick)
    begun.finish(rows, as_json, seed, length=length, trials=trials, pairs=pairs, chunk=chunk)


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    columns = [name for name in rows[0] if name != "depths"]
    for name in columns:
        table.add_column(name.replace("_", " "), justify="left" if name in ("policy", "task") else "right")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in columns))
    Console(highlight=False).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(f"{one:.2f}" for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
