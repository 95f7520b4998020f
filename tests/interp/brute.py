"""The papers' methods by brute force: plain loops over the test's own kept set, from each paper's formula.

Nothing in here knows the language or the interpreter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

Leaves = Callable[["Cache"], list[int]]


class Cache:
    """A paper's cache: the kept tokens in the order of the text, and what each query gave them.

    Attributes:
        rows: per token, by query, the probability, the mean over the group; 0 where a query skipped it.
        most: per token, by query, the largest probability that a head of the group gave it.
        above: per token how many queries gave it more than the mean of what they gave.
        weights: per token how many times it counts for the query that attends next; once where nothing is said.
    """

    def __init__(self, method: Method, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        self.method, self.q, self.k, self.v = method, q, k, v
        self.kept: list[int] = []
        self.rows: dict[int, dict[int, float]] = {}
        self.most: dict[int, dict[int, float]] = {}
        self.above: dict[int, int] = {}
        self.newest = -1
        self.sketch: list[int] = []
        self.weights: dict[int, float] = {}

    def attend(self, token: int, chosen: list[int] | None = None) -> np.ndarray:
        """Softmax over the kept tokens, this one included, or over those that were chosen."""
        seen = self.kept if chosen is None else chosen
        key, query = self.k[seen], self.q[token]
        if self.method.rotary is not None:
            key = np.stack([rotated(self.k[one], one, self.method.rotary) for one in seen])
            query = np.stack([rotated(one, token, self.method.rotary) for one in query])
        if self.method.frequencies is not None:
            rank = {kept: place for place, kept in enumerate(self.kept)}
            key = np.stack([rotated(self.k[one], rank[one], self.method.frequencies) for one in seen])
            query = np.stack([rotated(one, rank[token], self.method.frequencies) for one in query])
        weights = np.exp(query @ key.T / math.sqrt(key.shape[1])) * [self.weights.get(one, 1.0) for one in seen]
        probs = weights / weights.sum(axis=-1, keepdims=True)
        mean = dict(zip(seen, probs.mean(axis=0), strict=True))
        most = dict(zip(seen, probs.max(axis=0), strict=True))
        for kept in self.kept:
            self.rows[kept][token], self.most[kept][token] = mean.get(kept, 0.0), most.get(kept, 0.0)
            self.above[kept] += mean.get(kept, 0.0) > sum(mean.values()) / len(self.kept)
        return probs @ self.v[seen]

    def place(self, token: int) -> None:
        self.kept.append(token)
        self.rows[token], self.most[token], self.above[token], self.newest = {}, {}, 0, token

    def evict(self) -> list[int]:
        gone = self.method.leaves(self)
        self.kept = [token for token in self.kept if token not in gone]
        return gone

    @property
    def excess(self) -> int:
        return max(0, len(self.kept) - self.method.budget)

    def total(self, token: int) -> float:
        return sum(self.rows[token].values())

    def mean(self, token: int) -> float:
        return self.total(token) / len(self.rows[token])

    def deviation(self, token: int) -> float:
        """Std(x) = sqrt(Acc2 / Count - (Acc / Count) ** 2)."""
        squares = sum(p * p for p in self.rows[token].values())
        return math.sqrt(max(squares / len(self.rows[token]) - self.mean(token) ** 2, 0))

    def norm(self, token: int) -> float:
        return float(sum(abs(x) for x in self.v[token]))


@dataclass(frozen=True)
class Method:
    """A method with the numbers that a test gives it.

    Attributes:
        leaves: who leaves, at the prompt's end and after each token.
        budget: tokens kept.
        given: the policy's params where they differ from the paper's.
        prompt, tokens: lengths of the prompt, and of everything.
        layer, layers: where it runs.
        chosen: what a decoded token attends to, or None: everything.
        frequencies: of the rotary positions, counted inside of the cache, or None: as they arrive. `rotary`: counted in the text.
        tensors: what the policy's files hold, for a model of one layer and KV head.
    """

    leaves: Leaves
    budget: float = 8
    given: dict[str, float] = field(default_factory=lambda: {"budget": 8})
    prompt: int = 12
    tokens: int = 44
    layer: int = 0
    layers: int = 4
    chosen: Callable[[Cache, int], list[int]] | None = None
    frequencies: tuple[float, ...] | None = None
    rotary: tuple[float, ...] | None = None
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def run(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray
    ) -> Iterator[tuple[np.ndarray, list[int], list[int], list[int] | None]]:
        """After the prompt, then after each token: the outputs, who left, who stays, and who was attended to."""
        cache = Cache(self, q, k, v)
        outs = []
        for token in range(self.prompt):
            cache.place(token)
            outs.append(cache.attend(token))
        if outs:
            if self.chosen is not None:
                self.chosen(cache, self.prompt - 1)
            yield np.stack(outs), cache.evict(), cache.kept, None
        for token in range(self.prompt, self.tokens):
            cache.place(token)
            chosen = None if self.chosen is None else self.chosen(cache, token)
            out = cache.attend(token, chosen)
            yield out, cache.evict(), cache.kept, chosen


def rotated(
    x: np.ndarray, position: float, frequencies: tuple[float, ...] | np.ndarray, layout: str = "half", offset: int = 0
):
    """One vector at one position, pair by pair, as a turn in the complex plane."""
    turned, pairs = np.array(x, dtype=float), len(frequencies)
    for pair, frequency in enumerate(frequencies):
        a, b = (pair, pairs + pair) if layout == "half" else (2 * pair, 2 * pair + 1)
        z = complex(x[offset + a], x[offset + b]) * np.exp(1j * position * frequency)
        turned[offset + a], turned[offset + b] = z.real, z.imag
    return turned


def lowest(cache: Cache, candidates: list[int], score: Callable[[int], float]) -> list[int]:
    """As many of the lowest as are too many; of equals the older first."""
    return sorted(candidates, key=lambda token: (score(token), token))[: cache.excess]


# -- the papers of eviction --------------------------------------------------------------------------------------------


def full(cache: Cache) -> list[int]:
    return []


def window(cache: Cache) -> list[int]:
    return cache.kept[: cache.excess]


def streaming_llm(cache: Cache) -> list[int]:
    """Four sinks and the most recent."""
    return cache.kept[4:][: cache.excess]


def lazy_streaming(cache: Cache) -> list[int]:
    """Algorithm 1 of the paper on lazy pruning, with S = 4, R = 6, sigma = 4, delta = 3."""
    capacity, live, wait, slack, drop, sinks = int(cache.method.budget), len(cache.kept), 6, 4, 3, 4
    hard = capacity + slack
    if live <= capacity or live - capacity < wait:
        return []
    target = min(max(live - drop, capacity), hard)
    keep = cache.kept[:sinks] + cache.kept[live - (target - sinks) :]
    return [token for token in cache.kept if token not in keep]


def h2o(cache: Cache) -> list[int]:
    """Equation 2 of VATP's paper; half of the budget for the recent tokens."""
    return lowest(cache, cache.kept[: -int(cache.method.budget) // 2], cache.total)


def scissorhands(cache: Cache) -> list[int]:
    """AQAS: how often above average."""
    return lowest(cache, cache.kept[: -int(cache.method.budget) // 2], lambda token: cache.above[token])


def recent_total(cache: Cache, token: int, width: int) -> float:
    """Equation 3: the sum over the last `width` queries that could see the token."""
    return sum(p for query, p in cache.rows[token].items() if query > cache.newest - width)


def scissorhands_window(cache: Cache) -> list[int]:
    return lowest(cache, cache.kept[:-10], lambda token: recent_total(cache, token, 7))


def vatp_scissorhands(cache: Cache) -> list[int]:
    """Equations 3 and 4, four sinks."""
    candidates = [token for token in cache.kept[:-10] if token >= 4]
    return lowest(cache, candidates, lambda token: recent_total(cache, token, 7) * cache.norm(token))


def vatp_h2o(cache: Cache) -> list[int]:
    """Equations 2 and 4, two sinks."""
    candidates = [token for token in cache.kept[: -int(cache.method.budget) // 2] if token >= 2]
    return lowest(cache, candidates, lambda token: cache.total(token) * cache.norm(token))


def vatp_code(cache: Cache) -> list[int]:
    """At the prompt the last 9 queries' sum over 9; then every query's probability whole. Four sinks, ten recent."""
    prompt, width = cache.method.prompt, 9

    def score(token: int) -> float:
        history = sum(p for query, p in cache.rows[token].items() if prompt - width <= query < prompt) / width
        return (history + sum(p for query, p in cache.rows[token].items() if query >= prompt)) * cache.norm(token)

    return lowest(cache, [token for token in cache.kept[:-10] if token >= 4], score)


def tova(cache: Cache) -> list[int]:
    """LTAS: the newest query's probability; anyone may leave."""
    return lowest(cache, cache.kept, lambda token: cache.rows[token][cache.newest])


def roco(cache: Cache, protect: int = 4, score: Callable[[int], float] | None = None, sinks: int = 0) -> list[int]:
    """MAS, outside of the scope of those whose attention varies most; the newest stays."""
    steady_first = sorted(cache.kept, key=lambda token: (cache.deviation(token), token))
    feasible = [token for token in steady_first[: len(cache.kept) - protect] if token != cache.newest and token >= sinks]
    return lowest(cache, feasible, score or cache.mean)


def vatp_roco(cache: Cache) -> list[int]:
    return roco(cache, 4, lambda token: cache.mean(token) * cache.norm(token), sinks=2)


def roco_easykv(cache: Cache, generated: int = 40) -> list[int]:
    """EasyKV's decoding mode: statistics and eviction of generated tokens only, of which B are kept.

    The last 10 have a deviation of 1e9, the B - int(0.3 B) least deviations are feasible, the lowest mean leaves.
    """
    mine = [token for token in cache.kept if token >= cache.method.prompt]
    if len(mine) <= generated:
        return []
    deviation = {token: cache.deviation(token) for token in mine} | dict.fromkeys(mine[-10:], 1e9)
    feasible = sorted(mine, key=lambda token: (deviation[token], token))[: generated - int(0.3 * generated)]
    return [min(feasible, key=lambda token: (cache.mean(token), token))]


def h2o_answer(cache: Cache) -> list[int]:
    """H2O among what is generated; half of the budget behind the prompt for the recent tokens."""
    return lowest(cache, of_answer(cache)[: -(int(cache.method.budget) - cache.method.prompt) // 2], cache.total)


def of_answer(cache: Cache) -> list[int]:
    return [token for token in cache.kept if token >= cache.method.prompt]


def cosines(cache: Cache, tokens: list[int]) -> dict[int, float]:
    """Of each key with the mean of all unit keys."""
    unit = {token: cache.k[token] / np.linalg.norm(cache.k[token]) for token in tokens}
    anchor = sum(unit.values()) / len(unit)
    return {token: float(one @ anchor / np.linalg.norm(anchor)) for token, one in unit.items()}


def keydiff_answer(cache: Cache) -> list[int]:
    """KeyDiff among what is generated: the key nearest to the mean direction leaves."""
    if cache.excess < 1:
        return []
    found = cosines(cache, of_answer(cache))
    return lowest(cache, of_answer(cache), lambda token: -found[token])


def likeness(cache: Cache, tokens: list[int], close: float = 0.5) -> dict[int, float]:
    """The matrix of cosines, without its diagonal and the newest large one of each row, summed by columns."""
    keys = np.stack([cache.k[token] / np.linalg.norm(cache.k[token]) for token in tokens])
    cosines = keys @ keys.T
    for row, found in enumerate(cosines):
        found[row] = 0
        found[np.flatnonzero(found > close)[-1:]] = 0
    return dict(zip(tokens, cosines.sum(axis=0) / len(keys), strict=True))


def mixed(cache: Cache, tokens: list[int], told: dict[int, float], mix: float) -> Callable[[int], float]:
    """R-KV's score: the largest of seven of what the window gives, against the softmax of likeness among `tokens`."""
    alike, text = {one: math.exp(x) for one, x in likeness(cache, tokens).items()}, list(told)

    def score(token: int) -> float:
        place = text.index(token)
        near = text[max(0, place - 3) : place + 4]
        return mix * max(map(told.__getitem__, near)) - (1 - mix) * alike[token] / sum(alike.values())

    return score


def rkv_answer(cache: Cache, window: int = 3, mix: float = 0.4, buffer: int = 4) -> list[int]:
    """R-KV among what is generated, by the probabilities among all."""
    if cache.excess < buffer:
        return []
    mine, queries = of_answer(cache), range(cache.newest - window + 1, cache.newest + 1)
    told = {token: sum(cache.most[token][query] for query in queries) / window for token in mine[:-window]}
    return lowest(cache, list(told), mixed(cache, mine, told, mix))


def overdue(times: list[int], now: int) -> float:
    """LazyEviction's score of a token that was needed at these times, the first of which is where it begins."""
    longest = max((after - before for before, after in itertools.pairwise(times)), default=0)
    late = (now - times[-1]) / (longest + 1e-5)
    again = 2 / (1 + math.exp(longest - 1)) if longest else 0.0
    return (2 / (1 + math.exp(1 + late)) if late < 700 else 0.0) + again


def lazy_answer(cache: Cache, window: int = 3, alpha: float = 0.03) -> list[int]:
    """LazyEviction among what is generated, a window at a time."""
    if cache.excess < window:
        return []
    times = {token: [token - 1, *(query for query, p in row.items() if p >= alpha)] for token, row in cache.rows.items()}
    return lowest(cache, of_answer(cache)[:-window], lambda token: overdue(times[token], cache.newest))


def knorm(cache: Cache) -> list[int]:
    """The longest key leaves; the newest stays."""
    return lowest(cache, cache.kept[:-1], lambda token: -math.sqrt(sum(x * x for x in cache.k[token])))


def votes(cache: Cache) -> dict[int, float]:
    """SnapKV: what the last 32 queries gave each token before them, and the largest of the seven around it."""
    before = cache.kept[:-32]
    vote = [recent_total(cache, token, 32) for token in before]
    return {token: max(vote[max(0, place - 3) : place + 4]) for place, token in enumerate(before)}


def snapkv(cache: Cache) -> list[int]:
    """At the prompt's end the observation window stays, and the best before it."""
    if cache.newest >= cache.method.prompt:
        return []
    pooled = votes(cache)
    return lowest(cache, list(pooled), pooled.__getitem__)


def adakv(caches: list[Cache], budget: int, floor: int) -> list[list[int]]:
    """What the heads of a layer keep: the top heads * budget of all of them, each head its own top `floor` at least."""
    ranked = []
    for cache in caches:
        pooled = votes(cache)
        ranked.append(cache.kept[-32:][::-1] + sorted(pooled, key=lambda token: (pooled[token], token), reverse=True))
    kept = [mine[:floor] for mine in ranked]
    rest = [
        (token not in cache.kept[-32:], -votes(cache).get(token, 0.0), -token, head, token)
        for head, (cache, mine) in enumerate(zip(caches, ranked, strict=True))
        for token in mine[floor:]
    ]
    for *_, head, token in sorted(rest)[: budget * len(caches) - floor * len(caches)]:
        kept[head].append(token)
    return [sorted(mine) for mine in kept]


# -- the papers of selection -------------------------------------------------------------------------------------------


def refresh(cache: Cache, token: int, dims: int) -> None:
    """Equation 3 of SparCas, at the prompt's last query and every 64 from there: the largest |q|, the group's mean."""
    if (token - (cache.method.prompt - 1)) % 64 == 0:
        size = [sum(abs(query[dim]) for query in cache.q[token]) for dim in range(cache.k.shape[1])]
        cache.sketch = sorted(range(len(size)), key=lambda dim: (-size[dim], dim))[:dims]


def by_sketch(cache: Cache, token: int, count: int, certain: list[int]) -> list[int]:
    """Equation 4: the best over the sketch's dims, besides those that are certain."""

    def match(slot: int) -> float:
        return sum(query[dim] * cache.k[slot][dim] for query in cache.q[token] for dim in cache.sketch)

    others = sorted((slot for slot in cache.kept if slot not in certain), key=lambda slot: (match(slot), slot), reverse=True)
    return sorted(certain + others[: max(0, count - len(certain))])


def sparcas(cache: Cache, token: int) -> list[int]:
    refresh(cache, token, dims=2)
    return by_sketch(cache, token, 6, [])


def roco_sparcas(cache: Cache, token: int) -> list[int]:
    """SparCas, and the newest token, which may not leave."""
    refresh(cache, token, dims=2)
    return by_sketch(cache, token, 6, [token])


def quest(cache: Cache, token: int) -> list[int]:
    """Pages of 16 by the largest dot product that their smallest and largest keys allow, 3 of them with the newest."""
    pages: dict[int, list[int]] = {}
    for slot in cache.kept:
        pages.setdefault(slot // 16, []).append(slot)

    def bound(slots: list[int]) -> float:
        low = [min(cache.k[slot][dim] for slot in slots) for dim in range(cache.k.shape[1])]
        high = [max(cache.k[slot][dim] for slot in slots) for dim in range(cache.k.shape[1])]
        return sum(max(x * a, x * b) for query in cache.q[token] for x, a, b in zip(query, low, high, strict=True))

    newest = cache.kept[-1] // 16
    others = sorted((page for page in pages if page != newest), key=lambda page: bound(pages[page]), reverse=True)
    return sorted(slot for page in [newest, *others[:2]] for slot in pages[page])


# -- the counter-based random number, written out once more ------------------------------------------------------------


def draw(seed: int, *words: int) -> float:
    """In NumPy's own 32-bit arithmetic."""

    def mix(x: np.uint32) -> np.uint32:
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x85EBCA6B)
        x ^= x >> np.uint32(13)
        x *= np.uint32(0xC2B2AE35)
        return x ^ (x >> np.uint32(16))

    h = np.uint32(seed)
    with np.errstate(over="ignore"):
        for word in words:
            h = mix(h ^ (np.uint32(word) * np.uint32(0x9E3779B9)))
    return float(h >> np.uint32(8)) / 2**24


def random(cache: Cache) -> list[int]:
    return lowest(cache, cache.kept, lambda token: draw(0, cache.method.layer, 0, token, cache.newest))


def random_answer(cache: Cache) -> list[int]:
    return lowest(cache, of_answer(cache), lambda token: draw(0, cache.method.layer, 0, token, cache.newest))


FREQUENCIES = (1.0, 0.3, 0.05)

METHODS: dict[str, Method] = {
    "full": Method(full, math.inf, {}),
    "random": Method(random),
    "window": Method(window),
    "streaming_llm": Method(streaming_llm, frequencies=FREQUENCIES),
    "lazy_streaming": Method(
        lazy_streaming, given={"budget": 8, "R": 6, "sigma": 4, "delta": 3}, prompt=23, frequencies=FREQUENCIES
    ),
    "h2o": Method(h2o),
    "scissorhands": Method(scissorhands),
    "scissorhands_window": Method(scissorhands_window, 16, {"budget": 16, "history": 7}, prompt=22, tokens=60),
    "tova": Method(tova),
    "roco": Method(roco),
    "vatp_h2o": Method(vatp_h2o, given={"budget": 8, "sinks": 2}),
    "vatp_scissorhands": Method(vatp_scissorhands, 20, {"budget": 20, "history": 7, "sinks": 4}, prompt=24, tokens=60),
    "snapkv": Method(snapkv, 40, {"budget": 40}, prompt=60, tokens=66),
    "pyramidkv": Method(snapkv, 52, {"budget": 40}, prompt=90, tokens=94, layer=1),  # 2 * 40 - 2 - 76 / 3
    "knorm": Method(knorm),
    "sparcas": Method(full, math.inf, {"tokens": 6, "dims": 2}, tokens=145, layer=2, chosen=sparcas),
    "quest": Method(full, math.inf, {"tokens": 60}, prompt=85, tokens=120, layer=3, chosen=quest),
    "equip_streaming": Method(streaming_llm, frequencies=FREQUENCIES),
    "equip_h2o": Method(h2o, frequencies=FREQUENCIES),
    "roco_easykv": Method(roco_easykv, given={"generated": 40}, tokens=85),
    "h2o_answer": Method(h2o_answer, 20),
    "random_answer": Method(random_answer, 20),
    "recent_answer": Method(lambda cache: of_answer(cache)[: cache.excess], 20),
    "keydiff_answer": Method(keydiff_answer, 20),
    "rkv_answer": Method(rkv_answer, 20, {"budget": 8, "window": 3, "mix": 0.4, "buffer": 4}),
    "lazy_answer": Method(lazy_answer, 20, {"budget": 8, "window": 3, "alpha": 0.03}),
    "vatp_code": Method(vatp_code, 20, {"budget": 20, "history": 9, "sinks": 4}, prompt=24, tokens=60),
    "vatp_roco": Method(vatp_roco, given={"budget": 8, "sinks": 2}),
    "roco_sparcas": Method(
        lambda cache: roco(cache, 5),
        14,
        {"budget": 14, "protect": 5, "tokens": 6, "dims": 2},
        prompt=20,
        tokens=100,
        layer=2,
        chosen=roco_sparcas,
    ),
}
