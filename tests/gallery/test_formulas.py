"""The gallery's policies, which the interpreter runs, against their papers' formulas by brute force."""

from __future__ import annotations

import numpy as np
import pytest

from kvdsl.interp import Call, Interpreter, resolve
from tests.gallery.formulas import METHODS, importance, keydiff
from tests.interp.brute import Cache, Method
from tests.interp.test_papers import DIM, compare, policy_of, trace


@pytest.mark.parametrize("stem", METHODS)
def test_formula(stem: str) -> None:
    compare(policy_of(stem, "columns"), METHODS[stem], seed=5, supplied={"importance": importance})


def test_keydiff_in_blocks() -> None:
    """After every fourth token of the prompt the brute-force cache evicts; who was evicted is not attended to any more."""
    method = Method(keydiff, prompt=24, tokens=24)
    q, k, v = trace(24, 7)
    cache = Cache(method, q, k, v)
    outs = []
    for token in range(24):
        cache.place(token)
        outs.append(cache.attend(token))
        if token % 4 == 3:
            cache.evict()
    policy = policy_of("keydiff_blocks")
    interpreter = Interpreter(policy, resolve(policy, {"budget": 8, "block": 4}, prompt=24), Call(scaling=DIM**-0.5))
    head = interpreter.empty(DIM, DIM)
    step = interpreter.prefill(head, q, k, v)
    np.testing.assert_allclose(step.out, np.stack(outs), rtol=1e-9, atol=1e-12)
    assert head.position.tolist() == cache.kept
