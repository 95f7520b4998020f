"""The gallery's policies, which the interpreter runs, against their papers' formulas by brute force."""

from __future__ import annotations

import numpy as np
import pytest

from kvdsl.interp import Call, Interpreter, resolve
from tests.gallery.formulas import IN_BLOCKS, METHODS, importance
from tests.interp.brute import Cache
from tests.interp.test_papers import DIM, compare, policy_of, trace


@pytest.mark.parametrize("stem", METHODS)
def test_formula(stem: str) -> None:
    policy = policy_of(stem, "columns")
    compare(policy, METHODS[stem], seed=5, supplied={one.name: importance for one in policy.given})


@pytest.mark.parametrize("stem", IN_BLOCKS)
def test_in_blocks(stem: str) -> None:
    """After every fourth token of the prompt the brute-force cache evicts; who was evicted is not attended to any more."""
    method = IN_BLOCKS[stem]
    q, k, v = trace(method.tokens, 7)
    cache = Cache(method, q, k, v)
    outs = []
    for token in range(method.prompt):
        cache.place(token)
        outs.append(cache.attend(token))
        if token % 4 == 3:
            cache.evict()
    policy = policy_of(stem)
    interpreter = Interpreter(policy, resolve(policy, method.given, prompt=method.prompt), Call(scaling=DIM**-0.5))
    head = interpreter.empty(DIM, DIM)
    given = {one.name: [importance(token) for token in range(method.prompt)] for one in policy.given}
    step = interpreter.prefill(head, q, k, v, given)
    np.testing.assert_allclose(step.out, np.stack(outs), rtol=1e-9, atol=1e-12)
    assert head.position.tolist() == cache.kept
