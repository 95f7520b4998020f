"""`keep` lines that protect more than the budget keeps: who yields, in random policies of both editions."""

from __future__ import annotations

import warnings
from random import Random

import numpy as np
import pytest

from kvdsl.interp import Interpreter, Step, resolve
from tests.texts import policy_of, spec_of

from .cases import Case, compare

FEW, MANY = 5, 60
WORTHS = ("norm2(v)", "-position", "position % 3", "last(attn)", "-sum(attn)")
CONDITIONS = ("position % 2 == 0", "age > 3", "last(attn) < 0.04", "position < 20", "position > -1", "rank(norm2(k)) > 4")

SHARED = {
    "heads agree": (
        "param budget = 6\nscore mean(norm2(v) over heads)\nkeep first 2\nkeep top 5 by norm2(k)\nkeep last 1",
        Case("p", batch=2, prompt=30, padding=5, steps=8, group=2, kv_heads=2),
    ),
    "one budget": (
        "param budget = 6\nbudget budget across heads floor 0.3\nscore norm2(v)\nkeep first 2\nkeep where age > 4\nkeep last 2\n"
        "when prefill",
        Case("p", batch=2, prompt=30, padding=5, steps=2, group=2, kv_heads=2),
    ),
    "one pool": (
        "param budget = 6\nbudget budget across layers\nscore norm2(v)\nkeep first 2\nkeep where age > 4\nkeep last 2\nwhen prefill",
        Case("p", batch=2, prompt=30, padding=5, steps=2, group=2, kv_heads=2, layers=3, layer=1),
    ),
    "a budget that the ends exceed": (
        "budget sum(age < 3 over slots)\nscore norm2(v)\nkeep first 4\nkeep where age > 6",
        Case("p", batch=2, prompt=30, padding=5, steps=8, group=2, kv_heads=2),
    ),
}


def overprotecting(seed: int) -> tuple[str, int]:
    """The statements of a policy that protects more than its budget keeps, and an edition."""
    draw = Random(seed)
    edition, budget = draw.choice((1, 2, 2)), draw.randint(4, 9)
    lines = [f"param budget = {budget}", f"score {draw.choice(WORTHS)}"]
    first = draw.randint(0, budget - 1)
    last = draw.randint(0, budget - 1 - first)
    keeps = [f"keep first {first}", f"keep last {last}"]
    keeps += [f"keep top {draw.randint(1, budget - 1)} by {draw.choice(WORTHS)}" for _ in range(draw.randint(0, 2))]
    keeps += [f"keep where {draw.choice(CONDITIONS)}" for _ in range(draw.randint(len(keeps) == 2, 1))]
    draw.shuffle(keeps)
    lines += keeps
    lines += draw.choice(((), (), ("when decode",), ("when prefill",), ("trigger overflow >= 3",), ("positions compact",)))
    return "\n".join(lines), edition


def case_of(seed: int) -> Case:
    """What such a policy reads."""
    compact = "compact" in overprotecting(seed)[0]
    return Case("p", batch=2, prompt=30, padding=5, steps=8, group=2, kv_heads=2, rope="half" if compact else None)


@pytest.mark.filterwarnings("ignore:.*KV0424:UserWarning")
@pytest.mark.parametrize("seed", [*range(FEW), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(FEW, MANY // 2))])
def test_backends_yield_as_the_interpreter(seed: int) -> None:
    policy, spec = policy_of(*overprotecting(seed)), spec_of(*overprotecting(seed))
    for backend in ("torch", "cpu") if spec.cpu_source.exists() else ("torch",):
        total = compare(policy, spec, backend, case_of(seed))
        assert total.steps > 0
        assert not total.failures, "\n".join([*overprotecting(seed)[0].splitlines(), *total.failures])


@pytest.mark.filterwarnings("ignore:.*KV0424:UserWarning")
@pytest.mark.parametrize("name", SHARED)
def test_heads_that_share_yield_as_the_interpreter(name: str) -> None:
    text, case = SHARED[name]
    policy, spec = policy_of(text, 2), spec_of(text, 2)
    assert policy.ends_last
    for backend in ("torch", "cpu") if spec.cpu_source.exists() else ("torch",):
        total = compare(policy, spec, backend, case)
        assert total.steps > 0
        assert not total.failures, "\n".join(total.failures)


def test_protected_tokens_yield_as_the_page_says() -> None:
    """The rule of the language's page, written out, for every token that left and every one that stayed."""
    yielded = {1: 0, 2: 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in range(MANY):
            text, edition = overprotecting(seed)
            policy, random = policy_of(text, edition), np.random.default_rng(seed)
            interpreter = Interpreter(policy, resolve(policy, {}, prompt=24))
            head = interpreter.empty(8, 8)
            draw = random.standard_normal
            steps = [interpreter.prefill(head, draw((24, 2, 8)), draw((24, 8)), draw((24, 8)))]
            steps += [interpreter.decode(head, draw((2, 8)), draw(8), draw(8)) for _ in range(6)]
            for step in steps:
                yielded[edition] += _yields(step, text, edition)
    assert min(yielded.values()) > 100


def _yields(step: Step, text: str, edition: int) -> int:
    """How many protected tokens left, if those that did are the right ones."""
    counts = {scope: 0 for scope in ("first", "last")}
    for line in text.splitlines():
        words = line.split()
        if words[:2] in (["keep", "first"], ["keep", "last"]):
            counts[words[1]] = int(words[2])
    if edition == 1 and "keep last" not in text:
        counts["last"] = 1
    text_order = sorted(step.position.tolist())
    ends = {*text_order[: counts["first"]], *text_order[len(text_order) - counts["last"] :]}
    assert step.score is not None

    def order(slot: int) -> tuple[int, bool, float, int]:
        place, protected = int(step.position[slot]), bool(step.protected[slot])
        standing = 0 if not protected else 2 if place in ends and edition == 2 else 1
        return standing, protected and place == text_order[-1], float(step.score[slot]), place  # type: ignore[index]

    gone = set(step.victims.tolist())
    stayed = set(range(len(step.position))) - gone
    assert all(order(left) < order(kept) for left in gone for kept in stayed), text
    assert edition == 1 or not any(int(step.position[left]) in ends for left in gone)  # they fit into the budget
    return sum(bool(step.protected[left]) for left in gone)
