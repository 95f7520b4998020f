#!/usr/bin/env python
"""Feeds `kvdsl check` with texts that are nearly policies: there must always be an answer, never a traceback, within a second.

The inputs are random derivations of the grammar, shipped policies with derived statements in them, and policies with bytes changed.
Input N of a seed is always the same one. Prints a JSON object; the exit code is 1 if an input fails.
"""

from __future__ import annotations

import gc
import json
import random
import re
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from heapq import nlargest
from pathlib import Path
from typing import Any

import click
from lark import Lark

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # a checkout needs no installation for this

from kvdsl.cli.progress import progress  # noqa: E402
from kvdsl.codes import CODES  # noqa: E402
from kvdsl.compiler import analyse, shipped_policies  # noqa: E402
from kvdsl.diagnostics import Sink, render_github, render_human, render_json  # noqa: E402
from kvdsl.environment import environment  # noqa: E402
from kvdsl.files import read_resource, resource  # noqa: E402
from kvdsl.syntax.reader import decode  # noqa: E402

LIMIT_S = 1.0
HANGS_S = 10.0
BESIDE = resource("policies") / "example.kv"
SEEDS = [path.read_bytes() for path in shipped_policies()]
SEEDS += [path.read_bytes() for path in sorted(resource("policies").glob("*_test.kv"))]
SEEDS += [code.example.encode() for code in CODES.values() if 0 < len(code.example) < 5_000]
SEEDS.append(read_resource("grammar", "prelude.kv").encode())
WORDS = sorted(
    {
        *re.findall(rb"\w+|[^\w\s]+|\n", b"\n".join(SEEDS)),
        *re.findall(rb'"(\w+)"', read_resource("grammar", "kv.lark").encode()),
    }
)
NASTY = [b"(", b")", b"{", b"}", b"\n", b";", b'"', b"'", b'"""', b"#", b"-", b"\\", b"..", b"\0", b"\xef\xbb\xbf", b"\r"]
NAMES = [
    "attn", "logit", "q", "k", "v", "position", "age", "budget", "live", "prompt", "layer", "layers", "everything", "queries", "slots",
    "dims", "page", "sketch", "heads", "sum", "mean", "std", "max", "min", "last", "count", "ema", "max_pool", "dot", "norm1", "where",
    "rank",
    "random", "first", "hard", "compact", "cached", "blocks", "of", "whole", "decode", "prefill", "a", "b", "P", "H2O",
]  # fmt: skip
NUMBERS = ["0", "1", "2", "3", "0.5", "7", "512", "1e3", ".25", "2.", "1e-300", "1e999"]
STRINGS = ['"h2o.kv"', "'text'", '"""two\nlines"""', '"a \\u{e9} b"', '"\\q"', '""']


# -- derivations of the grammar ----------------------------------------------------------------------------------------


class Derivations:
    """Random texts of a grammar's rules. After as many choices as are asked for, the flattest expansions are taken."""

    def __init__(self) -> None:
        lark = Lark(
            read_resource("grammar", "kv.lark"), parser="lalr", start=["start", "policy", "statement", "expr", "test"]
        )
        self.terminals = {terminal.name: terminal.pattern for terminal in lark.terminals}
        self.rules: dict[str, list[list[Any]]] = {}
        for rule in lark.rules:
            self.rules.setdefault(str(rule.origin.name), []).append(list(rule.expansion))
        heights = self._heights()
        self.flattest = {
            name: min(bodies, key=lambda body: self._height(body, heights) or 0) for name, bodies in self.rules.items()
        }

    def _heights(self) -> dict[str, int]:
        """How deep the flattest derivation of each rule is."""
        heights: dict[str, int] = {}
        while True:
            new = {
                name: min(known)
                for name, expansions in self.rules.items()
                if (known := [height for body in expansions if (height := self._height(body, heights)) is not None])
            }
            if new == heights:
                return heights
            heights = new

    @staticmethod
    def _height(body: list[Any], heights: dict[str, int]) -> int | None:
        below = [0 if symbol.is_term else heights.get(str(symbol.name), -1) for symbol in body]
        return None if -1 in below else 1 + max(below, default=0)

    def __call__(self, rule: str, rng: random.Random, size: int) -> str:
        """A text that the rule derives, with `size` choices left to chance."""
        words: list[str] = []
        todo: list[Any] = [rule]
        while todo:
            symbol = todo.pop()
            name = symbol if isinstance(symbol, str) else str(symbol.name)
            if name in self.terminals:
                words.append(self._word(name, rng))
                continue
            choices = self.rules[name]
            size -= len(choices) > 1
            todo += reversed(rng.choice(choices) if size > 0 else self.flattest[name])
        return "".join(_spaced(words, rng))

    def _word(self, name: str, rng: random.Random) -> str:
        chosen = {"NAME": NAMES, "NUMBER": NUMBERS, "STRING": STRINGS, "_SEP": ["\n", "\n", "\n", ";"]}.get(name)
        return rng.choice(chosen) if chosen else str(self.terminals[name].value)


def _spaced(words: list[str], rng: random.Random) -> list[str]:
    """The words with spaces, and now and then comments and lines that end inside of parentheses."""
    depth, text = 0, []
    for word in words:
        depth += {"(": 1, ")": -1}.get(word, 0)
        text.append(word)
        chance = rng.random()
        if chance < 0.02 and (depth > 0 or word == "\n"):
            text.append(rng.choice([" # note\n", "\n# a line\n", "\n", "\n\n\n"]))
        else:
            text.append(rng.choice(["", " ", "  ", "\t"]) if word in "(){},;\n" else " ")
    return text


@lru_cache(maxsize=1)
def derivations() -> Derivations:
    """Of the language's grammar."""
    return Derivations()


def derived_file(rng: random.Random) -> bytes:
    """A file that the grammar accepts."""
    return derivations()("start", rng, rng.randrange(10, 400)).encode()


def derived_policy(rng: random.Random) -> bytes:
    """A policy with a budget, a score and other statements: what is in them gets as far as the checker."""
    statements = [derivations()("statement", rng, rng.randrange(4, 60)) for _ in range(rng.randrange(6))]
    lines = [
        "param budget = 512",
        "param a = 4",
        "let b(x) = x + a",
        f"score {derivations()('expr', rng, rng.randrange(4, 100))}",
        *statements,
    ]
    return ('kv 1\n\npolicy P {\n  "d"\n' + "".join(f"  {line}\n" for line in lines) + "}\n").encode()


def grafted(rng: random.Random) -> bytes:
    """A shipped policy with a derived statement or two."""
    lines = rng.choice(SEEDS).decode(errors="replace").split("\n")
    for _ in range(rng.randrange(1, 3)):
        statement = derivations()("statement", rng, rng.randrange(4, 60))
        lines.insert(rng.randrange(len(lines)), rng.choice(["", "override "]) + statement)
    return "\n".join(lines).encode()


# -- mutations of bytes ------------------------------------------------------------------------------------------------


def mutated(rng: random.Random) -> bytes:
    """A policy with bytes, words and pieces left out, put in and repeated."""
    out = bytearray(rng.choice(SEEDS))
    for _ in range(rng.choice([1, 1, 2, 3, 5, 10, 30])):
        start = rng.randrange(len(out) + 1)
        end = min(len(out), start + rng.choice([1, 1, 2, 5, 20, 100]))
        other = rng.choice(SEEDS)
        piece = rng.randrange(len(other))
        change = rng.randrange(6)
        if change == 0:
            del out[start:end]
        elif change == 1:
            out[start:start] = bytes([rng.randrange(256)])
        elif change == 2:
            out[start:end] = b" " + rng.choice(WORDS) + b" "
        elif change == 3:
            out[start:start] = out[start:end] * rng.choice([1, 2, 50])
        elif change == 4:
            out[start:start] = rng.choice(NASTY) * rng.choice([1, 1, 200])
        else:
            out[start:start] = other[piece : piece + rng.randrange(1, 200)]
    return bytes(out)


def word_salad(rng: random.Random) -> bytes:
    """Words of the language in any order, in the body of a policy."""
    words = b" ".join(rng.choice(WORDS) for _ in range(rng.randrange(60)))
    return b'kv 1\npolicy P {\n"d"\nparam budget = 512\n' + words + b"\n}\n"


Kind = Callable[[random.Random], bytes]
KINDS: tuple[Kind, ...] = (
    mutated,
    mutated,
    derived_policy,
    derived_policy,
    grafted,
    derived_file,
    word_salad,
)


def example(seed: int, index: int) -> tuple[str, bytes]:
    """Input number `index` of a seed, and what kind it is."""
    rng = random.Random(f"{seed}:{index}")
    make = rng.choice(KINDS)
    return make.__name__, make(rng)


# -- running -----------------------------------------------------------------------------------------------------------


def check(data: bytes) -> str:
    """What `kvdsl check -` does with these bytes, in all its formats: `refused`, `errors` or `clean`."""
    sink = Sink()
    source = decode(data, sink, "example.kv", BESIDE)
    found = sink.sorted() if source is None else analyse(source).diagnostics
    assert source is not None or found, "refused without a word"
    for render in (render_human, render_json, render_github):
        render(found)
    if source is None:
        return "refused"
    return "errors" if any(one.severity == "error" for one in found) else "clean"


class Hangs(BaseException):
    """An input takes so long that it will not be waited for."""


def _alarm(signum: int, frame: object) -> None:
    raise Hangs


def run_one(seed: int, index: int) -> dict[str, Any]:
    """One input: its kind, the outcome, the processor time that it took, and the error if it failed."""
    kind, data = example(seed, index)
    found: dict[str, Any] = {"index": index, "kind": kind, "bytes": len(data)}
    signal.setitimer(signal.ITIMER_PROF, HANGS_S)
    start = time.process_time()
    try:
        found["outcome"] = check(data)
    except Hangs:
        found |= {"outcome": "failed", "error": f"more than {HANGS_S:g} s"}
    except Exception:
        found |= {"outcome": "failed", "error": traceback.format_exc(limit=-4)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    found["s"] = round(time.process_time() - start, 4)
    if found["outcome"] != "failed" and found["s"] > LIMIT_S:
        found |= {"outcome": "failed", "error": f"took {found['s']} s"}
    if found["outcome"] == "failed":
        found["input"] = data.decode("latin-1")
    return found


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--inputs", type=click.IntRange(1), default=10_000, show_default=True, help="How many.")
@click.option("--seed", type=int, default=0, show_default=True, help="Which ones.")
@click.option("--first", type=click.IntRange(0), default=0, show_default=True, help="Begin with this one of the seed's.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the result there, too, every minute.")
def main(inputs: int, seed: int, first: int, out: Path | None) -> None:
    signal.signal(signal.SIGPROF, _alarm)
    outcomes: Counter[str] = Counter()
    slowest: list[dict[str, Any]] = []
    failures: list[dict[str, Any]] = []
    started = saved = time.monotonic()

    def result() -> dict[str, Any]:
        return {
            "format_version": "1.0", "environment": environment(seed=seed), "seed": seed, "first": first, "wanted": inputs,
            "inputs": outcomes.total(), "outcomes": dict(outcomes), "failed": outcomes["failed"], "limit_s": LIMIT_S,
            "wall_s": round(time.monotonic() - started, 1), "slowest": slowest, "failures": failures,
        }  # fmt: skip

    gc.freeze()
    gc.disable()  # a third of the time, and nearly all that it finds is alive
    with progress(f"inputs of seed {seed}", inputs) as tick:
        for index in range(first, first + inputs):
            if index % 500 == 0:
                gc.collect()
            found = run_one(seed, index)
            outcomes[found["outcome"]] += 1
            slowest = nlargest(
                5, [*slowest, {k: found[k] for k in ("s", "index", "kind", "bytes")}], key=lambda one: one["s"]
            )
            if found["outcome"] == "failed" and len(failures) < 100:
                failures.append(found)
                click.echo(f"input {index} ({found['kind']}): {found['error'].strip().splitlines()[-1]}", err=True)
            if out is not None and time.monotonic() - saved > 60:
                out.write_text(json.dumps(result(), indent=2) + "\n")
                saved = time.monotonic()
            tick()
    text = json.dumps(result(), indent=2)
    if out is not None:
        out.write_text(text + "\n")
    click.echo(text)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
