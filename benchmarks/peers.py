#!/usr/bin/env python
"""kvdsl beside its peers in one run: kvpress's presses and transformers' own caches, at the same policy, budget, model and text.

`make peers` makes an environment in which kvpress runs (it needs transformers before 5.3), and runs this there. Every contestant has
a process of its own, which does nothing while others run. They take turns: in every round each reads one more stretch of the text, a
prompt at once and then token by token, and tells how long that took, how well it predicted, and by how much its process grew.

Time and memory are measured in runs of their own. An allocator keeps what is freed for later, so that equal contestants may differ by a
third in what their processes occupy; one that gives everything back at once shows what is really needed, and takes time for that.

benchmarks/peers.py --out results/cpu/peers.json
benchmarks/peers.py --memory --out results/cpu/peers_memory.json
benchmarks/peers.py --table results/cpu/peers.json
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from contestants import CONTESTANTS, KVDSL, Contestant, Task

from kvdsl.cli.progress import progress
from kvdsl.environment import environment, version
from kvdsl_lab.bench.measure import finite, quartiles, ratios, summary

CONTESTANT = Path(__file__).resolve().parent / "contestant.py"

RACES = tuple(dict.fromkeys(one.race for one in CONTESTANTS))
NOTES = {
    "h2o": "kvpress's ObservedAttention does not accumulate: while decoding it has the newest query's attention only",
    "roco": "kvpress has no counterpart",
}

Row = dict[str, Any]


# -- processes ---------------------------------------------------------------------------------------------------------


class Racer:
    """A contestant's process, and what it has answered so far."""

    def __init__(self, one: Contestant, process: subprocess.Popen[str], given: dict[str, Any]) -> None:
        self.one = one
        self.rounds: list[dict[str, Any]] = []
        self.error: str | None = None
        self._process = process
        self._say(given)

    def ready(self) -> dict[str, Any]:
        """Wait until the model is loaded: what it is."""
        return self._answer()

    def run(self, stretch: int) -> dict[str, Any] | None:
        """One round, if nothing has gone wrong yet."""
        if self.error is not None:
            return None
        self._say(stretch)
        found = self._answer()
        self.error = found.get("error")
        return None if self.error else found

    def _say(self, what: Any) -> None:
        assert self._process.stdin is not None
        print(json.dumps(what), file=self._process.stdin, flush=True)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise click.ClickException(f"{self.one.by}'s {self.one.what} ended: its message stands above")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def process(threads: int) -> Iterator[subprocess.Popen[str]]:
    """A contestant's process, which ends with the block."""
    variables = {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1")}
    begun = subprocess.Popen(
        [sys.executable, "-W", "ignore", str(CONTESTANT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=variables,
    )
    try:
        yield begun
    finally:
        begun.kill()
        begun.wait()


def race(entered: Sequence[int], given: dict[str, Any], repeats: int, warmup: int) -> tuple[list[Racer], dict[str, Any]]:
    """Everybody's rounds, and what the model is.

    Args:
        entered: indices of CONTESTANTS.
        given: what every contestant is told (see contestant.py).
    """
    with ExitStack() as stack:
        racers = [
            Racer(CONTESTANTS[index], stack.enter_context(process(given["threads"])), {**given, "index": index})
            for index in entered
        ]
        model, *_ = [racer.ready() for racer in racers]
        with progress(racers[0].one.race, (warmup + repeats) * len(racers)) as tick:
            for turn in range(-warmup, repeats):
                if turn == 0:
                    print(f"{racers[0].one.race}: all are warm, {repeats} rounds begin", file=sys.stderr, flush=True)
                one_turn(racers, turn, given["stretches"], tick)
        return racers, model


def one_turn(racers: list[Racer], turn: int, stretches: int, tick: Callable[[], None]) -> None:
    """Everybody's round, beginning with another one each time; what turns before 0 bring is forgotten."""
    start = turn % len(racers)
    for racer in racers[start:] + racers[:start]:
        found = racer.run(turn % stretches)
        if found is not None and turn >= 0:
            racer.rounds.append(found)
        tick()


# -- results -----------------------------------------------------------------------------------------------------------


def row(racer: Racer, ours: Racer | None, task: Task) -> Row:
    """What one contestant's rounds came to.

    Args:
        ours: kvdsl's cache of that policy. `vs_kvdsl` is how many times as much a contestant takes, round by round.
    """
    one = racer.one
    told = {"race": one.race, "policy": one.policy, "by": one.by, "what": one.what, "every": one.every,
            "attention": one.attention, **asdict(task), "rounds": len(racer.rounds)}  # fmt: skip
    if racer.error is not None:
        return {**told, "error": racer.error}
    figures = {name: by_round(racer, name) for name in ("ttft_ms", "tpot_ms", "peak_bytes")}
    found: Row = {**told, "ppl": perplexity(racer)}
    for name, values in figures.items():
        found |= summary(name, values)
    found["cache_bytes"] = racer.rounds[-1]["cache_bytes"]
    if ours is not None and ours is not racer and ours.error is None:
        for name, values in figures.items():
            found |= summary(f"{name.split('_')[0]}_vs_kvdsl", ratios(values, by_round(ours, name)))
    return finite(found)


def by_round(racer: Racer, name: str) -> list[float]:
    """A figure of every round; of a token's time the round's median."""
    return [quartiles(found[name])[1] if name == "tpot_ms" else found[name] for found in racer.rounds]


def perplexity(racer: Racer) -> float:
    """Of all tokens that were read after the prompts, and of each prompt's next one."""
    losses = [loss for found in racer.rounds for loss in found["losses"]]
    return round(math.exp(sum(losses) / len(losses)), 4)


def rows(racers: Sequence[Racer], task: Task) -> list[Row]:
    """Everybody's row, in the order of the contestants."""
    ours = {racer.one.policy: racer for racer in racers if racer.one.by == KVDSL}
    return [row(racer, ours.get(racer.one.policy), task) for racer in racers]


def beaten(rows: Sequence[Row], measured: str) -> list[str]:
    """The presses that take less time per token, or less memory, than kvdsl's cache of the same policy."""
    key = f"{'tpot' if measured == 'time' else 'peak'}_vs_kvdsl"
    return [name_of(one) for one in rows if one["by"] == "kvpress" and one.get(key, math.inf) < 1]


def name_of(found: Row) -> str:
    every = f" every {found['every']}" if found["every"] else ""
    return f"{found['race']}: {found['what']}{every}"


# -- table -------------------------------------------------------------------------------------------------------------

HEADS = {
    "time": ("policy", "", "perplexity", "first token, ms", "ms a token", "times kvdsl's"),
    "memory": ("policy", "", "peak, MB", "times kvdsl's", "cache in the end, MB"),
}


def table(found: dict[str, Any], race: str) -> str:
    """One race as Markdown."""
    head = HEADS[found["measures"]]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "---:|" * (len(head) - 2)]
    for one in found["rows"]:
        if one["race"] == race:
            shown = [
                *names(one),
                *(figures_of(one, found["measures"]) if "error" not in one else [f"fails: {one['error']}"]),
            ]
            lines.append("| " + " | ".join(shown + [""] * (len(head) - len(shown))) + " |")
    return "\n".join(lines)


def names(one: Row) -> Iterator[str]:
    """Who a row is about."""
    every = f", every {one['every']}" if (one["every"] or 1) > 1 else ""
    yield one["policy"]
    yield f"{one['by']}: {one['what']}{every}" if one["by"] != KVDSL else f"**kvdsl**: {one['what']}"


def figures_of(one: Row, measured: str) -> Iterator[str]:
    """What a row says."""
    if measured == "memory":
        yield f"{one['peak_bytes'] / 1e6:.1f} ({one['peak_bytes_q1'] / 1e6:.1f} to {one['peak_bytes_q3'] / 1e6:.1f})"
        yield times(one.get("peak_vs_kvdsl"))
        yield f"{one['cache_bytes'] / 1e6:.1f}"
        return
    yield f"{one['ppl']:.1f}"
    yield f"{one['ttft_ms']:.0f}"
    yield f"{one['tpot_ms']:.2f} ({one['tpot_ms_q1']:.2f} to {one['tpot_ms_q3']:.2f})"
    yield times(one.get("tpot_vs_kvdsl"))


def times(quotient: float | None) -> str:
    return "" if quotient is None else f"{quotient:.2f}"


# -- command -----------------------------------------------------------------------------------------------------------


@click.command()
@click.option("--model", help="A folder or hub id; the model that ships with kvdsl if not given.")
@click.option("--text", type=click.Path(exists=True, dir_okay=False), help="The book that ships with kvdsl if not given.")
@click.option(
    "--race",
    "races",
    multiple=True,
    type=click.Choice(RACES),
    default=["prompt", "decode"],
    show_default=True,
    help="Only this; may be repeated.",
)
@click.option("--budget", default=256, show_default=True, help="Tokens kept per KV head.")
@click.option("--prompt-tokens", default=1024, show_default=True, help="Tokens that are read at once.")
@click.option("--new-tokens", default=192, show_default=True, help="Tokens that are read one by one after them.")
@click.option("--repeats", default=5, show_default=True, help="Rounds; each reads another stretch of the text.")
@click.option("--warmup", default=1, show_default=True, help="Rounds before them that are not counted.")
@click.option("--threads", default=1, show_default=True, help="Of every contestant, one of which runs at a time.")
@click.option("--memory", is_flag=True, help="Measure memory: what is freed goes back at once, so that times mean little.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON; standard output if not given.")
@click.option(
    "--table", "shown", type=click.Path(exists=True, path_type=Path), help="Print the tables of such a file and end."
)
def main(
    model: str | None, text: str | None, races: tuple[str, ...], budget: int, prompt_tokens: int, new_tokens: int, repeats: int,
    warmup: int, threads: int, memory: bool, out: Path | None, shown: Path | None,
) -> None:  # fmt: skip
    """Measure kvdsl beside kvpress and transformers: perplexity, time to the first and per later token, peak memory.

    In the race `prompt` a prompt is pressed to the budget once; in `decode` the budget holds for every token; in `bits`
    nothing is evicted (it needs optimum-quanto, hqq and transformers 5.24). Each contestant runs in
    a process of its own, they take turns round by round, and what is compared is compared within a round.
    """
    if shown is not None:
        found = json.loads(shown.read_text(encoding="utf-8"))
        print("\n\n".join(table(found, name) for name in dict.fromkeys(one["race"] for one in found["rows"])))
        return
    check(races, budget, prompt_tokens, new_tokens, repeats)
    task = Task(budget, prompt_tokens, new_tokens)
    given = {"task": asdict(task), "model": model, "text": text, "stretches": repeats, "threads": threads,
             "memory": memory}  # fmt: skip
    measured = "memory" if memory else "time"
    setup = {"model": model or "reference", "text": text or "reference", "repeats": repeats, "warmup": warmup}
    found: list[Row] = []
    for name in races:
        entered = [index for index, one in enumerate(CONTESTANTS) if one.race == name]
        racers, facts = race(entered, given, repeats, warmup)
        found += rows(racers, task)
        made = environment(dtype=facts["dtype"]) | {"threads": threads}
        made |= {name: version(name) for name in ("kvpress", "optimum-quanto", "hqq") if version(name) is not None}
        result = {"format_version": "1.0", "environment": made, "measures": measured, **setup,
                  "rows": found, "beaten": beaten(found, measured), "notes": NOTES}  # fmt: skip
        if out is not None:  # after every race, so that a run that is ended loses one at most
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if out is None:
        print(json.dumps(result, indent=1))


def check(races: Sequence[str], budget: int, prompt: int, new: int, repeats: int) -> None:
    """Raise BadParameter for what cannot be measured, and where kvpress is missing."""
    if version("kvpress") is None and any(one.by == "kvpress" for one in CONTESTANTS if one.race in races):
        raise click.ClickException("kvpress is not installed here: `make peers` makes an environment with it and runs this")
    for name, value, least in (("--budget", budget, 34), ("--new-tokens", new, 2), ("--repeats", repeats, 1)):
        if value < least:
            raise click.BadParameter(f"must be at least {least}", param_hint=name)
    if prompt <= budget:
        raise click.BadParameter(
            f"a prompt of {prompt} tokens is not longer than the budget of {budget}", param_hint="--prompt-tokens"
        )


if __name__ == "__main__":
    main()
