"""Selection in `look` and `choose`, in Triton's interpreter: the very slots that torch chooses, whatever the ties. The twins of
`tests.differential.test_selecting` at sizes for the interpreter, in many blocks.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.differential.test_selecting import PAGED, SELECTS, WATCHED, Shape, Twins, selecting
from tests.quick import thinned

pytestmark = pytest.mark.usefixtures("small_blocks")

BY_SLOTS = ("dot", "dot, group maximum", "dot, group sum", "sketch", "sketch, group maximum", "sketch, always")
BY_PAGES = ("pages by bounds", "pages by bounds, turned round")
OWN = {"pages by bounds": PAGED["pages by bounds"].replace("16", "4"), BY_PAGES[1]: PAGED[BY_PAGES[1]].replace("7", "3")}
BODIES = {**{name: WATCHED + SELECTS[name] for name in BY_SLOTS}, **OWN}
SMALL = Shape(prompt=50, pad=9, dim=32)
SHAPES = [
    SMALL, replace(SMALL, inputs="nan"), replace(SMALL, inputs="equal"), replace(SMALL, window=30), replace(SMALL, window=4),
    replace(SMALL, dtype=torch.bfloat16, group=4), replace(SMALL, dtype=torch.float16, group=1, batch=1),
    replace(SMALL, prompt=3, pad=1), replace(SMALL, dim=20, group=3, prompt=90),
]  # fmt: skip


def twins(name: str, shape: Shape, tokens: int, *, layer: int = 2) -> Twins:
    least = 12 if "keep" in BODIES[name] else 1
    return Twins(selecting(BODIES[name]), shape, layer=layer, backends=("triton", "torch"), t=max(tokens, least))


def check(name: str, shape: Shape, tokens: int) -> None:
    pair = twins(name, shape, tokens)
    pair.step()
    pair.step(1, torch.arange(shape.batch)[:, None] == 0)


@pytest.mark.parametrize(
    ("name", "shape"), thinned([(list(BODIES)[n % len(BODIES)], shape) for n, shape in enumerate(SHAPES)], 3), ids=str
)
def test_chooses_what_torch_chooses(name: str, shape: Shape) -> None:
    check(name, shape, 17)


def test_the_last_slot_is_a_slot_like_any_other() -> None:
    """It holds an ever older token, while the newest of equals are chosen."""
    body = "param budget = 40\nscore position\nselect top t by dot(q, k)"
    pair = Twins(selecting(body), replace(SMALL, inputs="equal", batch=1), backends=("triton", "torch"), t=3)
    for _ in range(6):
        pair.step()
    assert int(pair.states[0].position[0, 0, -1]) == SMALL.prompt


SPREAD = 7
"""Every so many-th of all combinations is tried: prime, so that all values of each meet."""


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "shape", "tokens"), list(product(BODIES, SHAPES, [1, 16, 500]))[::SPREAD], ids=str)
def test_whatever_is_wanted(name: str, shape: Shape, tokens: int) -> None:
    check(name, shape, tokens)
