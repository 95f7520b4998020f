#!/usr/bin/env python
"""Counts how large the language is, and prints a table.

How each figure is counted:

- keywords: words that the grammar names. *Of tests* are those that stand in rules of tests alone. A word that both have, as `budget`,
  is the language's.
- statement forms: what may stand in a policy, by the grammar's rule `plain`: `keep first` and `keep last` are one, `keep top`,
  `keep where` and a bare `keep` one each.
- ranges: what a reduction may range over, each with rules of its own for what it takes and what it gives (`kvdsl.ir.ops.RANGES`).
- functions: those that are not written in the language, in its prelude: reductions, elementwise functions, and all else that is called.
- of the newest edition: the same without what the grammar marks as `kv 1` and the checker refuses there (`kvdsl.sema.editions`).
- nodes: classes of expressions in the IR (`kvdsl.ir.nodes.EXPRESSIONS`), those that only passes make included.
- diagnostics: codes (`kvdsl.codes`).
- policies: all that are shipped. One has kernels where its package holds them. It needs data from outside if it reads a file
  (`tensor`) or asks the caller (`given`).
- policies that lack kernels: at f7b9af0 they were 25, with those that need data from outside; without them 20, of which 19 had neither.
- statements: of a policy's own file, without what it inherits; one a line.

The kvdsl that is counted is the one that Python finds, else this checkout's: `PYTHONPATH=../before python scripts/figures.py` counts
another checkout.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).resolve().parents[1]))  # a checkout needs no installation for this

FIGURES = {
    "keywords": "keywords",
    "keywords_of_tests": "of these, of tests alone",
    "statements": "statement forms",
    "ranges": "reduction ranges with rules of their own",
    "functions": "functions that are not written in the prelude",
    "keywords_newest": "keywords of the newest edition",
    "statements_newest": "statement forms of the newest edition",
    "ranges_newest": "ranges of the newest edition",
    "functions_newest": "functions of the newest edition",
    "nodes": "node types of the IR",
    "diagnostics": "diagnostics",
    "policies": "policies",
    "without_cpp": "policies without C++ kernels",
    "without_triton": "policies without Triton kernels",
    "without_one": "policies that lack kernels of one of them or both",
    "without_one_alone": "of these, those that need no data from outside",
    "without_both": "policies without either",
    "without_both_alone": "of these, those that need no data from outside",
    "lines_median": "statements of a policy, median",
    "lines_most": "statements of a policy, at most",
}


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print the figures by name.")
@click.option(
    "--before", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="Figures from --json, as a first column."
)
def main(as_json: bool, before: Path | None) -> None:
    show(figures(), FIGURES, as_json=as_json, before=before)


def show(now: Mapping[str, float], told: Mapping[str, str], *, as_json: bool, before: Path | None) -> None:
    """Print figures as JSON, or as a Markdown table with those of before in a first column.

    Args:
        told: what each figure is called in the table, in its order.
        before: a file that `--json` wrote.
    """
    if as_json:
        click.echo(json.dumps(now, indent=2))
        return
    columns = [] if before is None else [("before", json.loads(before.read_text(encoding="utf-8")))]
    columns.append(("now", now))
    click.echo("| | " + " | ".join(name for name, _ in columns) + " |")
    click.echo("|---|" + "---:|" * len(columns))
    for key, name in told.items():
        click.echo(f"| {name} | " + " | ".join(f"{column[key]:g}" if key in column else "–" for _, column in columns) + " |")


def figures() -> dict[str, Any]:
    """All figures, by the names of `FIGURES`."""
    from kvdsl import codes
    from kvdsl.ir import nodes, ops

    return {
        **_of_grammar(),
        **_of_newest_edition(),
        "ranges": len(ops.RANGES),
        "functions": len(ops.NAMED_FUNCTIONS),
        "nodes": len(nodes.EXPRESSIONS),
        "diagnostics": len(codes.CODES),
        **_of_policies(),
    }


def _of_newest_edition() -> dict[str, int]:
    """What the newest edition has; nothing of a checkout that knows one edition only."""
    from kvdsl.ir import ops

    try:
        from kvdsl.sema import editions
    except ImportError:
        return {}
    counted = _of_grammar(newest=True)
    return {
        "keywords_newest": counted["keywords"],
        "statements_newest": counted["statements"],
        "ranges_newest": len(
            [name for name, text in ops.RANGES.items() if text.removeprefix("over ") not in editions.RANGES]
        ),
        "functions_newest": len(ops.NAMED_FUNCTIONS - editions.FUNCTIONS.keys()),
    }


def _of_grammar(*, newest: bool = False) -> dict[str, int]:
    from lark import Lark

    from kvdsl.files import resource

    text = resource("grammar", "kv.lark").read_text(encoding="utf-8")
    gone = {line.split(":")[0].lstrip("?") for line in text.splitlines() if "// kv 1" in line} if newest else set()
    grammar = Lark(text, parser="lalr", keep_all_tokens=True, maybe_placeholders=False)
    words = {t.name for t in grammar.terminals if str(t.pattern.value).isidentifier()}
    rules: dict[str, set[str]] = {}
    for rule in grammar.rules:
        if rule.origin.name not in gone:
            rules.setdefault(rule.origin.name, set()).update(symbol.name for symbol in rule.expansion)
    own = _reached("start", rules, without="test") & words
    every = _reached("start", rules, without="") & words
    plain = {rule.expansion[0].name for rule in grammar.rules if rule.origin.name == "plain"} - gone
    return {"keywords": len(every), "keywords_of_tests": len(every - own), "statements": len(plain)}


def _reached(start: str, rules: dict[str, set[str]], without: str) -> set[str]:
    """What a rule is made of, down to terminals, but for one rule."""
    found, todo = set(), [start]
    while todo:
        name = todo.pop()
        if name not in found and name != without:
            found.add(name)
            todo.extend(rules.get(name, ()))
    return found


def _of_policies() -> dict[str, float]:
    from kvdsl.compiler import analyse, plan_of
    from kvdsl.shipped import all_policies

    without: dict[str, set[str]] = {"cpp": set(), "triton": set()}
    outside, lines = set(), []
    paths = all_policies()
    for path in paths:
        policy = analyse(path).policy
        plan = plan_of(policy)
        for backend, stems in without.items():
            if getattr(plan, backend) is None:
                stems.add(path.stem)
        if policy.tensors or policy.given:
            outside.add(path.stem)
        lines.append(_statements(path))
    neither, lacking = without["cpp"] & without["triton"], without["cpp"] | without["triton"]
    return {
        "policies": len(paths),
        "without_cpp": len(without["cpp"]),
        "without_triton": len(without["triton"]),
        "without_one": len(lacking),
        "without_one_alone": len(lacking - outside),
        "without_both": len(neither),
        "without_both_alone": len(neither - outside),
        "lines_median": statistics.median(lines),
        "lines_most": max(lines),
    }


def _statements(path: Path) -> int:
    from kvdsl.diagnostics import Sink
    from kvdsl.source import SourceFile
    from kvdsl.syntax.shape import parse_module

    module = parse_module(SourceFile(str(path), path.read_text(encoding="utf-8")), Sink())
    return sum(len(policy.statements) for policy in module.policies)


if __name__ == "__main__":
    main()
