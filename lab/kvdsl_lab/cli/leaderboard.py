"""`kvdsl leaderboard`: all policies at several budgets on many tasks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvdsl.cli.common import FORMAT_VERSION, json_option
from kvdsl.cli.options import BACKENDS, dtype_option, memory_options, model_option, policies_option, refuse_triton
from kvdsl.errors import KvdslError
from kvdsl.precheck import settings_by_policy
from kvdsl_lab.cli.measuring import end_of, minutes_option, names, quick_option, text_option
from kvdsl_lab.eval.names import ASKER, parse_budgets, parse_policies

if TYPE_CHECKING:
    from kvdsl_lab.leaderboard.problems import Asking


@click.command()
@policies_option(
    "all",
    help="Shipped policies, or .kv files; `all` for the short list, `gallery` for those of the gallery that need nothing from "
    "their caller, `found` for those that `kvdsl search` found. The full cache is always among them.",
)
@quick_option(
    policies="full,streaming_llm,h2o,roco,snapkv", rates="0.25", tokens="128", length=768, items=6,
    tasks="books,nearness,fact,niah_single_2",
)  # fmt: skip
@click.option("--rates", default="0.125,0.25,0.5", show_default=True, metavar="N,M", help="Budgets of prompts, as ratios.")
@click.option(
    "--tokens", default="128,256,512", show_default=True, metavar="N,M", help="Budgets while a text is decoded, in tokens."
)
@click.option(
    "--same-bytes",
    is_flag=True,
    help="Give all policies the same bytes: a policy with more state than keys, values and positions gets fewer tokens.",
)
@click.option(
    "--claim",
    metavar="A,B",
    help="Test whether these are better than every other policy, corrected for multiple comparisons.",
)
@click.option("--tasks", metavar="A,B", help="Tasks [default: all; an unknown name lists them].")
@click.option("--data", "data", multiple=True, type=click.Path(path_type=Path, exists=True, dir_okay=False),
              help="Problems for gsm8k and math500, one JSON object per line; may be repeated.")  # fmt: skip
@click.option(
    "--new-tokens",
    type=click.IntRange(1),
    default=320,
    show_default=True,
    help="The longest answer to a problem, in tokens.",
)
@click.option("--samples", type=click.IntRange(1), default=1, show_default=True,
              help="Answers per problem; the score is the share of right ones. 1 is greedy.")  # fmt: skip
@click.option("--temperature", type=click.FloatRange(0, min_open=True), default=0.7, show_default=True,
              help="Temperature of several --samples.")  # fmt: skip
@click.option("--length", type=click.IntRange(128), default=2048, show_default=True, help="Length of a text.")
@click.option("--items", type=click.IntRange(1), default=10, show_default=True, help="Texts per task.")
@minutes_option("an unfinished item is dropped; a later run continues")
@click.option("--workers", type=click.IntRange(1), help="Processes, a thread and a model each [default: one a core]; 1 is this process, "
              "with torch's own threads.")  # fmt: skip
@model_option
@text_option
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), default=Path("results/leaderboard"), show_default=True,
              help="Folder for measurements, tables and figures.")  # fmt: skip
@click.option("--fresh", is_flag=True, help="Discard earlier measurements.")
@click.option("--no-plots", is_flag=True, help="Tables only.")
@click.option("--backend", type=BACKENDS, default="auto", show_default=True, help="Backend of the policies.")
@memory_options
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the texts.")
@dtype_option
@json_option
def command(
    policies: str, rates: str, tokens: str, same_bytes: bool, claim: str | None, tasks: str | None, data: tuple[Path, ...],
    new_tokens: int, samples: int, temperature: float, length: int, items: int, minutes: float | None, workers: int | None,
    model: str | None, text: Path | None, out: Path, fresh: bool, no_plots: bool, backend: str, memory: dict[str, str],
    seed: int, dtype: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Compare policies at several budgets on many tasks, with tests of significance.

    \b
    books            loss on a book, token by token, under a budget in tokens
    nearness         KL divergence from the full cache's distribution, and similarity of the greedy texts
    chat             KL divergence in the replies of a conversation about a book, under a budget in tokens
    fact, facts      a code hidden in a book, alone or among eight
    niah_…, vt, cwe, fwe    RULER's tasks, generated as in its paper
    gsm8k, math500   problems from --data that a model answers step by step; an item is 32 problems

    Every question appears twice: in the prompt (`known`: the policy sees it before it evicts), and after the policy has evicted
    (`later`). The run alternates over all tasks. It may be stopped at any time and continued later, also with more --items.
    OUT/leaderboard.md has the tables, leaderboard.json the same for programs.

    --claim tests whether your policies are better than all others, corrected for all comparisons. With --same-bytes, a policy that
    holds more state has to win with fewer tokens.

    \b
    Examples:
      kvdsl leaderboard --model smollm2 --quick
      kvdsl leaderboard --model smollm2 --dtype bf16 --items 20 --minutes 300
      kvdsl leaderboard --model smollm2 --policies h2o,roco,mine.kv --tasks books,chat --same-bytes --claim mine.kv
      kvdsl leaderboard --model qwen2.5-coder-0.5b --policies h2o_answer,random_answer --tasks gsm8k --data gsm8k.jsonl --tokens 128
    """
    until = end_of(minutes)
    wanted, claiming = (
        [name for part in parse_policies(given) for name in names_of_policies(part)] if given else []
        for given in (policies, claim)
    )
    policy_names = tuple(dict.fromkeys(["full", *wanted, *claiming]))
    settings_by_policy(policy_names, memory, ASKER)
    budgets = tuple(parse_budgets(rates)), tuple(parse_budgets(tokens))
    refuse_triton(backend)
    import os

    from kvdsl.cli.progress import progress
    from kvdsl.environment import environment
    from kvdsl.files import write_whole
    from kvdsl.generation.models import check_length
    from kvdsl.generation.text import read_text
    from kvdsl_lab.assets import all_books
    from kvdsl_lab.leaderboard import report, run, summary
    from kvdsl_lab.leaderboard.claim import compare
    from kvdsl_lab.leaderboard.problems import Asking, read_problems
    from kvdsl_lab.leaderboard.reasoning import Reasoning
    from kvdsl_lab.leaderboard.tasks import chosen

    book = all_books() if text is None else read_text(text)
    todo = chosen(None if tasks is None else names(tasks))
    asking = Asking(read_problems(data), new_tokens, samples, temperature)
    plan = run.Plan(
        model, dtype, book, length, seed, policy_names, *budgets, backend, same_bytes, tuple(memory.items()), asking
    )
    bench = run.Bench(plan)
    if not all(isinstance(task.kind, Reasoning) for task in todo):
        check_length(bench.lab.model, length + 256)
    kind = str(bench.lab.model.dtype).removeprefix("torch.")
    facts = {
        "model": model or "reference", "dtype": kind, "length": length, "seed": seed,
        "pieces": "disjoint", "text sha256": hashlib.sha256(book.encode()).hexdigest()[:16], "backend": backend,
        **({"same bytes": True} if same_bytes else {}), **memory, **_answers(data, asking),
    }  # fmt: skip
    count = workers or os.cpu_count() or 1
    with progress("leaderboard", items * len(todo)) as tick:
        rows = run.measure(bench, todo, items, out, facts, workers=count, until=until, fresh=fresh, tick=tick)
    if not rows:
        raise KvdslError("no item finished: give more --minutes, fewer --policies and budgets, or a smaller --length")
    columns = summary.columns(rows)
    result: dict[str, Any] = {
        "format_version": FORMAT_VERSION, "environment": environment(dtype=kind, seed=seed), **facts,
        "columns": [
            {"name": one.name, "tasks": list(one.tasks), "measure": one.measure, "rows": summary.table(one, rows)}
            for one in columns
        ],
        "claim": {"policies": claiming, "comparisons": compare(columns, rows, claiming)} if claiming else None,
        "depths": summary.by_depth(rows),
        "refused": list({(row["policy"], row["budget"], row["task"]): row for row in rows if "refused" in row}.values()),
    }  # fmt: skip
    write_whole(out / "leaderboard.json", json.dumps(result, indent=1) + "\n")
    report.save(result, out, drawn=not no_plots)
    if as_json:
        click.echo(json.dumps(result, indent=1))
    else:
        _show(result, out)


def _answers(data: Sequence[Path], asking: Asking) -> dict[str, Any]:
    """Return the settings that only measurements of problems depend on; empty without problems."""
    if not data:
        return {}
    drawn = {"samples": asking.samples, "temperature": asking.temperature} if asking.samples > 1 else {}
    files = hashlib.sha256(b"".join(path.read_bytes() for path in data)).hexdigest()[:16]
    return {"problems sha256": files, "new tokens": asking.new_tokens, **drawn}


def names_of_policies(name: str) -> list[str]:
    """Return the policies that a name stands for."""
    from kvdsl.compiler import analyse
    from kvdsl.shipped import found_policies, gallery_policies, shipped_policies

    shelves = {"all": shipped_policies, "found": found_policies}
    if name in shelves:
        return [path.stem for path in shelves[name]()]
    if name == "gallery":
        given = {path.stem: analyse(path).policy.given for path in gallery_policies()}
        return [stem for stem, values in given.items() if all(value.default is not None for value in values)]
    return [name]


def _show(result: dict[str, Any], out: Path) -> None:
    from kvdsl_lab.cli.measuring import show
    from kvdsl_lab.leaderboard.report import claimed

    for one in result["columns"]:
        if one["name"].startswith(("books", "nearness: kl", "chat", "questions")) or len(result["columns"]) < 5:
            click.echo(f"\n{one['name']}")
            kept = ("place", "policy", "budget", "mean", "low", "high", "bytes", "note")
            show([{key: row[key] for key in kept} for row in one["rows"]])
    if result["claim"] is not None:
        click.echo("\n".join(["", *claimed(result["claim"]["comparisons"]), ""]))
    click.echo(f"tables, figures and measurements: {out}")
