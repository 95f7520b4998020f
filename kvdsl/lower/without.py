"""Explain in one sentence why a target has no kernels for a policy: the line, the reason, the cost, and what to write instead."""

from __future__ import annotations

import json
import re

KERNELS = {"cpu": "C++", "triton": "Triton"}

COST = {
    "cpu": "a step of attention takes about 2.5× as long there (docs/performance.md)",
    "triton": "the cost of a step there was not measured",
}
"""The cost of the torch backend, measured in `docs/performance.md` (float32, 8 rows, 4,096 tokens)."""

_INSTEAD = (
    ("`group each`", "leave out `group each`, so that the query heads of a KV head select together"),
    ("`weight`", "leave out `weight`"),
    ("`victims shared", "leave out `victims`, so that each KV head evicts for itself"),
    ("`pages` of what eviction leaves", "leave out the pages, or the budget"),
    ("`pages` that do not begin", "let the pages begin with the text"),
    ("from layers`", "write `in layers` for `from layers`, so that each layer selects for itself"),
    ("`select` by anything but", "select by `dot(q, k)`"),
    ("_pool`", "leave out the pool"),
    ("`median", "write `mean`"),
    ("a count of `select`", "select a number of tokens set by a param"),
    ("that is counted over slots", "keep a number of tokens set by a param"),
    ("with vectors of query heads", "use a tensor with a vector per KV head"),
)
"""Parts of refusals, and what to write instead. That changes the policy, so only the user can choose it."""


def sentence(target: str, refusal: str, source: str) -> str:
    """Say why a policy runs on the torch backend, for `kvdsl explain`, `compile` and a cache's warning.

    Args:
        refusal: what the target has no code for, from `PackagePlan`.
        source: the text of the .kv file.
    """
    return f"{_no_kernels(target, refusal, source)}; {COST[target]}; {_instead(refusal)}"


def eviction_by_torch(refusal: str, source: str) -> str:
    """Say why C++ decodes and torch evicts; the arguments are those of `sentence`."""
    return f"torch evicts, because {_no_kernels('cpu', refusal, source)}; {_instead(refusal)}"


def _no_kernels(target: str, refusal: str, source: str) -> str:
    found = next(iter(_lines(refusal, source)), None)  # None if it is in another file
    where = "" if found is None else f" (line {found[0]}: `{found[1]}`)"
    what = re.sub(r": a kernel [^,]*", "", refusal)
    return f"there are no {KERNELS[target]} kernels for {what}{where}"


def _instead(refusal: str) -> str:
    instead = " and ".join(advice for part, advice in _INSTEAD if part in refusal)
    return f"to have them, {instead}" if instead else "there is no equivalent"


def without(manifest: str | bytes, target: str) -> str | None:
    """Return the sentence from a package's manifest; None if the target has kernels."""
    found = json.loads(manifest).get("without", {}).get(target)
    return None if found is None else str(found)


def statement(refusal: str, source: str) -> tuple[int, str] | None:
    """Return the line that shares most words with a refusal, which begins with the statement's; a policy may have several of a kind."""
    words = set(_words(refusal))
    return max(_lines(refusal, source), key=lambda line: len(words & set(_WORD.findall(line[1]))), default=None)


_WORD = re.compile(r"[A-Za-z_]\w*")


def _words(refusal: str) -> list[str]:
    return _WORD.findall(" ".join(re.findall(r"`([^`]+)`", refusal)))


def _lines(refusal: str, source: str) -> list[tuple[int, str]]:
    """Return the lines of a source, outside strings and comments, that contain the first word quoted by a refusal."""
    words = _words(refusal)
    if not words:
        return []
    bare = re.sub(r'"""(?s:.*?)"""|"[^"\n]*"|#[^\n]*', lambda text: re.sub(r"[^\n]", " ", text[0]), source)
    named = re.compile(rf"\b{words[0].removesuffix('s')}s?\b")
    return [(number, " ".join(line.split())) for number, line in enumerate(bare.splitlines(), 1) if named.search(line)]
