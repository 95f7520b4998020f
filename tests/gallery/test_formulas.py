"""The gallery's policies, which the interpreter runs, against their papers' formulas by brute force."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from kvdsl.interp import Call, Interpreter, Layer, resolve
from kvdsl.ir.nodes import Policy
from tests.gallery.formulas import IN_BLOCKS, METHODS, compactor, importance, mean_boxes, mean_keys_of_heads, most_votes
from tests.gallery.layered import LAYERED
from tests.gallery.layered import importance as layers_importance
from tests.gallery.reusing import REUSING
from tests.interp.brute import Cache, Method
from tests.interp.test_papers import DIM, compare, policy_of, trace

pytestmark = pytest.mark.nightly

SEEDS = (5, 0)
"""Of the texts."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("stem", METHODS)
def test_formula(stem: str, seed: int) -> None:
    policy = policy_of(stem, "columns")
    compare(policy, METHODS[stem], seed, supplied={one.name: importance for one in policy.given})


NUMBERS = [(stem, name) for stem, method in METHODS.items() for name in method.given if name != "budget"]


@pytest.mark.parametrize(("stem", "name"), NUMBERS)
def test_the_formula_tells_every_number_of_the_policy(stem: str, name: str) -> None:
    """With another value of any param the policy keeps other tokens than the formula: what a number does is tested."""
    policy, method = policy_of(stem, "columns"), METHODS[stem]
    supplied, value = {one.name: importance for one in policy.given}, method.given[name]
    others = [replace(method, given=method.given | {name: other}) for other in (value / 2, value * 2, value + 1, 0)]
    assert any(not agrees(policy, other, seed, supplied) for other in others for seed in SEEDS)


def agrees(policy: Policy, method: Method, seed: int, supplied: dict[str, Callable[[int], float]]) -> bool:
    try:
        compare(policy, method, seed, supplied)
    except AssertionError:
        return False
    return True


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


@pytest.mark.parametrize("form", ["history", "columns"])
@pytest.mark.parametrize("stem", LAYERED)
def test_layers_share(stem: str, form: str) -> None:
    """After the prompt, in every layer and head; the layers attend more and more evenly."""
    method, policy = LAYERED[stem], policy_of(stem, form)
    where = [(layer, head) for layer in range(method.layers) for head in range(method.heads)]
    texts = [trace(method.prompt, 11 + seed) for seed in range(len(where))]
    texts = [(q / (1 + 2 * layer), k, v) for (layer, _), (q, k, v) in zip(where, texts, strict=True)]
    caches = [[Cache(Method(lambda cache: []), *texts[layer * method.heads + head]) for head in range(method.heads)]
              for layer in range(method.layers)]  # fmt: skip
    for layer, head in where:
        for token in range(method.prompt):
            caches[layer][head].place(token)
            caches[layer][head].attend(token)
    expected = method.stays(caches, method.budget, layers_importance)

    given = method.given | {"budget": method.budget}
    numbers = [resolve(policy, given, method.prompt, layer, method.layers) for layer in range(method.layers)]
    layers = Layer(policy, numbers, Call(scaling=DIM**-0.5), heads=method.heads)
    heads = layers.empty(DIM, DIM)
    told = [[layers_importance(*one, token) for token in range(method.prompt)] for one in where]
    layers.prefill(heads, *map(np.stack, zip(*texts, strict=True)), {one.name: told for one in policy.given})
    found = [head.position.tolist() for head in heads]
    assert [found[layer * method.heads :][: method.heads] for layer in range(method.layers)] == expected
    assert len({len(kept) for kept in found}) > 1, "layers get the same, so that nothing is tested"


@pytest.mark.parametrize("stem", REUSING)
def test_layers_take_over(stem: str) -> None:
    """Six layers of three KV heads: each attends to what the nearest below, of those that choose, has chosen; these to everything.

    Under `group each` that is so of query heads.
    """
    method, policy, tokens, layers, count = REUSING[stem], policy_of(stem), 30, 6, 3
    texts = [grouped_trace(tokens, 31 + seed, method.group) for seed in range(layers * count)]
    caches = [Cache(Method(lambda cache: []), *text) for text in texts]
    numbers = [resolve(policy, method.given, method.prompt, layer, layers) for layer in range(layers)]
    model = Layer(policy, numbers, Call(scaling=DIM**-0.5), heads=count)
    heads = model.empty(DIM, DIM)
    q, k, v = map(np.stack, zip(*texts, strict=True))
    part = slice(0, method.prompt)
    model.prefill(heads, q[:, part], k[:, part], v[:, part])
    apart, choices = 0, method.group if policy.group == "each" else 1
    for token in range(tokens):
        for cache in caches:
            cache.place(token)
        if token < method.prompt:
            continue
        steps = model.decode(heads, q[:, token], k[:, token], v[:, token])
        chosen: list[list[int]] | None = None
        for layer in range(layers):
            own, taken = steps[layer * count :][:count], chosen
            if layer in method.layers:
                chosen = method.chooses(caches[layer * count :][:count], token)
                found = [step.position[mask].tolist() for step in own for mask in step.chosen.reshape(choices, -1)]
                assert found == chosen
                apart += taken is not None and chosen != taken
                taken = None
            for head, step in enumerate(own):
                expected = [list(range(token + 1))] * len(step.reads) if taken is None else taken[head * choices :][:choices]
                assert [there.tolist() for there in step.reads] == expected
                cache = caches[layer * count + head]
                outs = [attend_to(cache, token, there) for there in expected]
                out = outs[0] if len(outs) == 1 else np.stack([own[index] for index, own in enumerate(outs)])
                np.testing.assert_allclose(step.out, out, rtol=1e-9, atol=1e-12)
    assert apart > 5, "all layers would choose the same"


def grouped_trace(tokens: int, seed: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries [tokens, group, DIM], keys and values [tokens, DIM]."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(tokens, group, DIM)), rng.normal(size=(tokens, DIM)), rng.normal(size=(tokens, DIM))


def attend_to(cache: Cache, token: int, attended: list[int]) -> np.ndarray:
    """Softmax attention of the token's query heads over some tokens, [group, DIM]."""
    logits = cache.q[token] @ cache.k[attended].T / np.sqrt(DIM)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ cache.v[attended]


@pytest.mark.parametrize(
    ("stem", "given", "prompt", "tokens", "chosen"),
    [
        ("token_select", {"tokens": 6, "sinks": 2, "recent": 2}, 14, 30, most_votes),
        ("arkvale", {"tokens": 128}, 190, 210, mean_boxes),
        ("infllm", {"block": 4, "blocks": 2, "sinks": 4, "recent": 4}, 40, 60, mean_keys_of_heads(4, 4, 4, 4)),
    ],
)
def test_heads_vote(
    stem: str, given: dict[str, float], prompt: int, tokens: int, chosen: Callable[[list[Cache], int], list[int]]
) -> None:
    """Three KV heads, of two query heads each, choose the same tokens: those that are best for all of them."""
    policy, count = policy_of(stem), 3
    texts = [trace(tokens, 21 + head) for head in range(count)]
    caches = [Cache(Method(lambda cache: []), *text) for text in texts]
    numbers = [resolve(policy, given, prompt, layer=2, layers=4)]
    layer = Layer(policy, numbers, Call(scaling=DIM**-0.5), heads=count)
    heads = layer.empty(DIM, DIM)
    q, k, v = map(np.stack, zip(*texts, strict=True))
    layer.prefill(heads, q[:, :prompt], k[:, :prompt], v[:, :prompt])
    alone = 0
    for token in range(tokens):
        for cache in caches:
            cache.place(token)
        if token >= prompt:
            steps = layer.decode(heads, q[:, token], k[:, token], v[:, token])
            expected = chosen(caches, token)
            assert [sorted(step.position[step.selected].tolist()) for step in steps] == [expected] * count
            alone += any(chosen([cache], token) != expected for cache in caches)
    assert alone > 5, "a head by itself would choose the same"


def test_heads_measure_together() -> None:
    """Three KV heads of Compactor, of two query heads each, whose scores are measured by all of them: of each the same number stays."""
    policy, prompt, count, given = policy_of("compactor"), 23, 3, {"budget": 11, "sinks": 3, "recent": 2, "chunk": 4}
    given["blending"] = 0.4
    sketches = [np.random.default_rng(50 + head).normal(size=(DIM, 3)) for head in range(count)]
    texts = [trace(prompt, 41 + head) for head in range(count)]
    texts = [(q, k, v * (1 + 4 * head)) for head, (q, k, v) in enumerate(texts)]
    caches = [Cache(Method(lambda cache: [], 11), *text) for text in texts]
    for cache in caches:
        for token in range(prompt):
            cache.place(token)
    tensors = {"sketch": np.stack(sketches)[None]}
    numbers = [resolve(policy, given, prompt, tensors=tensors)]
    layer = Layer(policy, numbers, Call(scaling=DIM**-0.5), heads=count, tensors=tensors)
    heads = layer.empty(DIM, DIM)
    layer.prefill(heads, *map(np.stack, zip(*texts, strict=True)))
    stays = [head.position.tolist() for head in heads]
    assert stays == compactor(caches, sketches)
    alone = [compactor([cache], [sketch])[0] for cache, sketch in zip(caches, sketches, strict=True)]
    assert stays != alone, "a head by itself would keep the same"
