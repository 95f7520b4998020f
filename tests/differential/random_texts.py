"""Random scores as somebody might type them, from the tables of operations, whether or not they make sense: the checker decides."""

from __future__ import annotations

from random import Random

from kvdsl.compiler import analyse
from kvdsl.ir import ops
from kvdsl.ir.nodes import Policy
from kvdsl.passes.fold import fold
from kvdsl.source import SourceFile

_OVER = {"queries": "", "history": " over last {} queries", "slots": " over slots", "dims": " over dims"}
_INPUTS = [name for name in ops.INPUTS if name in ops.NAMED_INPUTS] + ["attn", "attn", "k", "v", "q", "2", "0.5"]


def random_score(draw: Random, depth: int = 4) -> str:
    """An expression; many are none that a score may be."""
    if depth == 0 or draw.random() < 0.15:
        return draw.choice([*_INPUTS, "count()", "random()"])
    shape = draw.choice(["reduce"] * 5 + ["operator"] * 3 + ["function", "dot", "norm", "pool", "rank"])
    inner = [random_score(draw, depth - 1) for _ in range(3)]
    if shape == "reduce":
        row = draw.choice(list(ops.REDUCTIONS.values()))
        over = draw.choice([name for name in _OVER if name in row.over])
        return f"{row.name}({inner[0]}{_OVER[over].format(draw.randint(1, 4))}{', 0.5' if row.decay else ''})"
    if shape == "operator":
        return f"({inner[0]} {draw.choice(list(ops.OPERATORS))} {inner[1]})"
    if shape == "function":
        name, count = draw.choice(list(ops.ELEMENTWISE.items()))
        return f"{name}({', '.join(inner[:count])})"
    if shape == "rank":
        return f"rank({inner[0]})"
    if shape == "pool":
        return f"{draw.choice(list(ops.POOLS))}({inner[0]}, 3)"
    return f"dot({inner[0]}, {inner[1]})" if shape == "dot" else f"{draw.choice(['norm1', 'norm2', 'norminf'])}({inner[0]})"


def policy_with_score(seed: str, stem: str = "p") -> Policy:
    """A folded policy whose score is the first of a seed that the checker accepts."""
    draw = Random(seed)
    while True:
        score = random_score(draw, draw.choice([2, 3, 4, 5]))
        text = f'kv 1\npolicy {stem.upper()} {{\n"A random policy."\nparam budget = 5\nscore {score}\n}}\n'
        found = analyse(SourceFile(f"{stem}.kv", text))
        if found.policies:
            return fold(found.policy)
