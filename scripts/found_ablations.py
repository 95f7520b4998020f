#!/usr/bin/env python
"""What policies of policies/found are without their parts, on what their finalists were chosen on: results/search/ablations.json.

kvdsl models get smollm2
scripts/found_ablations.py others.txt --policy mean_value --policy mean_recent > results/search/ablations.json

`others.txt` is what finalists were chosen on: results/search/README.md. A policy takes some minutes of a processor.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "lab")]

from kvdsl.compiler import analyse, find_policy  # noqa: E402
from kvdsl.environment import environment  # noqa: E402
from kvdsl.ir.nodes import Axis, Expr, Policy, Reduce  # noqa: E402
from kvdsl.ir.visitors import rewrite  # noqa: E402
from kvdsl.shipped import found_policies  # noqa: E402
from kvdsl_lab.search.space import at_budget, canonical, seed_of, with_policy, without_parts  # noqa: E402

BUDGET, STRETCHES = 128, 36


@click.command()
@click.argument("text", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--policy", "names", multiple=True, help="One of the shelf; may be repeated [default: all].")
def main(text: Path, names: tuple[str, ...]) -> None:
    """Print what policies of the shelf are without their parts, as JSON."""
    from kvdsl.generation.models import load_model
    from kvdsl_lab.eval.linear import widened
    from kvdsl_lab.search.judge import Case, NextToken
    from kvdsl_lab.search.run import PROOF_PER_BUDGET, Stretches

    model, tokenizer = load_model("smollm2", "bf16")
    book, cases = text.read_text(encoding="utf-8"), [Case(task, BUDGET) for task in ("text", "prompt")]
    tokens = max(PROOF_PER_BUDGET * BUDGET, *(case.tokens for case in cases))
    judge = NextToken(widened(model), Stretches.of(book, tokenizer, tokens, STRETCHES).ids)
    found = []
    for name in names or [path.stem for path in found_policies()]:
        parts = dict(variants(name))
        told = zip(*(judge.errors(list(parts.values()), case) for case in cases), strict=True)
        for what, errors in zip(parts, told, strict=True):
            error = math.exp(sum(map(math.log, errors)) / len(errors))
            found.append(
                {"policy": name, "what": what, "error": round(error, 6), "errors": [round(one, 6) for one in errors]}
            )
            click.echo(f"{name} {what}: {error:.4f}", err=True)
    about = {"budget": BUDGET, "stretches": STRETCHES, "text sha256": hashlib.sha256(book.encode()).hexdigest()[:16]}
    click.echo(json.dumps({"environment": environment(dtype="bfloat16"), **about, "ablations": found}, indent=1))


def variants(name: str) -> Iterator[tuple[str, Policy]]:
    """The policy at the budget, without each part, and with the sum of attention in the place of its mean."""
    seed = seed_of(analyse(find_policy(name)).policy)
    assert seed is not None, name
    whole = at_budget(seed, BUDGET)
    yield "whole", whole
    yield from without_parts(whole, (BUDGET,)).items()
    assert whole.score is not None
    yield "with sums of attention", canonical(with_policy(whole, score=rewrite(whole.score, _summed)), (BUDGET,))


def _summed(expr: Expr) -> Expr | None:
    mean = isinstance(expr, Reduce) and expr.op == "mean" and expr.axis == Axis.QUERY
    return expr.model_copy(update={"op": "sum"}) if mean else None


if __name__ == "__main__":
    main()
