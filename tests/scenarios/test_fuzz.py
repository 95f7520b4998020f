"""Whatever stands in a file of tests: diagnostics, never a traceback, and no more work than the text is long."""

from __future__ import annotations

import random

import pytest

from kvdsl.compiler import shipped_policies
from kvdsl.diagnostics import render_github, render_human, render_json
from kvdsl.syntax.reader import MAX_BYTES
from tests.quick import thinned
from tests.scenarios.harness import check
from tests.work import calls

TEXTS = [path.read_text(encoding="utf-8") for path in sorted(shipped_policies()[0].parent.glob("*_test.kv"))]
PIECES = [
    "attend", "token", "prompt", "{", "}", "times", "rest", "/", ",", "and", "..", "nan", "-", "inf", "1e999", "0", "1.5", "\n", ";",
    "expect", "kept", "state", "nothing", "error", '"x"', "use H2O", "set", "=", "at layer 9 of 2", 'test "a" {', "policy P {", "key", "#",
]  # fmt: skip


def mutated(draw: random.Random) -> str:
    """A shipped file with some pieces put in, taken out or doubled."""
    text = draw.choice(TEXTS)
    for _ in range(draw.randint(1, 6)):
        at = draw.randrange(len(text))
        end = min(len(text), at + draw.choice([0, 0, 1, 5, 40]))
        put = draw.choice(["", f" {draw.choice(PIECES)} ", text[at:end] * 2, draw.choice(TEXTS)[at:end]])
        text = text[:at] + put + text[end:]
    return text


@pytest.mark.parametrize("seed", thinned(range(20), 10))
def test_mutated_tests(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(10):
        found = check(mutated(draw)).diagnostics
        render_human(found)
        render_json(found)
        render_github(found)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "steps",
    [
        "prompt {" + "4096 times attend rest 0\n" * 1200 + "}",
        "attend 1\n" + "expect kept 0..4096\n" * 1500,
        "attend " + "1, " * 10_000 + "1",
        "attend 1 / " + "1 / " * 7_000 + "1",
        "set a = 1\n" * 3_000,
        "prompt {" * 3_000,
        "token " + "key 1 " * 4_000,
        'attend 1\n}\ntest "a" {\nuse H2O\n' * 800,
    ],
)
def test_work_grows_with_the_text_alone(steps: str) -> None:
    text = f'kv 1\nimport h2o\ntest "a" {{\nuse H2O\n{steps}\nexpect live 1\n}}\n'
    assert calls(lambda: check(text)) < 120 * MAX_BYTES  # the hungriest takes half of that
