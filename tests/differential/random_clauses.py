"""Random policies that change another one: `policy P = Base with ...` as text, and the policy that it has to be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from kvdsl.compiler import analyse
from kvdsl.ir.nodes import Keep, Number, Policy
from kvdsl.ir.printer import print_expression, print_keep, print_policy, print_select
from kvdsl.passes.fold import fold
from kvdsl.passes.normal import normal
from kvdsl.source import SourceFile

from .random_policies import policy_of
from .tensors import BESIDE


@dataclass(frozen=True)
class Changed:
    """A policy, how it is written by clauses, and what the clauses change in the policy of which it is made."""

    policy: Policy
    text: str
    base: Policy
    changes: dict[str, Any]

    def differing(self) -> list[str]:
        """The statements that are not what the clauses say, or else as they were."""
        expected = self.base.model_copy(update={"name": self.policy.name, "stem": self.policy.stem, **self.changes})
        one_spelling = normal(self.policy), normal(expected)  # reading `sqrt(var(x))` gives `std(x)`
        found = ((name, *(getattr(policy, name) for policy in one_spelling)) for name in Policy.model_fields)
        return [name for name, one, other in found if name not in (*_LISTS, "doc") and one != other] + [
            name for name, one, other in found if name in _LISTS and set(one) - set(other)
        ]


_LISTS = ("params", "keeps", "tensors", "given")
"""Those in no order, of which a statement that has gone may have been the only reader."""


def changed(seed: str, stem: str = "p") -> Changed:
    """The first of a seed that the checker accepts."""
    draw = Random(seed)
    while True:
        base, other = (policy_of(f"{seed} {draw.random()}", name) for name in ("base", stem))
        options = list(_clauses(base, other, draw))
        clauses = draw.sample(options, min(len(options), draw.choice([1, 1, 2, 3])))
        separated = ", ".join(text for text, _ in clauses) if draw.random() < 0.5 else None
        body = separated or "{ " + "; ".join(text for text, _ in clauses) + " }"
        text = f'kv 1\n\nimport "{stem}_base.kv"\n\npolicy {stem.upper()} = BASE with {body}\n'
        beside = BESIDE.with_stem(f"{stem}_base")
        beside.write_text(print_policy(base))
        found = analyse(SourceFile(f"{stem}.kv", text, BESIDE.with_stem(stem)))
        beside.unlink()
        if clauses and found.ok:
            changes = {name: value for _, fields in clauses for name, value in fields.items()}
            keeps = [keep for fields in (fields for _, fields in clauses) for keep in fields.get("keeps", ())]
            if keeps:
                scopes = {keep.scope for keep in keeps}
                changes["keeps"] = (*(keep for keep in base.keeps if keep.scope not in scopes), *keeps)
            return Changed(fold(found.policy), text, base, changes)


def _clauses(base: Policy, other: Policy, draw: Random) -> Iterator[tuple[str, dict[str, Any]]]:
    """Statements that may take the place of the base's, and the fields that they become."""
    few = [Number(value=float(count)) for count in (0, 1, 2)]
    evicts = base.budget is not None
    if evicts and other.score is not None:
        yield f"score {print_expression(other.score)}", {"score": other.score}
    if evicts and base.prefill == "whole":
        when = draw.choice(["both", "prefill", "decode"])
        yield f"when {when}", {"when": when}
    for name, words in (("trigger", "trigger overflow >="), ("slack", "slack"), ("max_drop", "max_drop")):
        if evicts:
            value = draw.choice(few)
            yield f"{words} {print_expression(value)}", {name: value}
    for scope in ("first", "last"):
        keep = Keep(scope=scope, count=draw.choice(few))
        if keep.count != Number(value=0):
            yield print_keep(keep), {"keeps": (keep,)}
    yield from ((print_keep(keep), {"keeps": (keep,)}) for keep in other.keeps if keep.scope in ("top", "where"))
    if other.select is not None:
        yield print_select(other.select), {"select": other.select}
    group = draw.choice(["mean", "max", "sum"])
    yield f"group {group}", {"group": group}
