"""docs/reach.md: the published methods that the language says, and those that it does not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvdsl.compiler import analyse
from kvdsl.explain.facts import facts
from kvdsl.provenance import AGREEMENTS, CHECKS, NOT_COMPARED, Provenance, fields, provenance
from kvdsl.shipped import all_policies
from scripts.pages.markdown import DOCS, MADE, escaped, table
from scripts.prose import wrapped

MISSING = DOCS / "notes" / "reach.json"
"""The methods that no policy is of, and what the language would need for them."""


@dataclass(frozen=True)
class Reached:
    """A policy that is a published method, or nearly; `each`: every query head selects for itself."""

    path: Path
    found: Provenance
    kernels: str
    each: bool

    @property
    def link(self) -> str:
        folder = "policies/gallery" if self.path.parent.name == "gallery" else "policies"
        return f"[`{self.path.stem}`]({folder}/{self.path.stem}.md){' †' if self.each else ''}"


def reach_page() -> str:
    """Which published methods the language says exactly, nearly, or not, counted from the policies' own headers."""
    policies = list(reached())
    exact = _by_method(one for one in policies if one.found.exact)
    near = _by_method(one for one in policies if not one.found.exact)
    data = json.loads(MISSING.read_text(encoding="utf-8"))
    missing = [row for row in data["methods"] if row["method"] not in exact.keys() | near.keys()]
    nearly = near.keys() - exact.keys()
    presses = {press for one in policies for press in one.found.presses}
    exactly = {press for one in policies if one.found.exact for press in one.found.presses}
    known = presses | {row["kvpress"] for row in missing if "kvpress" in row}
    kernels = sum(one.kernels == "C++, Triton" for one in policies)
    ideas = ((f"`{key}`", text) for key, text in data["ideas"].items() if any(key in row["missing"] for row in missing))
    of_papers = [one.found for one in policies if one.found.exact and one.found.paper is not None]
    agreements = Counter(map(_agreement_word, of_papers))
    compared = sum(found.code == NOT_COMPARED and "kvpress" in found.checks for found in of_papers)
    return wrapped("\n".join([
        MADE + "# What the language reaches\n",
        "*Exactly* is by the paper's formula: with its numbers a policy keeps, or attends to, the tokens that the formula names. "
        "The authors' code often does something else. How far it agrees, at its defaults, is a column of its own.\n",
        f"Of {len(exact) + len(nearly) + len(missing)} published methods that evict tokens or choose which to attend to, policies that "
        f"come with kvdsl are **{len(exact)} exactly**, **{len(nearly)} approximately**, and {len(missing)} not. Of the {len(known)} "
        f"presses of kvpress that is {len(exactly)}, {len(presses - exactly)} and {len(known - presses)}. Of the {len(policies)} "
        f"policies here, {kernels} have kernels in C++ and in Triton; all of them run on torch. (Their pages are on the site that "
        f"`make docs` makes; in a clone read `policies/NAME.kv`, `policies/gallery/NAME.kv` or `policies/found/NAME.kv`.)\n",
        "This page is made from what the policies say of themselves (`kvdsl list --all --json`). How one was checked: "
        + "; ".join(f"*{word}* {text}" for word, text in CHECKS.items())
        + ". †: each query head selects for itself (`group each`); elsewhere those that share a KV head share its selection.\n",
        f"Of the {agreements.total()} policies that are a paper's method exactly, the authors' code does the same in {agreements['same']} "
        f"cases and under the named conditions in {agreements['same with']}; it differs in {agreements['differs:']}, was not released for "
        f"{agreements['none released']}, and was not compared with {agreements[NOT_COMPARED]}, {compared} of them with kvpress's press "
        "instead. [What the code really does](records/authors_code.md) has more.\n",
        "## Exactly\n",
        table(("method", "year", "policy", "the authors' code", "kvpress", "checked", "kernels"), _reach_rows(exact, lambda one: ())),
        "## Approximately\n",
        table(
            ("method", "year", "policy", "in what it differs", "the authors' code", "kvpress", "checked", "kernels"),
            _reach_rows(near, lambda one: (escaped(one.found.how or ""),)),
        ),
        "## Not\n",
        table(("idea", "what is missing"), ideas),
        table(("method", "year", "what it does", "missing"), map(_missing_row, missing)),
    ]))  # fmt: skip


def reached() -> Iterator[Reached]:
    """Every policy whose header names a published method."""
    for path in all_policies():
        policy = analyse(path).policy
        found = provenance(path.stem, policy.doc)
        if found is not None:
            if "method" not in fields(policy.doc):
                found = replace(found, methods=(policy.name,))
            serve = {one["name"]: one["ok"] for one in facts(policy).backends}
            kernels = ", ".join(name for name, backend in (("C++", "cpu"), ("Triton", "triton")) if serve[backend])
            yield Reached(path, found, kernels or "–", policy.group == "each")


def _by_method(policies: Iterable[Reached]) -> dict[str, list[Reached]]:
    found: dict[str, list[Reached]] = {}
    for one in policies:
        for method in one.found.methods:
            found.setdefault(method, []).append(one)
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


def _reach_rows(methods: dict[str, list[Reached]], more: Callable[[Reached], tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    for method, policies in methods.items():
        for one in policies:
            found = one.found
            year = "–" if found.year is None else str(found.year)
            if found.arxiv is not None:
                year = f"[{year}](https://arxiv.org/abs/{found.arxiv})"
            presses, checks = ", ".join(found.presses), ", ".join(found.checks)
            yield method, year, one.link, *more(one), escaped(_agreement(found)), presses, checks, one.kernels


def _agreement(found: Provenance) -> str:
    """How far the authors' code agrees; nothing where no paper has authors, and nothing is said."""
    if found.code != NOT_COMPARED:
        return found.code
    return NOT_COMPARED if found.paper is not None else "–"


def _agreement_word(found: Provenance) -> str:
    """The form of `AGREEMENTS` that it has."""
    return max((form for form in AGREEMENTS if found.code.startswith(form)), key=len)


def _missing_row(row: dict[str, Any]) -> tuple[str, ...]:
    press = f" ({row['kvpress']})" if row.get("kvpress", row["method"]) != row["method"] else ""
    return row["method"] + press, str(row["year"]), escaped(row["does"]), ", ".join(f"`{idea}`" for idea in row["missing"])
