"""Each published policy against its paper's formula, applied by brute force over the test's own kept set."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvdsl.compiler import analyse, find_policy
from kvdsl.interp import Call, Interpreter, resolve
from kvdsl.ir.nodes import Policy
from kvdsl.passes.columns import add_columns

from . import policies

BUDGET, TOKENS, GROUP, DIM = 8, 40, 2, 6


class Paper:
    """A paper's cache: token numbers, and for each the attention rows that it has had since it came."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.kept: list[int] = []
        self.rows: dict[int, list[float]] = {}
        self.quantised: dict[int, int] = {}

    def attend(self, q: np.ndarray, k: np.ndarray, token: int) -> np.ndarray:
        """Softmax over the kept tokens and this one; the probabilities of the query heads are averaged."""
        self.kept.append(token)
        self.rows[token], self.quantised[token] = [], 0
        weights = np.exp(q[token] @ k[self.kept].T / np.sqrt(DIM))
        probs = weights / weights.sum(axis=-1, keepdims=True)
        mean = probs.mean(axis=0)
        for index, kept in enumerate(self.kept):
            self.rows[kept].append(mean[index])
            self.quantised[kept] += int(mean[index] > mean.mean())
        return probs @ self.values[self.kept]


def lowest(candidates: list[int], score: Callable[[int], float]) -> int:
    """The argmin; of equals the older."""
    return min(candidates, key=lambda token: (score(token), token))


def h2o(cache: Paper) -> int:
    return lowest(cache.kept[: -BUDGET // 2], lambda token: sum(cache.rows[token]))


def scissorhands(cache: Paper) -> int:
    return lowest(cache.kept[: -BUDGET // 2], lambda token: cache.quantised[token])


def tova(cache: Paper) -> int:
    return lowest(cache.kept, lambda token: cache.rows[token][-1])


def roco(cache: Paper) -> int:
    def deviation(token: int) -> float:
        acc, acc2 = sum(cache.rows[token]), sum(p * p for p in cache.rows[token])
        count = len(cache.rows[token])
        return np.sqrt(max(acc2 / count - (acc / count) ** 2, 0))

    steady_first = sorted(cache.kept, key=lambda token: (deviation(token), token))
    feasible = [token for token in steady_first[: len(cache.kept) - BUDGET // 2] if token != cache.kept[-1]]
    return lowest(feasible, lambda token: sum(cache.rows[token]) / len(cache.rows[token]))


def vatp_h2o(cache: Paper) -> int:
    candidates = [token for token in cache.kept[: -BUDGET // 2] if token not in cache.kept[:2]]
    return lowest(candidates, lambda token: sum(cache.rows[token]) * np.abs(cache.values[token]).sum())


def window(cache: Paper) -> int:
    return cache.kept[0]


def streaming_llm(cache: Paper) -> int:
    return cache.kept[4]


PAPERS = {
    "h2o": (policies.H2O, h2o),
    "scissorhands": (policies.SCISSORHANDS, scissorhands),
    "tova": (policies.TOVA, tova),
    "roco": (policies.ROCO, roco),
    "vatp_h2o": (policies.VATP_H2O, vatp_h2o),
    "window": (policies.WINDOW, window),
    "streaming_llm": (policies.STREAMING_LLM, streaming_llm),
}


SETTINGS = {"streaming_llm": {"sinks": 4.0}, "vatp_h2o": {"sinks": 2.0}}


@pytest.mark.parametrize("form", ["history", "columns", "shipped"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", PAPERS)
def test_decoding_evicts_what_the_paper_says(name: str, seed: int, form: str) -> None:
    policy, victim = PAPERS[name]
    q, k, v = _trace(seed)
    if form == "shipped":
        interpreter = _interpreter(analyse(find_policy(name)).policy, **SETTINGS.get(name, {}))
    else:
        interpreter = _interpreter(add_columns(policy) if form == "columns" else policy)
    head, cache = interpreter.empty(DIM, DIM), Paper(v)
    for token in range(TOKENS):
        step = interpreter.decode(head, q[token], k[token], v[token])
        np.testing.assert_allclose(step.out, cache.attend(q, k, token), rtol=1e-12, atol=1e-14)
        expected = [victim(cache)] if len(cache.kept) > BUDGET else []
        assert step.evicted.tolist() == expected
        cache.kept = [kept for kept in cache.kept if kept not in expected]
        assert head.position.tolist() == cache.kept


@pytest.mark.parametrize("name", ["h2o", "scissorhands", "tova", "vatp_h2o"])
def test_a_prompt_keeps_the_papers_best(name: str) -> None:
    """After a prompt of L tokens the L - C lowest leave at once, by the column sums of the causal attention matrix."""
    policy, _ = PAPERS[name]
    q, k, v = _trace(seed=7)
    logits = np.einsum("lgd,sd->gls", q, k) / np.sqrt(DIM)
    weights = np.exp(logits) * np.tri(TOKENS)
    attn = (weights / weights.sum(axis=-1, keepdims=True)).mean(axis=0)
    above = attn > attn.sum(axis=1, keepdims=True) / np.arange(1, TOKENS + 1)[:, None]
    score = {
        "h2o": attn.sum(axis=0),
        "scissorhands": above.sum(axis=0),
        "tova": attn[-1],
        "vatp_h2o": attn.sum(axis=0) * np.abs(v).sum(axis=1),
    }[name]
    safe = {"h2o": range(36, 40), "scissorhands": range(36, 40), "tova": (), "vatp_h2o": (0, 1, 36, 37, 38, 39)}[name]
    ranked = sorted(range(TOKENS), key=lambda token: (token in safe, score[token], token))

    interpreter = _interpreter(policy)
    head = interpreter.empty(DIM, DIM)
    step = interpreter.prefill(head, q, k, v)
    assert step.kept.tolist() == sorted(ranked[-BUDGET:]) == head.position.tolist()
    np.testing.assert_allclose(step.score, score, rtol=1e-12)


def test_random_is_the_counter_hash() -> None:
    """Written out once more, in NumPy's own 32-bit arithmetic."""

    def mix(x: np.uint32) -> np.uint32:
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x85EBCA6B)
        x ^= x >> np.uint32(13)
        x *= np.uint32(0xC2B2AE35)
        return x ^ (x >> np.uint32(16))

    def draw(seed: int, *words: int) -> float:
        h = np.uint32(seed)
        with np.errstate(over="ignore"):
            for word in words:
                h = mix(h ^ (np.uint32(word) * np.uint32(0x9E3779B9)))
        return float(h >> np.uint32(8)) / 2**24

    numbers = resolve(policies.RANDOM, layer=3, layers=5)
    interpreter = Interpreter(policies.RANDOM, numbers, head_index=2, seed=90238691)
    head = interpreter.empty()
    for token in range(TOKENS):
        step = interpreter.observe_row(head, np.ones(head.live + 1))
        assert step.score.tolist() == [draw(90238691, 3, 2, int(position), token) for position in step.position]
        assert len(step.evicted) == (token >= BUDGET)
    assert 0 <= step.score.min() < step.score.max() < 1


def test_random_is_roughly_uniform() -> None:
    from kvdsl.interp.randomness import uniform

    draws = uniform(seed=1, layer=0, head=0, position=np.arange(4000), step=5)
    counts, _ = np.histogram(draws, bins=10, range=(0, 1))
    assert counts.min() > 320
    assert counts.max() < 480


def _trace(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    k, v = random.normal(size=(2, TOKENS, DIM))
    return 2 * random.normal(size=(TOKENS, GROUP, DIM)), k, v


def _interpreter(policy: Policy, **given: float) -> Interpreter:
    return Interpreter(policy, resolve(policy, {"budget": BUDGET, **given}, prompt=TOKENS), Call(scaling=DIM**-0.5))
