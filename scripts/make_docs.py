#!/usr/bin/env python
"""Writes the pages of docs/ that are made from the sources: the diagnostics, the language's reference, a page per policy, the results.

The pages of the policies are for the site only, and are not committed.

What is hand-written of a policy, such as what its authors' code does, lies in `docs/notes/STEM.md` and is put into its page; what is
of a paper's results, such as why something does not hold, in `docs/notes/results/PAPER.md`; of a part of the language, its corners
first of all, in `docs/notes/language/PART.md`; and what is said of the leaderboard's table in `docs/notes/pages/choosing.md`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "lab")]  # a checkout needs no installation for this

from kvdsl.budget import spelled  # noqa: E402
from kvdsl.cli.list import paragraphs  # noqa: E402
from kvdsl.codes import CODES, Code  # noqa: E402
from kvdsl.compiler import analyse  # noqa: E402
from kvdsl.explain.facts import facts  # noqa: E402
from kvdsl.explain.words import rows  # noqa: E402
from kvdsl.ir import ops  # noqa: E402
from kvdsl.provenance import CHECKS, Provenance, fields, provenance  # noqa: E402
from kvdsl.reference import STATEMENTS, form, written  # noqa: E402
from kvdsl.resources import read_resource  # noqa: E402
from kvdsl.sema.statements import WORDS  # noqa: E402
from kvdsl.shipped import all_policies, found_policies, gallery_policies, shipped_policies  # noqa: E402
from kvdsl_lab.leaderboard.claim import LEVEL  # noqa: E402
from kvdsl_lab.leaderboard.report import NO_MORE  # noqa: E402
from kvdsl_lab.search.space import at_budget, key, seed_of  # noqa: E402
from scripts.prose import wrapped  # noqa: E402

DOCS = ROOT / "docs"
MADE = "<!-- Made by scripts/make_docs.py; do not edit. -->\n\n"

# -- diagnostics -------------------------------------------------------------------------------------------------------

CHAPTERS = {
    "KV01": "Reading and syntax",
    "KV02": "Names, imports, inheritance",
    "KV03": "Expressions and their axes",
    "KV04": "Policies as a whole",
    "KV06": "Tests",
}


def diagnostics_page() -> str:
    """Every code with its explanation and an example that fails with it."""
    parts = [
        MADE + "# Diagnostics\n",
        "Every message of `kvdsl check` has a code, which keeps its meaning for ever. `kvdsl explain CODE` shows the same as this page.",
        "Each example is a whole file that fails with its code.\n",
    ]
    chapter = ""
    for code in sorted(CODES.values(), key=lambda one: one.id):
        if code.id[:4] != chapter:
            chapter = code.id[:4]
            parts.append(f"## {CHAPTERS[chapter]}\n")
        parts.append(_diagnostic(code))
    return wrapped("\n".join(parts))


def _diagnostic(code: Code) -> str:
    kind = "" if code.severity == "error" else f" ({code.severity})"
    text = f"### {code.id}: {code.title}{kind} {{ #{code.id.lower()} }}\n\n{code.explanation}\n"
    if not code.example or len(code.example) > 2_000:
        return text
    options = "".join(f" --set {name}={value}" for name, value in code.settings)
    with_options = f"\nWith `kvdsl check{options}`:\n" if options else ""
    return f"{text}{with_options}\n```text\n{_visible(code.example)}```\n"


def _visible(example: str) -> str:
    """What cannot be printed is shown as an escape."""
    return "".join(char if char.isprintable() or char == "\n" else f"\\x{ord(char):02x}" for char in example)


# -- the language ------------------------------------------------------------------------------------------------------

OPERATORS = {
    "`+` `-` `*` `/` `%` `**`": "arithmetic; `/` is real division, `**` binds to the right",
    "`<` `<=` `>` `>=` `==` `!=` `and` `or` `not`": "conditions; in arithmetic they count as 0 or 1",
}


def _said(part: str) -> str:
    """What is hand-written of a part of the language."""
    return (DOCS / "notes" / "language" / f"{part}.md").read_text(encoding="utf-8")


def grammar_sections() -> dict[str, str]:
    """The grammar's text by the titles of its sections."""
    _, *parts = re.split(r"^// -- (.*?) -+\n", read_resource("grammar", "kv.lark"), flags=re.MULTILINE)
    return dict(zip(parts[::2], (text.strip("\n") for text in parts[1::2]), strict=True))


def language_reference() -> str:
    """Statements, inputs, functions, the prelude, and the grammar itself."""
    parts = [
        MADE + "# The language, edition 1\n",
        "One KV head of one layer sees a matrix of queries × slots; a slot holds one cached token. Every expression varies over some of "
        "the axes query, slot and dim, and every statement says which it needs. `#` begins a comment; a line ends a statement, except "
        "inside parentheses, and so does `;`. Words are reserved only where the grammar has them.\n",
        "## Statements\n",
        _table(("statement", "meaning", "default"), (_statement(rule) for rule in STATEMENTS)),
        "A policy that `extends` another takes over its statements; `keep` lines accumulate; `override` stands before a statement that "
        'changes one. `import roco` makes a shipped policy known (`kvdsl list` shows them), and `import "mine.kv"` the policies and lets '
        "of a file, by its path from the importing one: no file of yours can be taken for a shipped policy, or the other way round.\n",
        "## Prompts and rates\n",
        _said("prompts"),
        "## Tensors of files\n",
        _said("tensors"),
        "## Values from the caller\n",
        _said("given"),
        "## Counts that read the data\n",
        _said("counts"),
        "## Budgets that are shared, and heads that vote\n",
        _said("shared_budgets"),
        "## Inputs\n",
        _table(("name", "axes", "meaning"), (_input(ops.INPUTS[name]) for name in ops.INPUTS if name in ops.NAMED_INPUTS)),
        "## Reductions\n",
        "`mean(x)` reduces over queries, `mean(x over slots)` over the slots that a query sees, or that are cached. `over page` gives "
        "every slot the value of its page, `over next page` that of the page behind it, `over sketch` reads the sketch's dims only. "
        "`over others` compares a slot with each of the others. Pages are cut by places in the text, from its beginning or (`pages 128 "
        "after 4`) from behind its first tokens on; of a page counts what is there. Behind the last one there is none: a sum over it "
        "is 0, a maximum minus infinity, a minimum infinity, and "
        "anything else NaN.\n",
        _table(("", "meaning", "ranges over"), map(_reduction, ops.REDUCTIONS.values())),
        "## Functions and operators\n",
        _table(("", "meaning"), _functions()),
        "### Ranks\n",
        _said("ranks"),
        "### Slots against each other\n",
        _said("others"),
        "### Folds\n",
        _said("folds"),
        "### The prompt's queries, and rotated vectors\n",
        _said("prompt_queries"),
        "## What is equal on every backend\n",
        _said("equality"),
        "## The prelude\n",
        "What every policy knows without an import; a policy may define these names anew.\n",
        f"```kv\n{read_resource('grammar', 'prelude.kv')}```\n",
        "## The grammar\n",
        "The file that the parser is made from, for [Lark](https://lark-parser.readthedocs.io).\n",
    ]
    for title, text in grammar_sections().items():
        parts.append(f"### {title[0].upper()}{title[1:]}\n\n```text\n{text}\n```\n")
    return wrapped("\n".join(parts))


def _input(row: ops.InputRow) -> tuple[str, str, str]:
    return f"`{row.name}`", ", ".join(sorted(axis.value for axis in row.axes)) or "–", row.doc


def _reduction(row: ops.ReductionRow) -> tuple[str, str, str]:
    ranges = {"history": "last N queries", "next": "next page"}
    return f"`{written(row.name)}`", row.doc, ", ".join(ranges.get(over, over) for over in row.over)


def _functions() -> Iterator[tuple[str, str]]:
    """Functions that mean the same stand in one line."""
    lines: dict[str, list[str]] = {}
    for name in (*ops.FORMS, *ops.POOLS, *ops.ELEMENTWISE):
        doc = {**ops.FUNCTIONS, **ops.POOLS, **ops.FORMS}[name].doc
        lines.setdefault(doc, []).append(f"`{written(name, extreme=name in ops.REDUCTIONS)}`")
    yield from ((" ".join(texts), doc) for doc, texts in lines.items())
    yield from OPERATORS.items()


def _statement(rule: str) -> tuple[str, str, str]:
    meaning, default = STATEMENTS[rule]
    return f"`{form(rule)}`", meaning, f"`{WORDS[rule][0]}`" if rule in WORDS else default


def _table(head: tuple[str, ...], lines: Iterator[tuple[str, ...]]) -> str:
    table = [head, ("---",) * len(head), *lines]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in table)


# -- policies ----------------------------------------------------------------------------------------------------------


def policy_page(path: Path) -> str:
    """A shipped policy: what its docstring says, its file, what it costs, its tests, and the hand-written notes on it."""
    stem, policy = path.stem, analyse(path).policy
    source = fields(policy.doc)
    parts = [
        f"{MADE}# {policy.name}\n",
        *(f"{paragraph}\n" for paragraph in paragraphs(policy.doc)),
        *([_table(("", ""), ((key, _escaped(value)) for key, value in source.items()))] if source else []),
        f"## {path.relative_to(ROOT)}\n",
        f"```kv\n{path.read_text(encoding='utf-8')}```\n",
        "## What it does\n",
        _table(
            ("", ""),
            ((title, "<br>".join(_escaped(line) for line in lines)) for title, lines in rows(facts(policy)).items()),
        ),
        f"From `kvdsl explain {stem}`.\n",
    ]
    notes = DOCS / "notes" / f"{stem}.md"
    if notes.exists():
        parts.append(notes.read_text(encoding="utf-8"))
    test = path.with_name(f"{stem}_test.kv")
    if test.exists():
        parts += [
            "## Its tests\n",
            f"`kvdsl test {stem}` runs them.\n",
            f"```kv\n{test.read_text(encoding='utf-8')}```\n",
        ]
    return "\n".join(parts)


def _escaped(text: str) -> str:
    """Text in a Markdown table."""
    return re.sub(r"([*_<>])", r"\\\1", text)


def policies_index(paths: Sequence[Path], title: str) -> str:
    """Policies of one folder, each with its year and its first sentence, which says where it is approximate."""
    lines = []
    for path in paths:
        policy = analyse(path).policy
        year = fields(policy.doc).get("year", "–").split(",")[0]
        lines.append((f"[{policy.name}]({path.stem}.md)", f"`{path.stem}`", year, _escaped(paragraphs(policy.doc)[0])))
    return f"{MADE}# {title}\n\n{_table(('policy', 'name', 'year', 'what it does'), iter(lines))}"


# -- reach -------------------------------------------------------------------------------------------------------------

MISSING = DOCS / "notes" / "reach.json"
"""The methods that no policy is of, and what the language would need for them."""


@dataclass(frozen=True)
class Reached:
    """A policy that is a published method, or nearly."""

    path: Path
    found: Provenance
    kernels: str

    @property
    def link(self) -> str:
        folder = "policies/gallery" if self.path.parent.name == "gallery" else "policies"
        return f"[`{self.path.stem}`]({folder}/{self.path.stem}.md)"


def reach_page() -> str:
    """Which published methods the language says exactly, nearly, or not, counted from the policies' own headers."""
    policies = list(_reached())
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
    return wrapped("\n".join([
        MADE + "# What the language reaches\n",
        f"Of {len(exact) + len(nearly) + len(missing)} published methods that evict tokens or choose which to attend to, policies that "
        f"come with kvdsl are **{len(exact)} exactly**, **{len(nearly)} approximately**, and {len(missing)} not. Of the {len(known)} "
        f"presses of kvpress that is {len(exactly)}, {len(presses - exactly)} and {len(known - presses)}. Of the {len(policies)} "
        f"policies here, {kernels} have kernels in C++ and in Triton; all of them run on torch. (Their pages are on the site that "
        f"`make docs` makes; in a clone read `policies/NAME.kv`, `policies/gallery/NAME.kv` or `policies/found/NAME.kv`.)\n",
        "This page is made from what the policies say of themselves (`kvdsl list --all --json`). How one was checked: "
        + "; ".join(f"*{word}* {text}" for word, text in CHECKS.items()) + ".\n",
        "## Exactly\n",
        _table(("method", "year", "policy", "kvpress", "checked", "kernels"), _reach_rows(exact, lambda one: ())),
        "## Approximately\n",
        _table(
            ("method", "year", "policy", "in what it differs", "kvpress", "checked", "kernels"),
            _reach_rows(near, lambda one: (_escaped(one.found.how or ""),)),
        ),
        "## Not\n",
        _table(("idea", "what is missing"), ideas),
        _table(("method", "year", "what it does", "missing"), map(_missing_row, missing)),
    ]))  # fmt: skip


def _reached() -> Iterator[Reached]:
    for path in all_policies():
        policy = analyse(path).policy
        found = provenance(path.stem, policy.doc)
        if found is not None:
            if "method" not in fields(policy.doc):
                found = replace(found, methods=(policy.name,))
            serve = {one["name"]: one["ok"] for one in facts(policy).backends}
            kernels = ", ".join(name for name, backend in (("C++", "cpu"), ("Triton", "triton")) if serve[backend])
            yield Reached(path, found, kernels or "–")


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
            yield method, year, one.link, *more(one), ", ".join(found.presses), ", ".join(found.checks), one.kernels


def _missing_row(row: dict[str, Any]) -> tuple[str, ...]:
    press = f" ({row['kvpress']})" if row.get("kvpress", row["method"]) != row["method"] else ""
    return row["method"] + press, str(row["year"]), _escaped(row["does"]), ", ".join(f"`{idea}`" for idea in row["missing"])


# -- the papers' results -------------------------------------------------------------------------------------------------

REPRODUCED = ROOT / "results"
REAL = "smollm2"
"""The model, and the folder in `results`, of what was measured a second time."""
RESULTS = """# Results

What the five papers claim, held against what was measured. EQUIP's claims are about time, and are measured on models of known shapes with
random weights. All others are measured on the *reference model*, which is small, was trained on old books and ships with kvdsl: it copies
and recalls, and has attention sinks. Some are measured also on *SmolLM2* (135 million parameters, trained on 2
trillion tokens), a language model that people use: where a table has a column for it, empty cells were not measured. What separates
policies on a model of 7 billion parameters need not separate them on either, and the other way round:
`kvdsl reproduce PAPER --model FOLDER` says it of yours ([how](howto/reproduce.md)).

A claim holds ("yes"), does not ("no"), or is left open by what was measured ("open"): of times the quartiles decide, perplexities within
1 % and scores within 0.01 of each other decide nothing. No more is known of how far another text would change a score. Every claim is
taken from the rows of its table by the code that wrote it, `lab/kvdsl_lab/reproduce/`; none was left out or judged by hand.
"""
HOLDS = {True: "yes", False: "**no**", None: "open"}


def results_page() -> str:
    """For every paper that was reproduced at full size: its claims, and what was measured, on one model or two."""
    parts = [MADE + RESULTS]
    for path in sorted(REPRODUCED.glob("*.json")):
        again = REPRODUCED / REAL / path.name
        found = [json.loads(one.read_text(encoding="utf-8")) for one in (path, again) if one.exists()]
        told = [one for one in found if any(experiment["findings"] for experiment in one["experiments"])]
        if told:
            parts.append(_results(told))
    return wrapped("\n".join(parts))


def _results(found: list[dict[str, Any]]) -> str:
    """One paper: what its runs found, beside each other."""
    paper, models = found[0]["paper"], ["reference model", "SmolLM2"] if len(found) > 1 else []
    notes = DOCS / "notes" / "results" / f"{paper}.md"
    heads = [title for model in models for title in (model, "measured")] or ["holds", "measured"]
    parts = [
        f"## {found[0]['title']}\n",
        *(line for one in found for line in _said_by(one)),
        _table(("where", "claim", *heads), _claims(found)),
        *([notes.read_text(encoding="utf-8")] if notes.exists() else []),
    ]
    return "\n".join(parts)


def _said_by(found: dict[str, Any]) -> Iterator[str]:
    """What the runs of a result were made with, machine by machine."""
    told = [one for one in found["experiments"] if one["findings"]]
    places = [one.get("environment", found["environment"]) for one in told]
    setup = found["setup"]
    folder = f"results/{REAL}" if setup.get("model") == REAL else "results"
    for where in [place for index, place in enumerate(places) if place not in places[:index]]:
        here = [one for one, place in zip(told, places, strict=True) if place == where]
        seconds = sum(cell["seconds"] for one in here for cell in one["cells"])
        asked = f" --model {REAL} --dtype {_SHORT[where['dtype']]}" if folder != "results" else ""
        if not found["finished"] or len(here) < len(told):
            asked += f" --only {','.join(one['name'] for one in here)}"
        yield (
            f"`kvdsl reproduce {found['paper']}{asked} --threads {where['threads']}`: {seconds / 60:.0f} minutes on {where['cpu']} "
            f"(torch {where['torch']}, transformers {where['transformers']}, {where['dtype'] or 'float32'}, seed {setup['seed']}), "
            f"{setup.get('model', 'shapes alone')}; the tables and figures are in `{folder}/{found['paper']}.md`.\n"
        )


_SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""What `--dtype` calls them."""


def _claims(found: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A row for each claim: what each run says of it; nothing where it says nothing."""
    told: dict[tuple[str, str], dict[int, tuple[str, str]]] = {}
    for run, one in enumerate(found):
        for experiment in one["experiments"]:
            for finding in experiment["findings"]:
                claim = (experiment["source"], _escaped(finding["claim"]))
                told.setdefault(claim, {})[run] = HOLDS[finding["holds"]], _escaped(finding["measured"])
    for claim, by_run in told.items():
        yield (*claim, *(text for run in range(len(found)) for text in by_run.get(run, ("", ""))))


# -- choosing ----------------------------------------------------------------------------------------------------------

PICTURE = "![What SmolLM2 loses, by what the cache takes](assets/choosing.svg)"
"""Its place is told from the page's own."""
BOARD = ROOT / "results" / "leaderboard"


def choosing_page() -> str:
    """Which policy for which job: what was written, and the leaderboard's table in it."""
    written = (DOCS / "notes" / "pages" / "choosing.md").read_text(encoding="utf-8")
    tables = {"{quality}\n": quality_table(), "{everybody}\n": everybody_table(), "{picture}": PICTURE}
    for place, made in tables.items():
        written = written.replace(place, made)
    return wrapped(MADE + written)


@dataclass(frozen=True)
class _Measured:
    """A column of the leaderboard at one budget, as the page shows it."""

    head: str
    folder: str
    column: str
    budget: float
    shown: str = "mean"
    digits: int = 2

    def cells(self) -> dict[str, str]:
        """By policy: what it is, with its interval and place."""
        found = json.loads((BOARD / self.folder / "leaderboard.json").read_text(encoding="utf-8"))
        rows = next(one["rows"] for one in found["columns"] if one["name"] == self.column)
        return {row["policy"]: self._cell(row) for row in rows if row["budget"] in (None, self.budget)}

    def _cell(self, row: dict[str, Any]) -> str:
        if self.shown == "bytes":
            return f"{row['bytes'] / 2**20:.1f}"
        whole = row["policy"] == "full"
        if row["note"] and not whole:  # it did nothing: no number under its name
            return str(row["note"]).partition(",")[0]
        if self.shown == "count":
            return f"{row['mean'] * row['items']:.0f}"
        if self.shown == "behind_full":
            return "0" if whole else f"{self._interval(*row['behind_full'])}, {row['place']}"
        return self._interval(row["mean"], row["low"], row["high"]) + ("" if whole else f", {row['place']}")

    def _interval(self, mean: float, low: float, high: float) -> str:
        return "{:.{d}f} ({:.{d}f} to {:.{d}f})".format(mean, low, high, d=self.digits)


QUALITY = (
    _Measured("a book, 256 tokens: nats more", "books", "books", 256, "behind_full", 3),
    _Measured("behind a prompt, a quarter: KL", "questions", "nearness: kl", 0.25, digits=3),
    _Measured("asked in the prompt, a quarter", "questions", "questions: known", 0.25),
    _Measured("half", "questions", "questions: known", 0.5),
    _Measured("asked later, a quarter", "questions", "questions: later", 0.25),
    _Measured("half", "questions", "questions: later", 0.5),
    _Measured("cache at a quarter, MiB", "questions", "questions: known", 0.25, "bytes"),
)


def quality_table() -> str:
    """Policies by what they keep of SmolLM2's quality."""
    columns = [one.cells() for one in QUALITY]
    policies = dict.fromkeys(policy for cells in reversed(columns) for policy in cells)
    lines = ((f"`{policy}`", *(cells.get(policy, "–") for cells in columns)) for policy in policies)
    return _table(("policy", *(one.head for one in QUALITY)), lines)


EVERYBODY = (
    _Measured("behind a prompt: KL", "gallery", "nearness: kl", 0.25, digits=3),
    _Measured("of six codes, asked for in the prompt", "gallery", "fact: known", 0.25, "count"),
    _Measured("later", "gallery", "fact: later", 0.25, "count"),
    _Measured("MiB", "gallery", "nearness: kl", 0.25, "bytes"),
)


def everybody_table() -> str:
    """The short list and the gallery, the nearest to the full cache first."""
    columns = [one.cells() for one in EVERYBODY]
    lines = ((f"`{Path(policy).stem}`", *(cells.get(policy, "–") for cells in columns)) for policy in columns[0])
    return _table(("policy", *(one.head for one in EVERYBODY)), lines)


# -- what was found by search ------------------------------------------------------------------------------------------

SEARCHED = ROOT / "results" / "search" / "smollm2_128" / "search.json"
FRONT = "![The best error by policies tried, and the front of errors by bytes of state](assets/search.svg)"
HOURS = 16
"""Of a processor, that the search is to have."""


def search_page() -> str:
    """What the committed search has found: what was written, and its own figures in it."""
    found = json.loads(SEARCHED.read_text(encoding="utf-8"))
    written = (DOCS / "notes" / "pages" / "search.md").read_text(encoding="utf-8")
    tables = {
        "{so_far}": _so_far(found), "{picture}": FRONT, "{finalists}\n": _finalists(found),
        "{ablations}\n": _table(("", "error"), ((one["what"], f"{one['error']:.4f}") for one in found["ablations"])),
        "{unseen}": _unseen(found), "{moves}\n": _moves(found["moves"]), "{cheap_step}": _cheap_step(found["cheap_step"]),
    }  # fmt: skip
    for place, made in tables.items():
        assert place in written
        written = written.replace(place, made)
    return wrapped(MADE + written)


def _so_far(found: dict[str, Any]) -> str:
    counts = found["counts"]
    return (
        f"{counts['tried']:,} policies had been tried then, {counts['admitted']:,} of them within the bounds of the space; judging had "
        f"taken {counts['processor_hours'] - found['choosing_hours']:.1f} hours of a processor, of {HOURS} that it is to have, and another "
        f"{found['choosing_hours']:.1f} to choose the finalists. **Nothing is proven yet.**"
    )


def _finalists(found: dict[str, Any]) -> str:
    """The finalists, by the names that they have on the shelf, among what the search began with."""
    (budget,) = found["budgets"]

    def same(path: Path) -> str:
        policy = seed_of(analyse(path).policy)
        assert policy is not None, path
        return key(at_budget(policy, budget))

    shelf = {same(path): f"[`{path.stem}`](policies/found/{path.stem}.md)" for path in found_policies()}
    named = [
        (shelf.get(same(SEARCHED.with_name(f"{one['name']}.kv")), "not on the shelf"), one) for one in found["finalists"]
    ]
    began = [(f"`{one['name']}`", one) for one in found["seeds"]]
    rows = sorted([*named, *began], key=lambda row: float(row[1]["error"]))
    return _table(
        ("policy", "error", "in a text", "behind a prompt", "state", "what it says"),
        (
            (
                name,
                *(f"{error:.4f}" for error in (one["error"], *one["errors"])),
                str(one["state_bytes"]),
                f"`{one['text']}`",
            )
            for name, one in rows
        ),
    )


def _unseen(found: dict[str, Any]) -> str:
    """What the first finalist loses beside the best that the search began with, on text that neither saw."""
    one = next(row for row in found["proof"] if row["name"] == found["finalists"][0]["name"])
    best = min((row for row in found["proof"] if row["is_seed"]), key=lambda row: float(row["loss"]))
    mean, low, high = one["behind"]
    spread = "" if low is None else f" ({low:+.3f} to {high:+.3f}, the middle 95 % of bootstrap draws)"
    return (
        f"On {found['stretches']} more stretches of {found['tokens']} tokens of the books that are searched on, read token by token, "
        f"the loss under `{found['finalists'][0]['text']}` differs from that under `{best['name']}` by {mean:+.3f} nats a token"
        f"{spread}."
    )


def _moves(moves: list[dict[str, Any]]) -> str:
    heads = ("move", "tried", "admitted", "climbed", "better")
    told = {"admitted": "let in", "climbed": "judged by the model", "better": "better than its parents"}
    return _table(tuple(told.get(head, head) for head in heads), (tuple(str(one[head]) for head in heads) for one in moves))


def _cheap_step(step: dict[str, Any]) -> str:
    return (
        f"The error of the attention's output orders the {step['policies']} policies that the model judged, too, as the model does with a "
        f"rank correlation of {step['rank_correlation']:.2f}; the best {step['best']} of them with "
        f"{step['rank_correlation_of_the_best']:.2f}."
    )


PROOFS = {
    "reading_2048": "SmolLM2, 2,048 tokens", "reading_4096": "SmolLM2, 4,096 tokens", "chat": "SmolLM2, 1,024 tokens",
    "prompts_2048": "SmolLM2, 2,048 tokens", "prompts_4096": "SmolLM2, 4,096 tokens", "reference": "the embedded model, 768 tokens",
}  # fmt: skip
"""Folder below results/search/proof -> on what."""


def _proof() -> str:
    """How many others each finalist is surely better than, at most as many bytes, and by how much than the best of them."""
    found = {
        name: json.loads((SEARCHED.parents[1] / "proof" / name / "leaderboard.json").read_text(encoding="utf-8"))
        for name in PROOFS
    }
    compared = {name: one["claim"]["comparisons"] for name, one in found.items()}
    policies = list(dict.fromkeys(one["policy"] for own in compared.values() for one in own))
    return _table(
        ("on", "task", "budget", *(f"`{policy}`" for policy in policies)),
        (
            (PROOFS[name], column, spelled(budget), *(_borne_out(own, column, budget, policy) for policy in policies))
            for name, own in compared.items()
            for column, budget in dict.fromkeys((one["column"], one["budget"]) for one in own)
        ),
    )


def _borne_out(comparisons: Sequence[dict[str, Any]], column: str, budget: float, policy: str) -> str:
    """A cell of the proof: each of its runs is a family of comparisons, and all of them are asked together."""
    own = [one for one in comparisons if (one["column"], one["budget"], one["policy"]) == (column, budget, policy)]
    fair = [one for one in own if one["bytes"] <= NO_MORE]
    sure, best = sum(one["p"] < LEVEL / len(PROOFS) for one in fair), min(fair, key=lambda one: float(one["better"][0]))
    mean, low, high = best["better"]
    return f"{sure} of {len(fair)}; `{best['rival']}` {mean:+.4f} ({low:+.4f} to {high:+.4f})"


# -- all pages ---------------------------------------------------------------------------------------------------------


COMMITTED: dict[str, Callable[[], str]] = {
    "choosing.md": choosing_page,
    "diagnostics.md": diagnostics_page,
    "language.md": language_reference,
    "reach.md": reach_page,
    "results.md": results_page,
    "search.md": search_page,
}
"""Path below docs/ -> what makes the text, of the pages that are committed."""


def policy_pages() -> dict[str, str]:
    """Path below docs/ -> text, of the pages that are made for the site."""
    return {
        "policies/index.md": policies_index(shipped_policies(), "Policies"),
        "policies/gallery/index.md": policies_index(gallery_policies(), "The gallery"),
        "policies/found/index.md": policies_index(found_policies(), "Found by search"),
        **{str(path.relative_to(ROOT).with_suffix(".md")): policy_page(path) for path in all_policies()},
    }


def bring_up_to_date(files: dict[Path, str], check: bool) -> NoReturn:
    """Writes what has changed, or only says it; the process ends with 1 if that is not yet written."""
    stale = [path for path, text in files.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    for path in stale:
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        click.echo(f"{'not up to date' if check else 'written'}: {path.relative_to(ROOT)}")
    sys.exit(1 if check and stale else 0)


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a committed page is not up to date.")
def main(check: bool) -> None:
    pages = {name: make() for name, make in COMMITTED.items()} | ({} if check else policy_pages())
    bring_up_to_date({DOCS / name: text for name, text in pages.items()}, check)


if __name__ == "__main__":
    main()
