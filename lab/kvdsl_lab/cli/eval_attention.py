"""`kvdsl eval consistency` and `kvdsl eval persistence`: how attention behaves, and what a policy can know of it."""

from __future__ import annotations

from typing import Any

import click

from kvdsl.budget import is_rate
from kvdsl.errors import KvdslError
from kvdsl_lab.cli.measuring import Measured, model_and_text, names, show, tell
from kvdsl_lab.eval.names import parse_budgets


@click.command()
@click.option("--scores", default="aas,aqas,ltas,mas", show_default=True, metavar="A,B", help="Scores to compare.")
@click.option(
    "--budgets", default="0.3,0.4,0.5,0.6", show_default=True, metavar="R,S", help="Budgets, as ratios of a stretch."
)
@click.option("--length", type=click.IntRange(8), default=512, show_default=True, help="Tokens of a stretch of text.")
@click.option(
    "--stretches", type=click.IntRange(1), default=4, show_default=True, help="Stretches, spread evenly over the text."
)
@model_and_text
def consistency(scores: str, budgets: str, length: int, stretches: int, as_json: bool, **given: Any) -> None:
    """How far scores computed from cached tokens agree with those of the full cache (RoCo, figure 2).

    \b
    aas   sum(attn)                           H2O
    aqas  sum(attn > mean(attn over slots))   ScissorHands
    ltas  last(attn)                          TOVA
    mas   mean(attn)                          RoCo

    The model reads the text token by token. The policy keeps the tokens with the highest scores, without a window of recent tokens.
    The result is the mean Jaccard similarity between its tokens and the same number of tokens with the highest scores under the full
    cache.

    \b
    Example:
      kvdsl eval consistency --budgets 0.3,0.5 --length 512
    """
    wanted, rates = names(scores), _rates(budgets)
    begun = Measured(**given)
    from kvdsl.cli.progress import progress
    from kvdsl_lab.eval import consistency as measuring

    ids = begun.stretches(length, stretches)
    with progress("consistency", measuring.steps(length, wanted, rates)) as tick:
        rows = measuring.consistencies(begun.model, ids, wanted, rates, backend=begun.backend, tick=tick)
    found = measuring.findings(rows)
    if as_json:
        begun.print_json({"length": length, "stretches": stretches, "rows": rows, "findings": found})
        return
    show(rows)
    tell(found, "budgets")


def _rates(text: str) -> list[float]:
    found = parse_budgets(text)
    if not all(is_rate(rate) and rate < 1 for rate in found):
        raise KvdslError(f"`{text}`: budgets are ratios of a stretch here, below 1, for example 0.3,0.5")
    return found


@click.command()
@click.option(
    "--life", type=click.IntRange(2), default=256, show_default=True, help="Queries for which a token is followed."
)
@click.option("--length", type=click.IntRange(8), default=512, show_default=True, help="Tokens of a stretch of text.")
@click.option(
    "--stretches", type=click.IntRange(1), default=4, show_default=True, help="Stretches, spread evenly over the text."
)
@model_and_text
def persistence(life: int, length: int, stretches: int, as_json: bool, **given: Any) -> None:
    """How the deviation of a token's attention changes as it ages (RoCo, figure 3).

    \b
    peak     queries until a token's deviation is highest (median)
    brief    share of tokens for which that is at most 50
    falling  share of the steps after the peak at which it falls
    left     share of the peak that is left at the end (median)
    --json also has the mean deviation after 1, 2, ... queries, as `curve`.

    \b
    Example:
      kvdsl eval persistence --life 256 --length 512
    """
    begun = Measured(**given)
    from kvdsl.cli.progress import progress
    from kvdsl_lab.eval import persistence as measuring

    ids = begun.stretches(length, stretches)
    with progress("persistence", int(begun.model.config.get_text_config().num_hidden_layers)) as tick:
        rows = measuring.lives(begun.model, ids, life, tick)
    found = measuring.findings(rows)
    if as_json:
        begun.print_json({"life": life, "length": length, "stretches": stretches, "rows": rows, "findings": found})
        return
    show(rows)
    tell(found, "heads")
