"""`kvdsl eval`: what a policy costs in quality."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdsl.cli.common import json_option, print_json, set_option
from kvdsl.cli.options import BACKENDS, dtype_option, model_option, refuse_triton

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


@command.command()
@click.option("--selectors", default=None, metavar="A,B", help="What dims are chosen by [default: all, and Quest].")
@click.option("--dims", default="2,4,8,16,32,64", show_default=True, metavar="N,M", help="Dims of the sketch.")
@click.option("--tokens", default="64", show_default=True, metavar="N,M", help="Tokens that a query attends to.")
@click.option("--intervals", default="64", show_default=True, metavar="N,M", help="Queries from one sketch to the next.")
@click.option("--length", type=click.IntRange(8), default=768, show_default=True, help="Tokens of a stretch of text.")
@click.option(
    "--prompt-tokens", type=click.IntRange(1), default=512, show_default=True, help="How many of these are the prompt."
)
@click.option("--stretches", type=click.IntRange(1), default=4, show_default=True, help="Stretches, evenly over the text.")
@click.option("--queries", type=click.IntRange(1), default=32, show_default=True, help="Queries whose masks are compared.")
@model_option
@click.option(
    "--text",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A text file [default: the book that ships with kvdsl].",
)
@click.option("--backend", type=BACKENDS, default="auto", show_default=True, help="What runs the policies.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads [default: torch's own].")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random dims.")
@dtype_option
@json_option
def sketch(
    selectors: str | None, dims: str, tokens: str, intervals: str, length: int, prompt_tokens: int, stretches: int, queries: int,
    model: str | None, text: Path | None, backend: str, threads: int | None, seed: int, dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    """How well a few dims tell which tokens matter (SparCas, equations 5 and 6, tables 2 to 4).

    The mask difference is the share of tokens that are chosen by the sketch but not by the whole keys, or the other way round; the
    construction error is how far the scores over the sketch's dims lie from the whole ones. `full` has the full cache's perplexity.

    \b
    Examples:
      kvdsl eval sketch
      kvdsl eval sketch --selectors abs_q --dims 16 --tokens 32,64,128 --intervals 1,16,64,256
    """
    refuse_triton(backend)
    import torch

    from kvdsl.cli.progress import progress
    from kvdsl.eval import sketch as sketching
    from kvdsl.eval.models import check_length, load_model, read_text, windows

    if length <= prompt_tokens:
        raise click.BadParameter("a stretch must be longer than its prompt", param_hint="--length")
    if threads:
        torch.set_num_threads(threads)
    names = [*sketching.BY_DIMS, sketching.QUEST] if selectors is None else [name.strip() for name in selectors.split(",")]
    wanted = sketching.settings(names, _whole(dims), _whole(tokens), _whole(intervals))
    loaded, tokenizer = load_model(model, dtype)
    check_length(loaded, length)
    ids = windows(tokenizer, read_text(text), length, stretches)
    runs = 1 + sum(setting.selector != "token_wise" for setting in wanted)
    with progress("sketches", runs * sketching.steps(ids, prompt_tokens)) as tick:
        full = sketching.full_perplexity(loaded, ids, prompt_tokens, backend, tick)
        rows = sketching.evaluate(loaded, ids, prompt_tokens, wanted, queries=queries, backend=backend, seed=seed, tick=tick)
    findings = sketching.findings(rows)
    if as_json:
        facts = {"length": length, "prompt_tokens": prompt_tokens, "stretches": stretches, "queries": queries}
        print_json(
            {**facts, "full_ppl": round(full, 4), "rows": rows, "findings": findings},
            dtype=str(loaded.dtype).removeprefix("torch."), seed=seed,
        )  # fmt: skip
        return
    _show([{"selector": "full", "dims": None, "tokens": None, "interval": None, "mask_diff": 0.0, "construction_error": 0.0,
            "ppl": round(full, 4)}, *rows])  # fmt: skip
    for claim, found in findings.items():
        if found["pairs"]:
            click.echo(f"{'holds' if found['holds'] else 'does not hold'}: {claim} ({found['held']} of {found['pairs']})")


def _whole(text: str) -> list[int]:
    """Numbers of at least 1, separated by commas."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise click.BadParameter(f"`{text}` is no list of whole numbers above 0")
    return found


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    columns = [name for name in rows[0] if name != "depths"]
    for name in columns:
        table.add_column(name.replace("_", " "), justify="left" if name in ("policy", "task", "selector") else "right")
    for row in rows:
        table.add_row(*(_cell(row[name]) for name in columns))
    Console(highlight=False).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, list):
        return " ".join(f"{one:.2f}" for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)
