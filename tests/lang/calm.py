"""Policies that are written in Python."""

import kvdsl
from kvdsl.lang import age, attn, k, live, mean, norm1, norm2, position, std, sum, v, where


@kvdsl.policy
def calm(p, budget=256, sinks=4):
    """Evicts the token that attention has lost interest in.

    paper: none, "a" test
    """
    p.score(mean(attn) * norm1(v))
    p.keep(first=sinks)
    p.keep(last=budget / 4)
    p.when("prefill")


@kvdsl.policy(name="Everything")
def several(p, budget=256):
    """Has a bit of all."""
    p.param("share", 0.5, in_=(0, 1))
    unit = p.let("unit", k / norm2(k))
    lost = p.let("lost", lambda x, far=64: where((age > far) & ~(position < 4), -x, x))

    @p.let
    def recent(x):
        return sum(x, last=32)

    p.budget(budget, across_heads_floor=0.2)
    p.score(lost(recent(attn)) + norm1(unit) - 2 ** -(1 + mean(attn)) / live)
    p.when("prefill")
    p.keep(top=budget * 0.25, by=std(attn))
