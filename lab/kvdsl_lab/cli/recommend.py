"""`kvdsl recommend`: the policy that loses least on a user's prompts."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from kvdsl.cli.common import json_option, print_json
from kvdsl.cli.options import BACKENDS, dtype_option, model_option, refuse_triton
from kvdsl.errors import KvdslError
from kvdsl.precheck import settings_by_policy
from kvdsl_lab.cli.measuring import end_of, minutes_option
from kvdsl_lab.eval.names import ASKER, parse_policies
from kvdsl_lab.recommend.prompts import Prompt, read_prompts, with_answers

_DOZEN = (
    "streaming_llm", "h2o", "tova", "roco", "snapkv", "pyramidkv", "chunkkv", "keydiff", "knorm", "h2o_answer", "recent_answer",
    "random_answer",
)  # fmt: skip
"""The dozen policies that are compared by default: one or two of every kind."""

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_FEW = 6
"""Below this number of prompts no test can show a difference."""


def size(text: str) -> int:
    """Read a number of bytes: 64MiB, 1.5GB, 4096.

    Raises:
        KvdslError: if the text is not a size.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMG]i?B)?", text.strip(), re.IGNORECASE)
    count = 0 if found is None else int(float(found[1]) * _UNITS[(found[2] or "").upper()])
    if count < 1:
        raise KvdslError(f"`{text}` is not a number of bytes: give for example 64MiB, 1.5GB or 4096")
    return count


@click.command()
@model_option
@click.option("--prompts", "path", type=click.Path(path_type=Path, exists=True, dir_okay=False), required=True,
              help="One prompt per line, or JSON objects with `prompt` and, optionally, `answer` and `kind`.")  # fmt: skip
@click.option("--answers", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="The right answers, one per line, if the prompts' file has none.")  # fmt: skip
@click.option(
    "--bytes", "most", required=True, metavar="SIZE", help="Memory limit for the cache of one request: 64MiB, 1.5GB."
)
@click.option("--policies", metavar="A,B", help="The policies to compare [default: a dozen of different kinds].")
@click.option("--new-tokens", type=click.IntRange(1), default=64, show_default=True, help="Length of an answer.")
@click.option(
    "--items", type=click.IntRange(1), default=24, show_default=True, help="Prompts to measure, spread over the file."
)
@minutes_option("the advice uses the prompts measured so far")
@click.option("--backend", type=BACKENDS, default="auto", show_default=True, help="Backend of the policies.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the intervals.")
@dtype_option
@json_option
def command(
    model: str | None, path: Path, answers: Path | None, most: str, policies: str | None, new_tokens: int, items: int,
    minutes: float | None, backend: str, seed: int, dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Find the policy that loses least on your prompts when the cache of a request has a memory limit.

    Each policy gets the largest budget with which your longest prompt and its answer stay within --bytes. Its loss is the KL divergence
    of its next token from the full cache's, in nats, along the full cache's answer. The advice names the policy with the smallest loss,
    the policies without a significant difference from it, and the lines that generate and serve with it.

    \b
    Examples:
      kvdsl recommend --model smollm2 --prompts prompts.jsonl --bytes 4MiB
      kvdsl recommend --model qwen2.5-coder-0.5b --dtype bf16 --prompts gsm8k.jsonl --bytes 2MiB --new-tokens 256 --json
    """
    until, limit = end_of(minutes), size(most)
    refuse_triton(backend)
    prompts = read_prompts(path)
    prompts = prompts if answers is None else with_answers(prompts, answers)
    prompts = spread(prompts, items)
    wanted = list(_DOZEN) if policies is None else [one for one in parse_policies(policies) if one != "full"]
    settings_by_policy(wanted, {}, ASKER)
    from kvdsl.generation.models import check_length, load_model
    from kvdsl_lab.eval.caches import Policies
    from kvdsl_lab.eval.linear import widened
    from kvdsl_lab.recommend import contest

    lm, tokenizer = load_model(model, dtype)
    lm = widened(lm)
    lengths = [len(contest.tokens_of(tokenizer, prompt)) for prompt in prompts]
    check_length(lm, max(lengths) + new_tokens)
    policies_of = Policies(["full", *wanted], {}, backend)
    room = contest.Room(lm, policies_of, lengths, new_tokens)
    result: dict[str, Any] = {"model": model or "reference", "bytes": limit, "new_tokens": new_tokens}
    whole = room.fit("full", limit)
    if whole.why_not is None:
        reason = f"your longest request takes {whole.bytes:,} bytes under the full cache, within the limit of {limit:,}"
        advice = _advice("full", {}, model, reason)
        result |= {"prompts": len(prompts), "rows": [], "refused": [], "kinds": [], "advice": advice}
    else:
        fits = {name: room.fit(name, limit) for name in wanted}
        result |= _compared(lm, tokenizer, policies_of, fits, prompts, new_tokens, until, seed, model)
    _tell(result, lm, seed, as_json)


def _compared(
    lm: Any, tokenizer: Any, policies: Any, fits: Mapping[str, Any], prompts: Sequence[Prompt], new_tokens: int,
    until: float | None, seed: int, model: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Return the comparison and the advice."""
    from kvdsl.cli.progress import progress
    from kvdsl_lab.recommend import contest

    refused = [{"policy": name, "why": fit.why_not} for name, fit in fits.items() if fit.why_not is not None]
    budgets = {name: fit.budget for name, fit in fits.items() if fit.why_not is None}
    if not budgets:
        said = "; ".join(f"`{one['policy']}` {one['why']}" for one in refused)
        raise KvdslError(f"no policy serves your longest prompt in so few bytes: {said}; give more --bytes")
    found = {name: contest.Found() for name in ("full", *budgets)}
    done: list[Prompt] = []

    def going() -> bool:
        return until is None or time.monotonic() < until or not done

    with progress("recommend", len(prompts)) as tick:
        for prompt, rows in contest.measured(lm, tokenizer, policies, budgets, prompts, new_tokens, going):
            done.append(prompt)
            for name, one in rows.items():
                found[name].add(*one)
            tick()
    if not done:
        raise KvdslError("the model's answer to every prompt is empty: give other prompts")
    full = found.pop("full")
    told = contest.verdict(found, seed)
    return {
        "prompts": len(done), "rows": [row | {"params": _params(budgets[row["policy"]])} for row in told.rows],
        "refused": refused, "kinds": _by_kind(found, done, seed),
        **({"full_accuracy": round(sum(full.rights) / len(full.rights), 4)} if full.rights else {}),
        "advice": _advice(told.best, _params(budgets[told.best]), model, _reason(told, len(done))),
    }  # fmt: skip


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Select `count` prompts, spread over the file."""
    step = max(1.0, len(prompts) / count)
    return [prompts[int(at * step)] for at in range(min(count, len(prompts)))]


def _params(budget: float | None) -> dict[str, float]:
    return {} if budget is None else {"budget": budget}


def _reason(told: Any, prompts: int) -> str:
    if prompts < _FEW:
        return f"it lost least on {prompts} prompts, of which no test can tell a difference: give at least {_FEW}"
    if len(told.alike) == len(told.rows) - 1 and told.alike:
        return f"no difference can be told on {prompts} prompts: it lost least, and any of them will do"
    others = (
        f"; {', '.join(told.alike)} cannot be told from it" if told.alike else ", and every difference is more than chance"
    )
    return f"it lost least on {prompts} prompts{others}"


def _by_kind(found: Mapping[str, Any], prompts: Sequence[Any], seed: int) -> list[dict[str, Any]]:
    """Return the best policy for every kind that has enough prompts."""
    from kvdsl_lab.recommend import contest

    told = []
    for kind in dict.fromkeys(prompt.kind for prompt in prompts if prompt.kind is not None):
        at = [index for index, prompt in enumerate(prompts) if prompt.kind == kind]
        if len(at) >= _FEW:
            own = {name: contest.Found([one.losses[index] for index in at]) for name, one in found.items()}
            best = contest.verdict(own, seed)
            told.append({"kind": kind, "prompts": len(at), "policy": best.best, "alike": list(best.alike)})
    return told


def _advice(policy: str, params: Mapping[str, float], model: str | None, reason: str) -> dict[str, Any]:
    """Return the recommended policy, and the lines to generate and to serve with it."""
    named = ["--model", model] if model is not None else []
    settings = [word for name, value in params.items() for word in ("--set", f"{name}={value:g}")]
    generate = ["kvdsl", "run", "--policy", policy, *settings, *named]
    serve = None if model is None else shlex.join(["kvdsl", "serve", model, "--policy", policy, *settings])
    if policy == "full" and model is not None:
        serve = shlex.join(["vllm", "serve", model])
    return {"policy": policy, "params": dict(params), "generate": shlex.join(generate), "serve": serve, "reason": reason}


def _tell(result: dict[str, Any], model: Any, seed: int, as_json: bool) -> None:
    if as_json:
        print_json(result, dtype=str(model.dtype).removeprefix("torch."), seed=seed)
        return
    from kvdsl_lab.cli.measuring import show

    rows = [
        {key: value for key, value in row.items() if key != "params"} | {"budget": row["params"].get("budget")}
        for row in result["rows"]
    ]
    if rows:
        show([row | {"alike": "yes" if row["alike"] else ""} for row in rows])
    for one in result["refused"]:
        click.echo(f"{one['policy']} {one['why']}")
    for one in result.get("kinds", ()):
        click.echo(f"{one['kind']} ({one['prompts']} prompts): {one['policy']} loses least")
    advice = result["advice"]
    click.echo(f"\nTake {advice['policy']}: {advice['reason']}.")
    click.echo(f"  {advice['generate']}")
    if advice["serve"]:
        click.echo(f"  {advice['serve']}")
