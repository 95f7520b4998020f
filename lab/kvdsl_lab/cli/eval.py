"""`kvdsl eval`: how much quality a policy loses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from kvdsl.cli.common import warning
from kvdsl.cli.options import cache_options, policies_option
from kvdsl_lab.cli.eval_attention import consistency, persistence
from kvdsl_lab.cli.eval_benchmarks import longbench, ruler
from kvdsl_lab.cli.measuring import (
    Measured,
    Setting,
    end_of,
    minutes_option,
    model_and_text,
    names,
    quick_option,
    show,
    tell,
    whole_numbers,
)

_POLICIES = "full,window,streaming_llm,h2o,roco"


def shared(command: Callable[..., None]) -> Callable[..., None]:
    """Options of all evaluations."""
    command = model_and_text(command)
    for option in reversed((
        policies_option(_POLICIES),
        click.option("--budgets", default="64,128,256", show_default=True, metavar="N,M",
                     help="Budgets of each policy: tokens, or ratios (0.25; 1.0 is everything)."),
        cache_options,
    )):  # fmt: skip
        command = option(command)
    return command


@click.group()
def command() -> None:
    """Measure how much quality a policy loses: perplexity, fidelity to the full cache's text, recall."""


@command.command()
@shared
@quick_option(budgets="32", tokens=128, stretches=6, minutes=1)
@click.option("--tokens", type=click.IntRange(2), default=1024, show_default=True, help="Length of a stretch of text.")
@click.option(
    "--stretches", type=click.IntRange(1), default=8, show_default=True, help="Stretches, spread evenly over the text."
)
@click.option("--chunk", type=click.IntRange(1), default=1, show_default=True, help="Tokens fed at a time.")
@minutes_option("every stretch is cut to the tokens that all policies have read")
@click.option(
    "--by", type=click.IntRange(1), metavar="N",
    help="Print a row for every N tokens of a stretch, which may then exceed the model's context.",
)  # fmt: skip
def ppl(
    tokens: int, stretches: int, chunk: int, minutes: float | None, by: int | None, as_json: bool, **setting: Any
) -> None:  # fmt: skip
    """Perplexity of a text under a policy.

    The model reads the text chunk by chunk (1 is token by token, as in decoding), and the policy evicts after each chunk. A ratio as
    budget (0.25) is of a stretch. Rows of policies that never evicted say so: they measure the full cache. `low` and `high` are the
    95 % interval of the perplexity over stretches. `against full` is a paired test over stretches; it needs at least six of them and
    the policy `full`.

    \b
    Examples:
      kvdsl eval ppl --quick
      kvdsl eval ppl --policies full,window,streaming_llm,roco --budgets 32,128 --tokens 1024
      kvdsl eval ppl --policies streaming_llm,window --budgets 512 --tokens 20001 --stretches 1 --by 2000
    """
    until = end_of(minutes)
    begun = Setting(**setting)
    from kvdsl.cli.progress import progress
    from kvdsl.generation.models import check_length, windows
    from kvdsl_lab.eval.differences import with_intervals
    from kvdsl_lab.eval.perplexity import perplexities, steps

    if by is None:
        check_length(begun.model, tokens)
    ids = windows(begun.tokenizer, begun.text, tokens, stretches, apart=True)
    with progress("perplexity", begun.pairs * steps(tokens, chunk)) as tick:
        rows = perplexities(begun.model, ids, begun.policies, begun.budgets, chunk, tick, by, until)
    read = sum(row["tokens"] for row in rows) // (begun.pairs * stretches)
    if read < tokens - 1:
        warning(f"time ran out: {read} of the {tokens - 1} tokens of each stretch were read")
    begun.finish(with_intervals(rows), as_json, stretches=stretches, stretch_tokens=tokens, chunk=chunk)


@command.command()
@shared
@quick_option(budgets="64,128", prompt_tokens=256, new_tokens=32, prompts=2)
@click.option("--prompt-tokens", type=click.IntRange(2), default=512, show_default=True, help="Length of a prompt.")
@click.option("--new-tokens", type=click.IntRange(1), default=128, show_default=True, help="Tokens to generate after each.")
@click.option(
    "--prompts", type=click.IntRange(1), default=8, show_default=True, help="Prompts, spread evenly over the text."
)
@click.option("--chunk", type=click.IntRange(1), help="Tokens of the prompt fed at a time [default: all].")
def fidelity(prompt_tokens: int, new_tokens: int, prompts: int, chunk: int | None, as_json: bool, **setting: Any) -> None:
    """Compare greedy text under a policy with the full cache's: ROUGE, BLEU, equal first tokens.

    \b
    Example:
      kvdsl eval fidelity --policies h2o,roco --budgets 64,128
    """
    from kvdsl_lab.eval.fidelity import check_installed, fidelities

    check_installed()
    begun = Setting(**setting)
    from kvdsl.cli.progress import progress
    from kvdsl.generation.models import check_length, windows

    check_length(begun.model, prompt_tokens + new_tokens)
    ids = windows(begun.tokenizer, begun.text, prompt_tokens, prompts)
    with progress("fidelity", begun.pairs + 1) as tick:
        rows = fidelities(begun.model, begun.tokenizer, ids, new_tokens, begun.policies, begun.budgets, chunk, tick)
    begun.finish(rows, as_json, prompts=prompts, prompt_tokens=prompt_tokens, new_tokens=new_tokens, chunk=chunk)


@command.command()
@shared
@quick_option(budgets="64,128", length=512, trials=2)
@click.option("--length", type=click.IntRange(64), default=1024, show_default=True, help="Tokens of a prompt.")
@click.option("--trials", type=click.IntRange(1), default=10, show_default=True, help="Trials for every task and depth.")
@click.option(
    "--pairs", type=click.IntRange(1, 48), default=8, show_default=True, help="Named numbers in a key-value prompt."
)
@click.option("--chunk", type=click.IntRange(1), help="Tokens of the prompt fed at a time [default: all].")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the tasks.")
def retrieval(length: int, trials: int, pairs: int, chunk: int | None, seed: int, as_json: bool, **setting: Any) -> None:
    """Recall of pass-keys and named numbers that are hidden at several depths of a text.

    \b
    Example:
      kvdsl eval retrieval --policies full,h2o,roco --budgets 128,256 --length 1024
    """
    begun = Setting(**setting)
    from kvdsl.cli.progress import progress
    from kvdsl.generation.models import check_length
    from kvdsl_lab.eval.retrieval import make_trials, retrievals

    check_length(begun.model, length + 8)
    made = make_trials(begun.tokenizer, begun.text, length, trials, seed, pairs)
    with progress("retrieval", begun.pairs * len(made)) as tick:
        rows = retrievals(begun.model, made, begun.policies, begun.budgets, chunk, tick)
    begun.finish(rows, as_json, seed, length=length, trials=trials, pairs=pairs, chunk=chunk)


@command.command()
@click.option("--selectors", default=None, metavar="A,B", help="How dims are chosen [default: all ways, and Quest].")
@click.option("--dims", default="2,4,8,16,32,64", show_default=True, metavar="N,M", help="Dims of the sketch.")
@click.option("--tokens", default="64", show_default=True, metavar="N,M", help="Tokens that a query attends to.")
@click.option(
    "--intervals", default="64", show_default=True, metavar="N,M", help="Queries between two updates of the sketch."
)
@click.option("--length", type=click.IntRange(8), default=768, show_default=True, help="Tokens of a stretch of text.")
@click.option(
    "--prompt-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Tokens of a stretch that are the prompt.",
)
@click.option(
    "--stretches", type=click.IntRange(1), default=4, show_default=True, help="Stretches, spread evenly over the text."
)
@click.option("--queries", type=click.IntRange(1), default=32, show_default=True, help="Queries whose masks are compared.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random dims.")
@model_and_text
def sketch(
    selectors: str | None, dims: str, tokens: str, intervals: str, length: int, prompt_tokens: int, stretches: int, queries: int,
    seed: int, as_json: bool, **given: Any,
) -> None:  # fmt: skip
    """How well a sketch of few dims finds the tokens that matter (SparCas, equations 5 and 6, tables 2 to 4).

    The mask difference is the share of tokens that only one of the sketch and the whole keys selects. The construction error is the
    distance between scores over the sketch's dims and whole scores. `full` has the full cache's perplexity.

    \b
    Examples:
      kvdsl eval sketch
      kvdsl eval sketch --selectors abs_q --dims 16 --tokens 32,64,128 --intervals 1,16,64,256
    """
    if length <= prompt_tokens:
        raise click.BadParameter("a stretch must be longer than its prompt", param_hint="--length")
    begun = Measured(**given)
    from kvdsl.cli.progress import progress
    from kvdsl_lab.eval import sketch as sketching

    chosen = [*sketching.BY_DIMS, sketching.QUEST] if selectors is None else names(selectors)
    wanted = sketching.settings(chosen, whole_numbers(dims), whole_numbers(tokens), whole_numbers(intervals))
    ids = begun.stretches(length, stretches)
    runs = 1 + sum(setting.selector != "token_wise" for setting in wanted)
    with progress("sketches", runs * sketching.steps(ids, prompt_tokens)) as tick:
        full = sketching.full_perplexity(begun.model, ids, prompt_tokens, begun.backend, tick)
        rows = sketching.evaluate(
            begun.model, ids, prompt_tokens, wanted, queries=queries, backend=begun.backend, seed=seed, tick=tick
        )
    findings = sketching.findings(rows)
    if as_json:
        facts = {"length": length, "prompt_tokens": prompt_tokens, "stretches": stretches, "queries": queries}
        begun.print_json({**facts, "full_ppl": round(full, 4), "rows": rows, "findings": findings}, seed)
        return
    show([{"selector": "full", "dims": None, "tokens": None, "interval": None, "mask_diff": 0.0, "construction_error": 0.0,
           "ppl": round(full, 4)}, *rows])  # fmt: skip
    tell(findings, "pairs")


for _one in (consistency, persistence, longbench, ruler):
    command.add_command(_one)
