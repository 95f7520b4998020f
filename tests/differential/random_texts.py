"""Random scores as somebody might type them, from the tables of operations, whether or not they make sense: the checker decides."""

from __future__ import annotations

from random import Random

from kvdsl.compiler import analyse
from kvdsl.ir import ops
from kvdsl.ir.nodes import Policy
from kvdsl.passes.fold import fold
from kvdsl.source import SourceFile

from .random_policies import reducing

_OVER = {"queries": "", "history": " over last {} queries", "slots": " over slots", "dims": " over dims"}
_WHERE = {
    "queries": (
        "attn > 0.2",
        "age < 4",
        "position % 2 == 0",
        "attn >= mean(attn over slots)",
        "random() < 0.5",
        "{0} > {1}",
    ),
    "slots": ("age < 4", "position % 2 == 0", "sum(attn) > 0.5", "live > 6", "{0} > {1}"),
    "dims": ("k > 0", "v < 1", "age < 4", "q * k > 0", "{0} > {1}"),
}
"""Filters, by what is reduced over; `{0}` and `{1}` are other expressions."""
_KEYS = ("page(3)", "page(4, after = 2)", "floor(position / 2.5)", "position % 3", "age > 2", "floor(norm1(k))", "rank(age)")
_OF_TWO = (
    "", "j.position != position", "j.position < position", "j.({0}) > {0}", "position != j.position and age < 5",
    "j.(page(3)) == page(3)", "j.(page(3)) == page(3) + 1", "j.({0}) == {0}", "j.(age % 2) == age % 2 and j.position > 1",
)  # fmt: skip
"""Filters of slots that are compared, j with each."""
_OF_SLOTS = ("sum(attn)", "age", "norm1(v)", "mean(attn where age > 0)", "sum(attn > 0.3)")
_INPUTS = [name for name in ops.INPUTS if name in ops.NAMED_INPUTS] + ["attn", "attn", "k", "v", "q", "2", "0.5"]


def random_score(draw: Random, depth: int = 4) -> str:
    """An expression; many are none that a score may be."""
    if depth == 0 or draw.random() < 0.15:
        return draw.choice([*_INPUTS, "count()", "random()"])
    shape = draw.choice(["reduce"] * 5 + ["operator"] * 3 + ["function", "dot", "norm", "pool", "rank", "other", "other"])
    inner = [random_score(draw, depth - 1) for _ in range(3)]
    if shape == "reduce":
        row = draw.choice(list(ops.REDUCTIONS.values()))
        over = draw.choice([name for name in _OVER if name in row.over])
        only = " where " + draw.choice(_WHERE.get(over, _WHERE["queries"])) if draw.random() < 0.4 else ""
        key = f" by {draw.choice(_KEYS)}" if over == "slots" and draw.random() < 0.3 else ""
        argument = ", 0.5" if row.argument else ""
        return f"{row.name}({inner[0]}{_OVER[over].format(draw.randint(1, 4))}{only.format(*inner[1:])}{key}{argument})"
    if shape == "other":
        own, other = draw.choice(_OF_SLOTS), draw.choice([*_OF_SLOTS, inner[0]])
        only = draw.choice(_OF_TWO).format(own)
        less = draw.choice(["", f"{own} - "])
        return f"{draw.choice(reducing('others'))}({less}j.({other}) over slots as j{only and ' where '}{only})"
    if shape == "operator":
        return f"({inner[0]} {draw.choice(list(ops.OPERATORS))} {inner[1]})"
    if shape == "function":
        name, count = draw.choice(list(ops.ELEMENTWISE.items()))
        return f"{name}({', '.join(inner[:count])})"
    if shape == "rank":
        return f"rank({inner[0]}{draw.choice(['', '', ' by ' + draw.choice(_KEYS)])})"
    if shape == "pool":
        return f"{draw.choice(list(ops.POOLS))}({inner[0]}, 3)"
    return f"dot({inner[0]}, {inner[1]})" if shape == "dot" else f"{draw.choice(['norm1', 'norm2', 'norminf'])}({inner[0]})"


def policy_with_score(seed: str, stem: str = "p") -> Policy:
    """A folded policy whose score is the first of a seed that the checker accepts."""
    draw = Random(seed)
    while True:
        score = random_score(draw, draw.choice([2, 3, 4, 5]))
        text = (
            f'kv {draw.choice([1, 2])}\npolicy {stem.upper()} {{\n"A random policy."\nparam budget = 5\nscore {score}\n}}\n'
        )
        found = analyse(SourceFile(f"{stem}.kv", text))
        if found.policies:
            return fold(found.policy).model_copy(update={"edition": 1})  # as it is printed
