"""docs/results.md: what the papers claim, held against what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from scripts.pages.markdown import DOCS, MADE, ROOT, escaped, table
from scripts.prose import wrapped

REPRODUCED = ROOT / "results" / "papers"
REAL = "smollm2"
"""The model, and the folder in `results/papers`, of what was measured a second time."""
RESULTS = """# Results

What the five papers claim, held against what was measured. EQUIP's claims are about time, and are measured on models of known shapes with
random weights. All others are measured on the *reference model*, which is small, was trained on old books and ships with kvdsl-lab:
it copies and recalls, and has attention sinks. Some are measured also on *SmolLM2* (135 million parameters, trained on 2
trillion tokens), a language model that people use: where a table has a column for it, empty cells were not measured. What separates
policies on a model of 7 billion parameters need not separate them on either, and the other way round:
`kvdsl reproduce PAPER --model FOLDER` says it of yours ([how](howto/benchmarks.md)).

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
        table(("where", "claim", *heads), _claims(found)),
        *([notes.read_text(encoding="utf-8")] if notes.exists() else []),
    ]
    return "\n".join(parts)


def _said_by(found: dict[str, Any]) -> Iterator[str]:
    """What the runs of a result were made with, machine by machine."""
    told = [one for one in found["experiments"] if one["findings"]]
    places = [one.get("environment", found["environment"]) for one in told]
    setup = found["setup"]
    folder = f"results/papers/{REAL}" if setup.get("model") == REAL else "results/papers"
    for where in [place for index, place in enumerate(places) if place not in places[:index]]:
        here = [one for one, place in zip(told, places, strict=True) if place == where]
        seconds = sum(cell["seconds"] for one in here for cell in one["cells"])
        asked = f" --model {REAL} --dtype {_SHORT[where['dtype']]}" if folder != "results/papers" else ""
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
                claim = (experiment["source"], escaped(finding["claim"]))
                told.setdefault(claim, {})[run] = HOLDS[finding["holds"]], escaped(finding["measured"])
    for claim, by_run in told.items():
        yield (*claim, *(text for run in range(len(found)) for text in by_run.get(run, ("", ""))))
