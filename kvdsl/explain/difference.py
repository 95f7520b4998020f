"""Compare two policies: statements, state columns, bytes, and what they read. Imports nothing of the runtime."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import SequenceMatcher
from operator import attrgetter

from kvdsl.explain.facts import Facts
from kvdsl.explain.words import meaning, rows
from kvdsl.ir.nodes import Policy
from kvdsl.ir.printer import print_keep, print_policy

_TITLES = ("costs", "peak", "reads", "backends")
"""Titles of `explain` whose text is compared."""

_NO_MEANING = {"storage": "in_place", "block": None, "rope": "fused"}
"""Settings of the memory layout, which never change the kept tokens."""


@dataclass(frozen=True)
class Change:
    """Lines under a title that only the first policy has, and those that only the second has."""

    title: str
    before: tuple[str, ...]
    after: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """The differences; none if the two are equivalent.

    Attributes:
        in_memory_only: whether only the memory layout differs, so that both certainly keep the same tokens.
    """

    changes: tuple[Change, ...]
    in_memory_only: bool


def difference(a: Facts, b: Facts) -> Difference:
    """Compare two policies with everything they inherit; names, docstrings, comments and lets do not count."""
    first, second = _nameless(a.policy), _nameless(b.policy)
    if first == second:
        return Difference((), False)
    pairs = [("statements", _statements(first), _statements(second)), ("state", _state(a), _state(b))]
    pairs.append(("files", _files(first), _files(second)))
    text = rows(a), rows(b)
    pairs += [(title, text[0].get(title, []), text[1].get(title, [])) for title in _TITLES]
    changes = (_changed(*pair) for pair in pairs)
    same_tokens = first.model_copy(update=_NO_MEANING) == second.model_copy(update=_NO_MEANING)
    return Difference(tuple(one for one in changes if one.before or one.after), same_tokens)


def _nameless(policy: Policy) -> Policy:
    """Return the policy without names, and with unordered parts sorted."""
    unordered = {
        name: tuple(sorted(getattr(policy, name), key=attrgetter("name"))) for name in ("params", "given", "tensors")
    }
    keeps = tuple(sorted(policy.keeps, key=print_keep))
    return policy.model_copy(update={"name": "P", "stem": "p", "doc": "", "keeps": keeps, **unordered})


def _files(policy: Policy) -> list[str]:
    return [f"{tensor.name}: {tensor.path}" for tensor in policy.tensors]


def _statements(policy: Policy) -> list[str]:
    return [line.strip() for line in print_policy(policy).splitlines()[3:-1]]


def _state(found: Facts) -> list[str]:
    return [f"{column.name}: {meaning(column)}" for column in found.state]


def _changed(title: str, a: list[str], b: list[str]) -> Change:
    before: list[str] = []
    after: list[str] = []
    for kind, *place in SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if kind != "equal":
            before += a[place[0] : place[1]]
            after += b[place[2] : place[3]]
    return Change(title, tuple(before), tuple(after))
