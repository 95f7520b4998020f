"""The made parts of docs/search.md: what `kvdsl search` has found, and what is known of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvdsl.budget import spelled
from kvdsl.compiler import analyse
from kvdsl.shipped import found_policies
from kvdsl_lab.leaderboard.claim import LEVEL
from kvdsl_lab.leaderboard.report import NO_MORE
from kvdsl_lab.search.report import behind
from kvdsl_lab.search.space import at_budget, key, seed_of
from scripts.pages.markdown import ROOT, table

SEARCHED = ROOT / "results" / "search" / "smollm2_128" / "search.json"


def _found() -> dict[str, Any]:
    """What the committed search has found."""
    found: dict[str, Any] = json.loads(SEARCHED.read_text(encoding="utf-8"))
    return found


def _so_far(found: dict[str, Any]) -> str:
    counts = found["counts"]
    return (
        f"{counts['tried']:,} policies were tried, {counts['admitted']:,} of them within the bounds of the space; judging took "
        f"{counts['processor_hours'] - found['choosing_hours']:.1f} hours of a processor, and another {found['choosing_hours']:.1f} to "
        "choose the finalists."
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
        (shelf.get(same(SEARCHED.with_name(f"{one['name']}.kv")), f"`{one['name']}`"), one) for one in found["finalists"]
    ]
    began = [(f"`{one['name']}`", one) for one in found["seeds"]]
    rows = sorted([*named, *began], key=lambda row: float(row[1]["error"]))
    return table(
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
    few = ": too few stretches for an interval" if one["behind"][1] is None else ""
    return (
        f"On the {found['stretches']} last stretches of {found['tokens']} tokens of the books, which the search has not seen, read token "
        f"by token, the loss under `{found['finalists'][0]['name']}` differs from that under `{best['name']}` by {behind(one, 3)} nats a "
        f"token{few}."
    )


def _ablations() -> str:
    """What the policies of the shelf are without their parts."""
    told = json.loads((SEARCHED.parents[1] / "ablations.json").read_text(encoding="utf-8"))["ablations"]
    return table(
        ("policy", "", "error", "in a text", "behind a prompt"),
        ((f"`{one['policy']}`", one["what"], *(f"{error:.4f}" for error in (one["error"], *one["errors"]))) for one in told),
    )


def _moves(moves: list[dict[str, Any]]) -> str:
    heads = ("move", "tried", "admitted", "climbed", "better")
    told = {"admitted": "let in", "climbed": "judged by the model", "better": "better than its parents"}
    return table(tuple(told.get(head, head) for head in heads), (tuple(str(one[head]) for head in heads) for one in moves))


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
    folders = {name: SEARCHED.parents[1] / "proof" / name / "leaderboard.json" for name in PROOFS}
    found = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in folders.items() if path.exists()}
    compared = {name: one["claim"]["comparisons"] for name, one in found.items()}
    policies = list(dict.fromkeys(one["policy"] for own in compared.values() for one in own))
    measured = "All of them are measured" if len(found) == len(PROOFS) else f"Measured so far: {len(found)} of {len(PROOFS)}"
    return f"{measured}.\n\n" + table(
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
    drawn = "too few for an interval" if low is None else f"{low:+.3f} to {high:+.3f}"
    return f"{sure} of {len(fair)}; {mean:+.3f} ({drawn}) beside `{best['rival']}`"


PARTS: dict[str, Callable[[], str]] = {
    "so far": lambda: _so_far(_found()),
    "finalists": lambda: _finalists(_found()),
    "ablations": lambda: table(("", "error"), ((one["what"], f"{one['error']:.4f}") for one in _found()["ablations"])),
    "shelf": _ablations,
    "unseen": lambda: _unseen(_found()),
    "proof": _proof,
    "moves": lambda: _moves(_found()["moves"]),
    "cheap step": lambda: _cheap_step(_found()["cheap_step"]),
}
