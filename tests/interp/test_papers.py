"""Each shipped policy against its paper's formula, applied by brute force over the test's own kept set (`brute.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from kvdsl.compiler import analyse, find_policy
from kvdsl.files import resource
from kvdsl.interp import Call, Interpreter, Layer, Rope, resolve
from kvdsl.ir.nodes import Policy
from kvdsl.passes.columns import add_columns
from tests.quick import few

from . import policies
from .brute import METHODS, Cache, Method, adakv, draw, rotated

GROUP, DIM = 2, 6


def policy_of(stem: str, form: str = "history") -> Policy:
    policy = analyse(find_policy(stem)).policy
    return add_columns(policy) if form == "columns" else policy


def trace(tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    k, v = random.normal(size=(2, tokens, DIM))
    return 2 * random.normal(size=(tokens, GROUP, DIM)), k, v


def compare(
    policy: Policy, method: Method, seed: int, supplied: Mapping[str, Callable[[int], float]] = MappingProxyType({})
) -> None:
    """Outputs, who left, who stays and who was attended to, after the prompt and after each token.

    Under `group each` the method is run for each query head by itself.

    Args:
        supplied: what the caller gives of the token at a place in the text.
    """
    q, k, v = trace(method.tokens, seed)
    query, key, rope = q, k, None
    frequencies = method.frequencies or method.rotary
    if frequencies is not None:  # the model gives them rotated at their places in the text
        rope = Rope(np.array(frequencies))
        key = np.stack([rotated(x, place, frequencies) for place, x in enumerate(k)])
        query = np.stack([[rotated(x, place, frequencies) for x in group] for place, group in enumerate(q)])
    where = {"prompt": method.prompt, "layer": method.layer, "layers": method.layers, "tensors": method.tensors}
    numbers = resolve(policy, method.given, **where)
    interpreter = Interpreter(policy, numbers, Call(scaling=DIM**-0.5, rope=rope), tensors=method.tensors)
    head, at = interpreter.empty(DIM, DIM), 0
    asking = [q[:, [index]] for index in range(GROUP)] if policy.group == "each" else [q]
    for runs in zip(*(method.run(own, k, v) for own in asking), strict=True):
        out = np.concatenate([run[0] for run in runs], axis=-2)
        _, gone, kept, chosen = runs[0]
        if at == 0 and method.prompt > 0:
            given = {name: [f(token) for token in range(method.prompt)] for name, f in supplied.items()}
            step = interpreter.prefill(head, query[: method.prompt], key[: method.prompt], v[: method.prompt], given)
            at = method.prompt
        else:
            step = interpreter.decode(head, query[at], key[at], v[at], {name: [f(at)] for name, f in supplied.items()})
            at += 1
        np.testing.assert_allclose(step.out, out, rtol=1e-9, atol=1e-12)
        assert step.evicted.tolist() == gone
        assert head.position.tolist() == kept
        assert chosen is None or [there.tolist() for there in step.reads] == [run[3] for run in runs]
    assert at == method.tokens


FORMS = [("history", 0), ("history", 1), ("history", 2), ("columns", 0)]
"""Memories, and seeds of the trace; `test_equivalence` holds one memory against the other."""


def test_every_shipped_policy_has_a_formula() -> None:
    shipped = {path.stem for path in Path(str(resource("policies"))).glob("*.kv") if not path.stem.endswith("_test")}
    assert shipped == METHODS.keys() | {"adakv"}


@pytest.mark.parametrize(("form", "seed"), few(FORMS, FORMS[0]))
@pytest.mark.parametrize("stem", METHODS)
def test_what_the_paper_says(stem: str, seed: int, form: str) -> None:
    compare(policy_of(stem, form), METHODS[stem], seed)


@pytest.mark.parametrize("stem", ["h2o", "scissorhands", "tova", "roco", "vatp_roco", "knorm", "random", "equip_h2o"])
def test_without_a_prompt(stem: str) -> None:
    compare(policy_of(stem), replace(METHODS[stem], prompt=0), seed=11)


def test_order_of_the_lazy_prunes() -> None:
    """With R = 6, sigma = 4, delta = 3 and a prompt of 23: down to 12, then from 14 to 11, again and again."""
    method = METHODS["lazy_streaming"]
    sizes = [len(kept) for *_, kept, _ in method.run(*trace(method.tokens, 0))]
    assert sizes == [12, 13, *[11, 12, 13] * 6, 11, 12]


@pytest.mark.parametrize(("layer", "budget"), [(0, 78), (1, 52), (2, 27), (3, 2)])
def test_the_pyramid(layer: int, budget: int) -> None:
    """From 2 b - b / 20 in the first layer to b / 20 in the last, in equal steps."""
    numbers = resolve(policy_of("pyramidkv"), {"budget": 40}, layer=layer, layers=4)
    assert numbers.budget == budget == int(78 - layer * (78 - 2) / 3)
    if layer == 0:
        compare(policy_of("pyramidkv"), replace(METHODS["pyramidkv"], budget=78, layer=0), seed=0)


@pytest.mark.parametrize("stem", ["sparcas", "quest"])
def test_the_first_layers_are_dense(stem: str) -> None:
    for layer in (0, 1):
        compare(policy_of(stem), replace(METHODS[stem], layer=layer, chosen=None, tokens=100), seed=0)


@pytest.mark.parametrize(("form", "seed"), FORMS)
def test_adakv(seed: int, form: str) -> None:
    """Three heads, of which the first attends sharply, share 3 * 40; each keeps 8 at least, here its window."""
    policy, heads, prompt = policy_of("adakv", form), 3, 70
    traces = [trace(prompt + 3, 100 * seed + head) for head in range(heads)]
    traces[0] = (3 * traces[0][0], *traces[0][1:])
    caches = []
    for q, k, v in traces:
        cache = Cache(METHODS["snapkv"], q, k, v)
        for token in range(prompt):
            cache.place(token)
            cache.attend(token)
        caches.append(cache)
    expected = adakv(caches, budget=40, floor=8)
    assert len({len(kept) for kept in expected}) > 1
    assert sum(map(len, expected)) == 120

    layer = Layer(policy, resolve(policy, {"budget": 40}, prompt=prompt), Call(scaling=DIM**-0.5), heads=heads)
    states = layer.empty(DIM, DIM)
    q, k, v = (np.stack(arrays) for arrays in zip(*traces, strict=True))
    layer.prefill(states, q[:, :prompt], k[:, :prompt], v[:, :prompt])
    assert [state.position.tolist() for state in states] == expected
    for token in range(prompt, prompt + 3):
        layer.decode(states, q[:, token], k[:, token], v[:, token])
    assert [state.position.tolist() for state in states] == [[*kept, 70, 71, 72] for kept in expected]


# -- random numbers ------------------------------------------------------------------------------------------------------


def test_random_is_the_counter_hash() -> None:
    numbers = resolve(policies.RANDOM, layer=3, layers=5)
    interpreter = Interpreter(policies.RANDOM, numbers, head_index=2, seed=90238691)
    head = interpreter.empty()
    for token in range(40):
        step = interpreter.observe_row(head, np.ones(head.live + 1))
        assert step.score.tolist() == [draw(90238691, 3, 2, int(position), token) for position in step.position]
        assert len(step.evicted) == (token >= 8)
    assert 0 <= step.score.min() < step.score.max() < 1


def test_random_is_roughly_uniform() -> None:
    from kvdsl.interp.scopes import uniform

    draws = uniform(seed=1, layer=0, head=0, position=np.arange(4000), step=5)
    counts, _ = np.histogram(draws, bins=10, range=(0, 1))
    assert counts.min() > 320
    assert counts.max() < 480


# -- E1: statistics in half precision --------------------------------------------------------------------------------------


def attention(tokens: int, seed: int, spread: float = 2.5) -> np.ndarray:
    """A head whose tokens differ in how much attention they get, [tokens, tokens], causal."""
    random = np.random.default_rng(seed)
    logits = spread * random.normal(size=tokens) + random.normal(size=(tokens, tokens))
    weights = np.exp(logits) * np.tri(tokens)
    return weights / weights.sum(axis=1, keepdims=True)


def deviations(attn: np.ndarray, statistics: type, *, clamped: bool) -> np.ndarray:
    """sqrt(Acc2 / Count - (Acc / Count) ** 2), the squares taken in one type, the sums and the rest in float32."""
    count = np.arange(len(attn), 0, -1).astype(np.float32)
    probability = attn.astype(statistics)
    total = probability.astype(np.float32).sum(axis=0, dtype=np.float32)
    squares = (probability * probability).astype(np.float32).sum(axis=0, dtype=np.float32)
    variance = squares / count - (total / count) ** 2
    with np.errstate(invalid="ignore"):
        return np.sqrt(np.maximum(variance, np.float32(0)) if clamped else variance)


@pytest.mark.parametrize("seed", range(4))
def test_half_precision_protects_the_least_attended(seed: int) -> None:
    """E1: the square of a probability below 1.7e-4 is 0 in fp16, the variance is negative, its root NaN, and `topk` of the
    smallest deviations takes NaN last: so EasyKV's scope leaves out exactly the tokens that get the least attention.
    """
    tokens = 500
    attn = attention(tokens, seed)
    mean = attn.sum(axis=0) / np.arange(tokens, 0, -1)
    half = deviations(attn, np.float16, clamped=False)
    undefined = np.flatnonzero(np.isnan(half))
    assert 0.03 * tokens < len(undefined) < 0.5 * tokens
    assert attn[:, undefined].max() < 1e-3
    assert mean[undefined].max() < np.median(mean)

    feasible = np.argsort(half, kind="stable")[: tokens // 2]  # as `torch.topk(largest=False)`: NaN is the largest
    assert not set(feasible) & set(undefined)
    theirs = feasible[np.argmin(mean[feasible])]

    policy = add_columns(analyse(find_policy("roco")).policy)
    interpreter = Interpreter(policy, resolve(policy, {"budget": tokens - 1}))
    step = interpreter.observe_rows(interpreter.empty(), attn)
    (ours,) = step.evicted
    assert ours in undefined
    assert ours == np.argmin(mean[:-1])
    assert mean[ours] < mean[theirs]

    single = deviations(attn, np.float32, clamped=True)
    assert np.isfinite(single).all()
    np.testing.assert_allclose(single, step.by[0], atol=2e-5)
    assert single[undefined].max() < np.median(single)


def test_single_precision_needs_the_clamp() -> None:
    """A token whose probability never changes has a variance of about 0, below it as often as not."""
    constant = np.random.default_rng(0).random(400, dtype=np.float32)
    rows = np.tile(constant, (400, 1)) * np.tri(400)
    raw, clamped = (deviations(rows, np.float32, clamped=one) for one in (False, True))
    assert np.isnan(raw).mean() > 0.2
    assert np.isfinite(clamped).all()
    assert clamped.max() < 1e-2
