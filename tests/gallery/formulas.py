"""The gallery's methods by brute force: who leaves, by each paper's formula, from what each query gave (`tests/interp/brute.py`).

Nothing in here knows the language or the interpreter. What is approximate is written as the policy's header says it differs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from tests.interp import brute
from tests.interp.brute import (
    FREQUENCIES,
    Cache,
    Leaves,
    Method,
    by_sketch,
    cosines,
    draw,
    full,
    likeness,
    lowest,
    mixed,
    overdue,
    recent_total,
    rotated,
)  # fmt: skip


def once(leaves: Leaves) -> Leaves:
    """At the prompt's end only; what is generated stays."""
    return lambda cache: [] if cache.newest >= cache.method.prompt else leaves(cache)


def buffered(count: int, leaves: Leaves) -> Leaves:
    """Once that many are too many."""
    return lambda cache: [] if cache.excess < count else leaves(cache)


def length(vector: np.ndarray) -> float:
    """The Euclidean norm."""
    return math.sqrt(sum(float(x) ** 2 for x in vector))


def asked(cache: Cache, token: int, width: int) -> list[float]:
    """What the last queries gave a token, of those that could see it."""
    return [p for query, p in cache.rows[token].items() if query > cache.newest - width]


def mean_asked(cache: Cache, token: int, width: int) -> float:
    given = asked(cache, token, width)
    return sum(given) / len(given)


def logits(cache: Cache, token: int) -> list[float]:
    """The token's scores before the softmax, the mean over the group, by those queries that saw it."""
    return [float(np.mean([q @ cache.k[token] / math.sqrt(len(q)) for q in cache.q[query]])) for query in cache.rows[token]]


# -- exactly -----------------------------------------------------------------------------------------------------------


def keydiff(cache: Cache) -> list[int]:
    found = cosines(cache, cache.kept)
    return lowest(cache, cache.kept, lambda token: -found[token])


def observed(cache: Cache) -> list[int]:
    return lowest(cache, cache.kept, cache.mean)


def finch(cache: Cache, question: int = 3) -> list[int]:
    """Each query's attention times the number of tokens before it."""
    text = cache.kept[:-question]

    def score(token: int) -> float:
        found = [p * query for query, p in cache.rows[token].items() if query > cache.newest - question]
        return sum(found) / len(found)

    return lowest(cache, text, score)


def morphkv(cache: Cache, recent: int = 3) -> list[int]:
    return lowest(cache, cache.kept[:-recent], lambda token: recent_total(cache, token, recent))


def caote(cache: Cache) -> list[int]:
    """How far the output moves if a token is left out and the others' probabilities are made to sum to 1 again."""
    weights = {token: cache.rows[token][cache.newest] for token in cache.kept}
    out = sum(p * cache.v[token] for token, p in weights.items())

    def moved(left: int) -> float:
        rest = sum(p for token, p in weights.items() if token != left)
        return length(sum(p / rest * cache.v[token] for token, p in weights.items() if token != left) - out)

    return lowest(cache, cache.kept, moved)


def sage_kv(cache: Cache) -> list[int]:
    """Two sinks, two recent."""
    return lowest(cache, cache.kept[2:-2], lambda token: cache.rows[token][cache.newest])


def a2sf(cache: Cache, forget: float = 0.7) -> list[int]:
    def score(token: int) -> float:
        return sum(p * forget ** (cache.newest - query) for query, p in cache.rows[token].items())

    return lowest(cache, cache.kept[:-1], score)


def gumbel(cache: Cache, token: int) -> float:
    return -math.log(-math.log(draw(0, cache.method.layer, 0, token, cache.newest)))


def lu_kv(cache: Cache) -> list[int]:
    return lowest(cache, cache.kept[3:-2], lambda token: -length(cache.k[token]))


def nacl(cache: Cache, proxies: int = 3, drawn: int = 2) -> list[int]:
    """The proxies and the best by what they ask stay; the rest of the budget is drawn."""
    text = sorted(cache.kept[:-proxies], key=lambda token: (recent_total(cache, token, proxies), token))
    best = int(cache.method.budget) - drawn - proxies
    others = text[: len(text) - best]
    return lowest(cache, others, lambda token: recent_total(cache, token, proxies) + gumbel(cache, token))


def shortest(cache: Cache) -> list[int]:
    return lowest(cache, cache.kept, lambda token: -length(cache.k[token]))


def decoding(cache: Cache, interval: int = 3) -> list[int]:
    return [] if cache.newest < cache.method.prompt else buffered(interval, shortest)(cache)


def h2o(cache: Cache, window: int = 4) -> list[int]:
    return lowest(cache, cache.kept[:-window], cache.total)


def last_query(cache: Cache) -> list[int]:
    return lowest(cache, cache.kept[:-1], lambda token: cache.rows[token][cache.newest])


def sinks_and_recent(cache: Cache) -> list[int]:
    return cache.kept[4:][: cache.excess]


def at_random(cache: Cache) -> list[int]:
    return lowest(cache, cache.kept, lambda token: draw(0, cache.method.layer, 0, token, cache.newest))


def snapkv(cache: Cache, window: int = 4) -> list[int]:
    """Means of five with zeros around what stands before the window."""
    text = cache.kept[:-window]
    padded = [0.0] * 2 + [mean_asked(cache, token, window) for token in text] + [0.0] * 2
    return lowest(cache, text, lambda token: sum(padded[text.index(token) :][:5]) / 5)


def by_page(cache: Cache, size: int) -> dict[int, list[int]]:
    """Of each token that is there, the tokens of its page that are."""
    return {token: [other for other in cache.kept if other // size == token // size] for token in cache.kept}


def cur(cache: Cache, sinks: int = 2, block: int = 4) -> list[int]:
    """Shares in the squared lengths of a block, of keys and of values."""
    pages = by_page(cache, block)

    def share(vectors: np.ndarray, token: int) -> float:
        return length(vectors[token]) ** 2 / sum(length(vectors[one]) ** 2 for one in pages[token])

    return lowest(cache, cache.kept[sinks:], lambda token: share(cache.k, token) * share(cache.v, token))


def chunkkv(cache: Cache, chunk: int = 5, window: int = 3) -> list[int]:
    """Chunks by the mean of what the window asked of their tokens."""
    pages = by_page(cache, chunk)

    def score(token: int) -> float:
        return sum(recent_total(cache, one, window) for one in pages[token]) / len(pages[token])

    return lowest(cache, cache.kept[:-window], score)


def knorm_chunks(cache: Cache, kept: float = 0.5, chunk: int = 5) -> list[int]:
    """Of every five tokens, and of those that are left over, the longer half leaves."""
    gone = []
    for first in range(0, len(cache.kept), chunk):
        own = cache.kept[first : first + chunk]
        gone += sorted(own, key=lambda token: length(cache.k[token]))[max(1, int(len(own) * kept)) :]
    return sorted(gone)


def knorm_then_keydiff(cache: Cache, first: float = 0.6, second: float = 0.5) -> list[int]:
    """The longest keys leave, then of the others those that are most like the mean of the others."""
    left = sorted(cache.kept, key=lambda token: length(cache.k[token]))[: int(first * len(cache.kept))]
    unit = {token: cache.k[token] / length(cache.k[token]) for token in left}
    anchor = sum(unit.values()) / len(unit)
    unlike = sorted(left, key=lambda token: float(unit[token] @ anchor))[: int(second * len(left))]
    return sorted(set(cache.kept) - set(left)) + sorted(
        set(left) - set(unlike), key=lambda token: -float(unit[token] @ anchor)
    )


def lagkv(cache: Cache, sinks: int = 2, lag: int = 4) -> list[int]:
    """Partition by partition, measured by the next one, of keys and of values; the last whole one and what follows it stay."""
    text = cache.kept[sinks:]
    parts = [text[first : first + lag] for first in range(0, len(text) - lag + 1, lag)]
    score = dict.fromkeys(cache.kept, 1.0)
    for part, behind in itertools.pairwise(parts):
        total = np.zeros(lag)
        for vectors in (cache.k, cache.v):
            low, high = vectors[behind].min(axis=0), vectors[behind].max(axis=0)
            unlike = np.exp(((vectors[part] - low) / (high - low)).std(axis=1, ddof=1))
            total += unlike / unlike.sum()
        for place, token in enumerate(np.array(part)[total.argsort()]):
            score[int(token)] = place / lag
    return lowest(cache, cache.kept, lambda token: score[token])


def mean_keys(page: int, chosen: int, sinks: int = 0, recent: int = 1) -> Callable[[Cache, int], list[int]]:
    """The pages of the first and the newest tokens, and of the others the best by the group's queries and the mean key."""

    together = mean_keys_of_heads(page, chosen, sinks, recent)
    return lambda cache, token: together([cache], token)


def mean_keys_of_heads(page: int, chosen: int, sinks: int = 0, recent: int = 1) -> Callable[[list[Cache], int], list[int]]:
    """The same, where several KV heads choose together."""

    def choose(heads: list[Cache], token: int) -> list[int]:
        kept = heads[0].kept

        def gate(one: int) -> float:
            inside = [slot for slot in kept if slot // page == one]
            return float(sum(query @ cache.k[inside].mean(axis=0) for cache in heads for query in cache.q[token]))

        certain = {slot // page for slot in kept[:sinks] + kept[-recent:]}
        others = sorted({slot // page for slot in kept} - certain, key=gate, reverse=True)
        taken = certain | {*others[: max(0, chosen - len(certain))]}
        return [slot for slot in kept if slot // page in taken]

    return choose


# -- approximately -----------------------------------------------------------------------------------------------------


def from_ahead(cache: Cache, query: np.ndarray, token: int, horizon: int) -> float:
    """What a query gives a key, on average, from the places that come next."""
    key, places = rotated(cache.k[token], token, FREQUENCIES), range(cache.newest + 1, cache.newest + 1 + horizon)
    return float(np.mean([rotated(query, place, FREQUENCIES) @ key for place in places]))


def softmax(logits: dict[int, float]) -> dict[int, float]:
    weights = {token: math.exp(x) for token, x in logits.items()}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


def expected_attention(cache: Cache, sinks: int = 2, horizon: int = 3) -> list[int]:
    """The softmax of mean + variance / 2 of what the prompt's queries give from ahead, head by head, times the value's norm."""
    text, score = cache.kept[sinks:], dict.fromkeys(cache.kept[sinks:], 0.0)
    for head in range(cache.q.shape[1]):
        asked = {
            token: [
                from_ahead(cache, cache.q[query, head], token, horizon) / math.sqrt(cache.k.shape[1])
                for query in range(sinks, cache.newest + 1)
            ]
            for token in text
        }
        for token, p in softmax({token: float(np.mean(x)) + float(np.var(x)) / 2 for token, x in asked.items()}).items():
            score[token] += p * length(cache.v[token])
    return lowest(cache, text, lambda token: score[token])


def expected_by_moments(cache: Cache, sinks: int = 2, horizon: int = 3) -> list[int]:
    """The same by a mean and a covariance that were found elsewhere."""
    text, score = cache.kept[sinks:], dict.fromkeys(cache.kept[sinks:], 0.0)
    turns = [rotation(place) for place in range(cache.newest + 1, cache.newest + 1 + horizon)]
    ahead = np.mean(turns, axis=0)
    for centre, root in zip(CENTRES, ROOTS, strict=True):
        mean, covariance = ahead @ centre, ahead @ root @ root.T @ ahead.T
        logits = {}
        for token in text:
            key = rotated(cache.k[token], token, FREQUENCIES)
            logits[token] = mean @ key / math.sqrt(len(key)) + key @ covariance @ key / (2 * len(key))
        for token, p in softmax(logits).items():
            score[token] += p * length(cache.v[token])
    return lowest(cache, text, lambda token: score[token])


def rotation(place: int) -> np.ndarray:
    """A rotation as a matrix."""
    return np.stack([rotated(one, place, FREQUENCIES) for one in np.eye(2 * len(FREQUENCIES))], axis=1)


def triattention(cache: Cache, interval: int = 3) -> list[int]:
    """The trigonometric series of every query head, and the norms', over the distances to 1, 2, 4, ... places after the next token;
    standardised over what was generated, the largest of the group.
    """
    new, pairs = [token for token in cache.kept if token >= cache.method.prompt], len(FREQUENCIES)
    if cache.newest < cache.method.prompt or cache.excess < interval:
        return []
    best = dict.fromkeys(new, -math.inf)
    for centre, excess in zip(CENTRES, EXCESSES, strict=True):
        query, raw = centre[:pairs] + 1j * centre[pairs:], []
        for token in new:
            key = cache.k[token][:pairs] + 1j * cache.k[token][pairs:]
            phase = np.angle(query) - np.angle(key)
            distances = [cache.newest + 1 - token + 2**step for step in range(17)]
            series = [np.sum(abs(query) * abs(key) * np.cos(far * np.array(FREQUENCIES) + phase)) for far in distances]
            raw.append(np.mean(series) + np.sum(excess * abs(key)))
        for token, z in zip(new, (np.array(raw) - np.mean(raw)) / max(np.std(raw), 1e-6), strict=True):
            best[token] = max(best[token], z)
    return lowest(cache, new, lambda token: best[token])


def leverages(rows: np.ndarray, ridge: float) -> np.ndarray:
    """x (XᵀX + ridge)⁻¹ x of every row."""
    return np.einsum("nd,de,ne->n", rows, np.linalg.inv(rows.T @ rows + ridge * np.eye(rows.shape[1])), rows)


def leverage_score(cache: Cache) -> list[int]:
    """Of the keys before they were rotated, about their mean, in the sketch's dims."""
    keys = cache.k[cache.kept]
    found = leverages((keys - keys.mean(axis=0)) @ SKETCH, 0.01)
    return lowest(cache, cache.kept, lambda token: found[cache.kept.index(token)])


def compactor(
    heads: list[Cache], sketches: list[np.ndarray], sinks: int = 3, recent: int = 2, chunk: int = 4, blending: float = 0.4
) -> list[list[int]]:
    """Who stays of each KV head: leverage and chunks' attention of what lies between the first and the last, by z-scores over all heads."""
    text = heads[0].kept[sinks:-recent]
    spanned, asked = [], []
    for head, sketch in zip(heads, sketches, strict=True):
        keys = head.k[text]
        spanned.append(leverages((keys - keys.mean(axis=0)) @ sketch, 0.01))
        got = [0.0] * len(text)
        for first in range(0, len(text), chunk):
            own = text[first : first + chunk]
            for query in (query for token in own for query in head.q[token]):
                for token, p in softmax({token: float(query @ head.k[token]) for token in own}).items():
                    got[token - sinks] += p / head.q.shape[1]
        weighed = [0.0, *(p * length(head.v[token]) for p, token in zip(got, text, strict=True)), 0.0]
        asked.append([sum(weighed[place : place + 3]) / 3 for place in range(len(text))])
    scores = blending * (np.array(spanned) - np.mean(spanned)) / np.std(spanned, ddof=1)
    scores += (np.array(asked) - np.mean(asked)) / np.std(asked, ddof=1)
    count = int(heads[0].method.budget) - sinks - recent
    best = [sorted(text, key=lambda token, own=own: own[token - sinks])[len(text) - count :] for own in scores]
    return [sorted([*head.kept[:sinks], *one, *head.kept[-recent:]]) for head, one in zip(heads, best, strict=True)]


def capkv(cache: Cache, sinks: int = 2, tau: float = 5.0, horizon: int = 3) -> list[int]:
    """Leverages of values, weighed by exp(tau cos) of key and mean query, head by head."""
    text, score = cache.kept[sinks:], np.zeros(len(cache.kept) - sinks)
    for head in range(cache.q.shape[1]):
        centre = cache.q[sinks : cache.newest + 1, head].mean(axis=0)
        ahead = np.mean(
            [rotated(centre, place, FREQUENCIES) for place in range(cache.newest + 1, cache.newest + 1 + horizon)], axis=0
        )
        keys = np.stack([rotated(cache.k[token], token, FREQUENCIES) for token in text])
        cosine = keys @ ahead / (np.linalg.norm(keys, axis=1) * length(ahead))
        weight = np.exp(tau * cosine - (tau * cosine).max())
        found = leverages(cache.v[text] * np.sqrt(weight + 1e-6)[:, None], 1.0)
        score += weight * found / (weight + 1e-6)
    return lowest(cache, text, lambda token: score[text.index(token)])


def non_causal(cache: Cache, chunk: int = 4) -> list[int]:
    """Column sums of each chunk's whole attention, unscaled; the mean with both neighbours, zeros around the text."""
    got = [0.0] * len(cache.kept)
    for head in range(cache.q.shape[1]):
        for first in range(0, len(cache.kept), chunk):
            own = cache.kept[first : first + chunk]
            for query in own:
                asked = rotated(cache.q[query, head], query, FREQUENCIES)
                given = softmax({token: float(asked @ rotated(cache.k[token], token, FREQUENCIES)) for token in own})
                for token, p in given.items():
                    got[token] += p / cache.q.shape[1]
    weighed = [0.0, *(got[token] * length(cache.v[token]) for token in cache.kept), 0.0]
    return lowest(cache, cache.kept, lambda token: sum(weighed[token : token + 3]) / 3)


def criticalkv(cache: Cache, window: int = 2) -> list[int]:
    """Half of the budget, the window in it, by attention; then by attention times the value's norm."""
    text = sorted(cache.kept[:-window], key=lambda token: (mean_asked(cache, token, window), token))
    first = int(cache.method.budget) // 2 - window
    return lowest(
        cache, text[: len(text) - first], lambda token: (mean_asked(cache, token, window) + 1e-4) * cache.norm(token)
    )


def defensivekv(cache: Cache, window: int = 3) -> list[int]:
    """The most that any query and head gave, by fives, raised to the mean, times the value's share of all norms."""
    text = cache.kept[:-window]
    most = [max(p for query, p in cache.most[token].items() if query > cache.newest - window) for token in text]
    pooled = {token: float(np.mean(most[max(0, place - 2) : place + 3])) for place, token in enumerate(text)}
    least, norms = sum(pooled.values()) / len(text), sum(cache.norm(token) for token in text)
    return lowest(cache, text, lambda token: max(pooled[token], least) * cache.norm(token) / norms)


def random_attention(cache: Cache, recent: int = 2) -> list[int]:
    """Of the answer who draws least, but for the last ones, as many at once as these are; the prompt from its end on."""
    prompt = cache.method.prompt
    if cache.newest < prompt or cache.excess < recent:
        return []

    def drawn(token: int) -> float:
        return prompt - token if token < prompt else draw(0, cache.method.layer, 0, token, cache.newest)

    return lowest(cache, cache.kept[:-recent], drawn)


def protection(cache: Cache, ends: int = 2) -> list[int]:
    return lowest(cache, cache.kept[ends:-ends], cache.total)


def snapstream(cache: Cache, sinks: int = 2, recent: int = 3, window: int = 2) -> list[int]:
    """The prompt by the largest of seven neighbours between sinks and window; then the oldest of what was in the window, or is new."""
    prompt, text = cache.method.prompt, cache.kept[sinks:-recent]
    if cache.newest >= prompt:
        return [token for token in text if token >= prompt - recent][: cache.excess]

    def most(token: int) -> float:
        return max(recent_total(cache, one, window) for one in text if abs(one - token) <= 3)

    return lowest(cache, text, most)


def taskpress(cache: Cache, guide: int = 3, outliers: int = 2) -> list[int]:
    """The guide first; then who it attends to least, but for those with the largest entries of a key."""
    text = cache.kept[:-guide]
    large = sorted(text, key=lambda token: max(abs(x) for x in cache.k[token]))[len(text) - outliers :]
    scores = {token: mean_asked(cache, token, guide) for token in text}
    return lowest(cache, [token for token in cache.kept if token not in large], lambda token: scores.get(token, -1.0))


def criticalkv_projected(cache: Cache, window: int = 2) -> list[int]:
    """Half of the budget, the window in it, by means of five with zeros around the text; then by these times what the caller says."""
    text = cache.kept[:-window]
    padded = [0.0] * 2 + [mean_asked(cache, token, window) for token in text] + [0.0] * 2
    pooled = {token: sum(padded[place : place + 5]) / 5 for place, token in enumerate(text)}
    first = int(cache.method.budget) // 2 - window
    rest = sorted(text, key=lambda token: (pooled[token], token))[: len(text) - first]
    return lowest(cache, rest, lambda token: (pooled[token] + 1e-4) * importance(token))


def prefill_decoding(cache: Cache, window: int = 3, interval: int = 3, target: int = 5) -> list[int]:
    """The prompt to eight tokens, by its window; then every third token to five."""
    generated = cache.newest + 1 - cache.method.prompt
    if generated == 0:
        return lowest(cache, cache.kept[:-window], lambda token: recent_total(cache, token, window))
    longest = sorted(cache.kept, key=lambda token: (-length(cache.k[token]), token))
    return longest[: max(0, len(cache.kept) - target)] if generated % interval == 0 else []


def rkv(cache: Cache, window: int = 3, mix: float = 0.4, buffer: int = 4) -> list[int]:
    """The largest of seven of what the window gives what is older, against the softmax of likeness; all found when tokens leave."""
    if cache.excess < buffer:
        return []
    text, given = cache.kept[:-window], []
    for query in range(cache.newest - window + 1, cache.newest + 1):
        most = {one: max(math.exp(q @ cache.k[one] / math.sqrt(len(q))) for q in cache.q[query]) for one in text}
        given.append({one: x / sum(most.values()) for one, x in most.items()})
    told = {one: sum(row[one] for row in given) / window for one in text}
    return lowest(cache, text, mixed(cache, cache.kept, told, mix))


def keyformer(cache: Cache, recent: int = 3, generated: int = 3) -> list[int]:
    """The sum over queries of a softmax over all that the query saw, with Gumbel noise, at the query's own temperature."""
    by_query: dict[int, dict[int, float]] = {}
    for token, row in cache.rows.items():
        for query, logit in zip(row, logits(cache, token), strict=True):
            noise = -math.log(-math.log(max(draw(0, cache.method.layer, 0, token, query), 1e-8)))
            by_query.setdefault(query, {})[token] = logit + noise

    def softmax(query: int, token: int) -> float:
        told = max(0, query + 1 - cache.method.prompt)
        temperature = 1 + min(told / generated, 1)
        return math.exp(by_query[query][token] / temperature) / sum(
            math.exp(x / temperature) for x in by_query[query].values()
        )

    return lowest(cache, cache.kept[:-recent], lambda token: sum(softmax(query, token) for query in cache.rows[token]))


ALPHA = 0.1


def hits(cache: Cache, token: int) -> list[int]:
    """The queries that gave a token at least alpha."""
    return [query for query, p in cache.rows[token].items() if p >= ALPHA]


def lazy_eviction(cache: Cache, tokens: int = 9, window: int = 3) -> list[int]:
    """By the steps of decoding: when each was last needed, and the longest pause before it was; what was not there before has its step
    less one, and the prompt 0.
    """
    prompt = cache.method.prompt
    step = cache.newest + 1 - prompt
    if step == 0 or step % window:
        return []

    def score(token: int) -> float:
        begun = max(0, token - prompt)
        times = [begun, *(query + 1 - prompt for query in hits(cache, token) if query >= prompt)]
        return overdue(times, step)

    old = sorted(cache.kept[:-window], key=lambda token: (score(token), token))
    return old[: max(0, len(cache.kept) - tokens)]


def raas(cache: Cache, page: int = 2) -> list[int]:
    text = [token for token in cache.kept[:-1] if token >= cache.method.prompt]
    stamps = {token: max([token, *hits(cache, token)]) for token in cache.kept}
    pages = by_page(cache, page)
    return lowest(cache, text, lambda token: max(stamps[one] for one in pages[token]))


def scope(cache: Cache, text: int = 5, generated: int = 4, window: int = 2) -> list[int]:
    """The prompt's best by its own queries, and its last two; of what is generated the best by all attention, and its last two."""
    prompt = cache.method.prompt

    def told(token: int) -> float:
        return sum(p for query, p in cache.rows[token].items() if query < prompt)

    if cache.newest < prompt:
        return sorted(cache.kept[:-window], key=lambda token: (told(token), token))[: len(cache.kept) - text]
    free = [token for token in cache.kept if token >= prompt]
    worst = sorted(free[:-window], key=lambda token: (cache.total(token), token))
    return worst[: max(0, len(free) - generated)]


def pyramid_infer(cache: Cache, recent: int = 4) -> list[int]:
    def score(token: int) -> float:
        return sum(p * (query + 1) for query, p in cache.rows[token].items() if query > cache.newest - recent)

    return lowest(cache, cache.kept[:-recent], score)


def vase(cache: Cache, large: int = 2, window: int = 3) -> list[int]:
    kept = sorted(cache.kept, key=lambda token: (length(cache.v[token]), token))[-large:]
    text = [token for token in cache.kept[:-window] if token not in kept]
    return lowest(cache, text, lambda token: math.log(mean_asked(cache, token, window)) + gumbel(cache, token))


def buzz(cache: Cache, sinks: int = 4, recent: int = 2, cell: int = 3) -> list[int]:
    """Maxima among their neighbours stay before all others."""
    text = cache.kept[sinks:-recent]

    def score(token: int) -> tuple[bool, float]:
        place = text.index(token)
        around = text[max(0, place - cell // 2) : place + cell // 2 + 1]
        return cache.total(token) >= max(map(cache.total, around)), cache.total(token)

    return sorted(text, key=lambda token: (score(token), token))[: cache.excess]


def lacache(cache: Cache, budget: int = 12, sinks: int = 2, layers: int = 4, span: int = 1, overlap: int = 0) -> list[int]:
    """As its code goes on where it stopped: from the cursor on, as many rungs as have to be, of each `after` tokens from the layer's offset
    on; what the cache holds where no rung fits before its end begins anew behind the sinks.
    """
    before = 1 + math.ceil((layers - span) / (span - overlap))
    after = math.ceil(span / (span - overlap))
    drop = before - after
    full = budget + drop // 2
    if len(cache.kept) <= full:
        return []
    cursor = cache.sketch[0] if cache.sketch else sinks  # where the last time ended
    if (full - layers - cursor) // after < 1:
        cursor = sinks
    rungs = math.ceil((len(cache.kept) - full) / drop)
    assert rungs <= (full - layers - cursor) // after, "one sweep is enough"
    stay = set()
    for rung in range(rungs):
        first = cursor + before * rung + cache.method.layer % (drop + 1)
        stay |= {*cache.kept[first : first + after]}
    cache.sketch = [cursor + rungs * after]
    return [token for token in cache.kept[cursor : cursor + before * rungs] if token not in stay]


class GKV:
    """Scores that are handed on from prune to prune, as the authors' code keeps them beside the cache."""

    def __init__(self, window: int = 2, decay: float = 0.8, buffer: int = 2, mix: float = 0.6) -> None:
        self.window, self.decay, self.buffer, self.mix = window, decay, buffer, mix
        self.scores: dict[int, float] = {}

    def __call__(self, cache: Cache) -> list[int]:
        """The window's mean attention over its maximum, or what is left of the last score where that is more."""
        if cache.newest < cache.method.prompt:
            self.scores = {}
        if cache.excess < self.buffer:
            return []
        text = cache.kept[: -self.window]
        asked = {
            token: [p for query, p in cache.most[token].items() if query > cache.newest - self.window] for token in text
        }
        now = {token: sum(given) / len(given) for token, given in asked.items()}
        most = max(now.values())
        found = {token: max(self.decay * self.scores.get(token, 0.0), now[token] / most) for token in text}
        alike = {token: math.exp(x) for token, x in likeness(cache, cache.kept).items() if token in text}
        worst = max(alike.values())
        gone = lowest(cache, text, lambda token: self.mix * found[token] - (1 - self.mix) * alike[token] / worst)
        self.scores = {token: score for token, score in found.items() if token not in gone}
        return gone


def paged_eviction(cache: Cache, page: int = 4) -> list[int]:
    """By the mean ratio of value to key in a token's page, as soon as a page is too much."""
    ratio = {token: length(cache.v[token]) / length(cache.k[token]) for token in cache.kept}
    pages = by_page(cache, page)

    def score(token: int) -> float:
        return sum(ratio[other] for other in pages[token]) / len(pages[token])

    return buffered(page, lambda one: lowest(one, one.kept[:-page], score))(cache)


def importance(token: int) -> float:
    """What a caller says of a token, of whatever it likes."""
    return math.sin(7 * token * token + 1)


def least_important(window: int = 0) -> Leaves:
    return lambda cache: lowest(cache, cache.kept[: len(cache.kept) - window], importance)


def below(threshold: float, window: int) -> Leaves:
    """What is less important than a threshold, once a window has passed."""

    def leaves(cache: Cache) -> list[int]:
        gone = [token for token in cache.kept[: max(0, len(cache.kept) - window)] if importance(token) < threshold]
        return sorted(gone, key=lambda token: (importance(token), token))

    return leaves


def compression_ratio_decoding(cache: Cache, ratio: float = 0.3, interval: int = 4) -> list[int]:
    """Every fourth generated token, down to a share of all tokens so far, by the longest keys."""
    generated = cache.newest + 1 - cache.method.prompt
    if generated == 0 or generated % interval:
        return []
    target = max(1, int((cache.newest + 1) * (1 - ratio)))
    return sorted(cache.kept, key=lambda token: (-length(cache.k[token]), token))[: max(0, len(cache.kept) - target)]


def simlayerkv(cache: Cache, threshold: float, asked: int = 2, recent: int = 4, sinks: int = 2) -> list[int]:
    """Sinks and the recent stay where the last queries give these, themselves left out, more than a threshold on average."""
    text, queries = cache.kept[:-asked], cache.kept[-asked:]
    near = {*text[:sinks], *text[-recent:]}
    lazy = sum(cache.rows[token][query] for token in near for query in queries) / asked > threshold
    return cache.kept[sinks : -(recent - asked)] if lazy else []


def in_four_bits(key: np.ndarray) -> np.ndarray:
    """Rounded to sixteen levels from the smallest dim to the largest."""
    low, high = float(key.min()), float(key.max())
    scale = max(high - low, 1e-9) / 15
    return np.clip(np.round((key - low) / scale), 0, 15) * scale + low


def twilight(cache: Cache, token: int, share: float = 0.6, tokens: int = 20) -> list[int]:
    """Of the highest true scores the fewest that come to a share of the softmax of estimated ones; as many as heads need on average."""
    root, probs, needed = math.sqrt(cache.k.shape[1]), [], []
    for query in cache.q[token]:
        asked = sorted(cache.kept, key=lambda one, query=query: -float(query @ cache.k[one]))[:tokens]
        told = {one: math.exp(float(query @ in_four_bits(cache.k[one])) / root) for one in asked}
        own = {one: told.get(one, 0.0) / sum(told.values()) for one in cache.kept}
        reached, count = 0.0, 0
        for p in sorted(own.values(), reverse=True):
            if reached >= share:
                break
            reached, count = reached + p, count + 1
        probs.append(own)
        needed.append(count)
    mean = {one: sum(own[one] for own in probs) / len(probs) for one in cache.kept}
    return sorted(sorted(cache.kept, key=lambda one: -mean[one])[: sum(needed) // len(needed)])


def quest_code(cache: Cache, token: int, tokens: int = 70) -> list[int]:
    """Pages of 16 by the largest dot product that their keys' bounds allow, at least 3; the newest competes."""
    pages = {page: [slot for slot in cache.kept if slot // 16 == page] for page in range(token // 16 + 1)}

    def bound(page: int) -> float:
        low, high = cache.k[pages[page]].min(axis=0), cache.k[pages[page]].max(axis=0)
        return float(sum(np.maximum(query * low, query * high).sum() for query in cache.q[token]))

    count = max(3, min(token + 1, tokens) // 16)
    return sorted(slot for page in sorted(pages, key=bound, reverse=True)[:count] for slot in pages[page])


def dbudgetkv(cache: Cache, loss: float = 0.3, sinks: int = 2) -> list[int]:
    """The oldest leave, but the first two, while the matrix of what is left has 1 - loss of its Frobenius norm."""

    def norm(tokens: list[int]) -> float:
        return math.sqrt(sum(p * p for token in tokens for p in cache.rows[token].values()))

    left = list(cache.kept)
    while True:
        rest = left[:sinks] + left[sinks + 1 :]
        if norm(rest) < (1 - loss) * norm(cache.kept):
            break
        left = rest
    return [token for token in cache.kept if token not in left]


def fastgen(cache: Cache, recovered: float = 0.8) -> list[int]:
    """The first of the hybrids that gets enough attention; `importance` says which tokens are special, and none is punctuation else."""
    share = int(0.3 * len(cache.kept))
    often = sorted(cache.kept, key=lambda token: (cache.total(token), token))[-share:]
    special = {token for token in cache.kept if importance(token) > 0}
    hybrids = [special, special | {*often}, special | {*often, *cache.kept[-share:]}, {*cache.kept}]
    everything = sum(map(cache.total, cache.kept))
    chosen = next(one for one in hybrids if sum(map(cache.total, one)) >= recovered * everything)
    gone = [token for token in cache.kept if token not in chosen]
    return sorted(gone, key=lambda token: (token in often, token in cache.kept[-share:], token))


def arkvale(cache: Cache, token: int) -> list[int]:
    """Four pages of 32, of one KV head."""
    return mean_boxes([cache], token)


def mean_boxes(heads: list[Cache], token: int) -> list[int]:
    """Four pages of 32, the first and the newest two among them, by the corner of their mean box along the query, of all query heads."""
    kept = heads[0].kept
    newest = kept[-1] // 32
    certain = {0, newest, newest - 1}

    def corner(page: int) -> float:
        found = []
        for head in heads:
            keys = head.k[[slot for slot in kept if slot // 32 == page]]
            centre = (keys.min(axis=0) + keys.max(axis=0)) / 2
            radius = np.abs(keys - centre).sum(axis=0) / len(keys)
            found += [np.maximum(q * (centre - radius), q * (centre + radius)).sum() for q in head.q[token]]
        return float(np.mean(found))

    others = sorted({slot // 32 for slot in kept} - certain, key=corner, reverse=True)
    chosen = certain | {*others[: 4 - len(certain)]}
    return [slot for slot in kept if slot // 32 in chosen]


def best(cache: Cache, token: int) -> list[int]:
    """Six, the newest among them, by their true scores."""
    cache.sketch = list(range(cache.k.shape[1]))
    return by_sketch(cache, token, 6, [token])


def voted(cache: Cache, token: int) -> list[int]:
    """Six, two sinks and the two most recent among them, by the softmaxes of all query heads."""
    return most_votes([cache], token)


def most_votes(heads: list[Cache], token: int) -> list[int]:
    """`voted`, of several KV heads."""
    kept = heads[0].kept
    votes = dict.fromkeys(kept, 0.0)
    for head in heads:
        for query in head.q[token]:
            weights = {one: math.exp(float(query @ head.k[one]) / math.sqrt(len(query))) for one in kept}
            for one, weight in weights.items():
                votes[one] += weight / sum(weights.values())
    always = kept[:2] + kept[-2:]
    others = sorted((one for one in kept if one not in always), key=lambda one: votes[one])
    return sorted(always + others[len(others) - 2 :])


def largest_dims(cache: Cache, token: int, dims: int = 2) -> list[int]:
    """The largest |q|, the group's mean."""
    size = np.abs(cache.q[token]).sum(axis=0)
    return sorted(sorted(range(len(size)), key=lambda dim: (-size[dim], dim))[:dims])


CHANNELS = np.array([0.0, 1, 0, 0, 1, 1])


def double_sparsity(cache: Cache, token: int) -> list[int]:
    cache.sketch = np.flatnonzero(CHANNELS).tolist()
    return by_sketch(cache, token, 6, [])


BASIS = np.array([[0.6, 0.0], [0.0, 0.8], [-0.8, 0.0], [0.0, 0.0], [0.0, -0.6], [0.0, 0.0]])
CENTRES = np.random.default_rng(5).normal(size=(2, 6))
ROOTS = np.random.default_rng(6).normal(size=(2, 6, 4))
EXCESSES = np.random.default_rng(7).uniform(size=(2, 3))
"""Of two query heads: the mean of the queries, a root of their covariance, and by how much pairs are longer than their mean."""
SKETCH = np.random.default_rng(4).normal(size=(6, 4)) / 2


def magicpig(cache: Cache, token: int, bits: int = 2, tables: int = 5, sinks: int = 2, recent: int = 3) -> list[int]:
    """Lots for what stands between sinks and the prompt's last tokens: as probable as two equal hashes or more, and weighed by that."""
    between = list(range(sinks, cache.method.prompt - recent))
    centre, (query,) = np.mean(cache.k[between], axis=0), cache.q[token]
    cache.weights = {}
    for one in between:
        centred = cache.k[one] - centre
        angle = math.acos(float(query @ centred) / (length(query) * length(centred)))
        equal = (1 - angle / math.pi) ** bits
        fewer = [math.comb(tables, hits) * equal**hits * (1 - equal) ** (tables - hits) for hits in (0, 1)]
        cache.weights[one] = 1 / (1 - sum(fewer) + 1e-4)
    lots = {one: draw(0, cache.method.layer, 0, one, token) for one in between}
    return [one for one in cache.kept if one not in lots or lots[one] < 1 / cache.weights[one] - 1e-4]


def loki(cache: Cache, token: int) -> list[int]:
    """A third of the text, by what is left of keys and queries in two dims."""

    def match(slot: int) -> float:
        return float(sum((query @ BASIS) @ (cache.k[slot] @ BASIS) for query in cache.q[token]))

    return sorted(sorted(cache.kept, key=match, reverse=True)[: max(1, (token + 1) // 3)])


def double_sparsity_prompt(cache: Cache, token: int) -> list[int]:
    if token == cache.method.prompt - 1:
        cache.sketch = largest_dims(cache, token)
    return by_sketch(cache, token, 6, [])


def sparq(cache: Cache, token: int) -> list[int]:
    """The best six and the newest token, among them two recent ones besides it."""
    cache.sketch = largest_dims(cache, token)
    return by_sketch(cache, token, 7, cache.kept[-3:])


def headkv(cache: Cache, window: int = 4) -> list[int]:
    """The largest of seven neighbours before the window, by what the window's queries gave."""
    text = cache.kept[:-window]

    def score(token: int) -> float:
        place = text.index(token)
        return max(recent_total(cache, one, window) for one in text[max(0, place - 3) : place + 4])

    return lowest(cache, text, score)


FILTER = np.array([0.5, -1.0, 2.0, 0.0, 0.25, -0.5])


def q_filters(cache: Cache) -> list[int]:
    return lowest(cache, cache.kept[:-1], lambda token: float(FILTER @ cache.k[token]))


def streaming_head(cache: Cache, sinks: int = 2) -> list[int]:
    return cache.kept[sinks:][: cache.excess]


def given(**params: float) -> dict[str, float]:
    return {"budget": 8, **params}


METHODS: dict[str, Method] = {
    "layer_budgets": Method(brute.snapkv, 36, {"budget": 30}, prompt=50, tokens=54, tensors={"share": np.array([1.2])}),
    "token_select": Method(full, math.inf, {"tokens": 6, "sinks": 2, "recent": 2}, chosen=voted),
    "moba": Method(full, math.inf, {"page": 8, "chosen": 3}, prompt=30, tokens=50, chosen=mean_keys(8, 3)),
    "infllm": Method(
        full,
        math.inf,
        {"block": 8, "blocks": 2, "sinks": 8, "recent": 8},
        prompt=50,
        tokens=70,
        chosen=mean_keys(8, 4, 8, 8),
    ),
    "shadowkv": Method(full, math.inf, {"chunk": 4, "tokens": 16}, prompt=30, tokens=50, chosen=mean_keys(4, 4, 0, 4)),
    "keydiff": Method(keydiff),
    "observed_once": Method(once(observed)),
    "finch": Method(once(finch), given=given(question=3), frequencies=FREQUENCIES),
    "morphkv": Method(morphkv, given=given(recent=3)),
    "caote": Method(caote),
    "sage_kv": Method(once(sage_kv), given=given(sinks=2, recent=2)),
    "a2sf": Method(a2sf, given=given(forget=0.7)),
    "nacl": Method(once(nacl), given=given(proxies=3, drawn=2), prompt=16),
    "knorm_decoding": Method(decoding, given=given(interval=3)),
    "key_rerotation": Method(once(shortest), frequencies=FREQUENCIES),
    "h2o_once": Method(once(h2o), given=given(window=4)),
    "knorm_once": Method(once(shortest)),
    "tova_once": Method(once(last_query)),
    "streaming_llm_once": Method(once(sinks_and_recent)),
    "random_once": Method(once(at_random)),
    "snapkv_kvpress": Method(once(snapkv), given=given(window=4), prompt=20),
    "expected_attention": Method(once(expected_attention), given=given(sinks=2, horizon=3), rotary=FREQUENCIES),
    "expected_attention_stats": Method(
        once(expected_by_moments),
        given=given(sinks=2, horizon=3),
        rotary=FREQUENCIES,
        tensors={"centre": CENTRES[None, None], "root": ROOTS[None, None]},
    ),
    "triattention": Method(
        triattention,
        16,
        given(budget=16, interval=3),
        rotary=FREQUENCIES,
        tensors={"centre": CENTRES[None, None], "excess": np.tile(EXCESSES, 2)[None, None]},
    ),
    "leverage_score": Method(once(leverage_score), prompt=16, rotary=FREQUENCIES, tensors={"sketch": SKETCH[None, None]}),
    "capkv": Method(once(capkv), given=given(sinks=2, horizon=3), rotary=FREQUENCIES),
    "non_causal": Method(once(non_causal), given=given(chunk=4), rotary=FREQUENCIES),
    "cur": Method(once(cur), 12, given=given(budget=12, sinks=2, block=4), prompt=30),
    "chunkkv": Method(once(chunkkv), given=given(chunk=5, window=3), prompt=20),
    "lagkv": Method(once(lagkv), 14, {"budget": 14, "sinks": 2, "lag": 4}, prompt=23),
    "knorm_chunks": Method(once(knorm_chunks), 11, {"kept": 0.5, "chunk": 5}, prompt=23),
    "knorm_then_keydiff": Method(once(knorm_then_keydiff), 7, {"first": 0.6, "second": 0.5}, prompt=24),
    "criticalkv": Method(once(criticalkv), given=given(window=2), prompt=16),
    "defensivekv": Method(once(defensivekv), given=given(window=3), prompt=20),
    "random_attention": Method(random_attention, 9, {"budget": 9, "recent": 2}, prompt=5),
    "protection": Method(protection, 10, {"budget": 10, "ends": 0.2}),
    "snapstream": Method(snapstream, 9, {"budget": 9, "sinks": 2, "recent": 3, "window": 2}, prompt=20),
    "taskpress": Method(once(taskpress), given=given(guide=3, outliers=2), prompt=20),
    "prefill_decoding": Method(prefill_decoding, given=given(target=5, window=3, interval=3)),
    "rkv": Method(rkv, given=given(window=3, mix=0.4, buffer=4), tokens=60),
    "keyformer": Method(keyformer, given=given(recent=3, generated=3)),
    "lazy_eviction": Method(lazy_eviction, 9, {"budget": 9, "window": 3, "alpha": ALPHA}),
    "raas": Method(raas, 18, {"generated": 6, "alpha": ALPHA, "page": 2}),
    "scope": Method(scope, given={"text": 5, "generated": 4, "window": 2}),
    "pyramid_infer": Method(pyramid_infer, 8, {"least": 0.5, "recent": 4}, prompt=12, layer=2, layers=4),
    "vase": Method(vase, given=given(large=2, window=3)),
    "buzz": Method(buzz, given=given(sinks=4, recent=2, cell=3)),
    "lacache": Method(
        lacache, 12, given(budget=12, sinks=2, rung=4, drop=3), prompt=20, tokens=80, layer=2, frequencies=FREQUENCIES
    ),
    "gkv": Method(GKV(), given=given(window=2, decay=0.8, buffer=2, mix=0.6)),
    "kvzap": Method(least_important(3), given=given(window=3)),
    "kvzap_once": Method(once(least_important())),
    "kvzap_threshold": Method(below(-0.2, 3), given={"threshold": -0.2, "window": 3}),
    "dms": Method(below(0.3, 4), given={"threshold": 0.3, "window": 4}),
    "compression_ratio_decoding": Method(compression_ratio_decoding, given={"ratio": 0.3, "interval": 4}),
    "simlayerkv": Method(
        once(lambda cache: simlayerkv(cache, 0.3)),
        given={"threshold": 0.3, "asked": 2, "recent": 4, "sinks": 2},
        prompt=16,
    ),
    "quest_code": Method(full, math.inf, {"tokens": 70}, prompt=40, tokens=140, layer=2, chosen=quest_code),
    "twilight": Method(full, math.inf, {"share": 0.6, "tokens": 20}, layer=2, chosen=twilight),
    "dbudgetkv": Method(once(dbudgetkv), given={"loss": 0.3, "sinks": 2}, prompt=20),
    "fastgen": Method(once(fastgen), given={"recovered": 0.8, "share": 0.3}, prompt=20),
    "kvpop": Method(least_important(3), given=given(window=3)),
    "arkvale": Method(full, math.inf, {"tokens": 128}, prompt=190, tokens=230, layer=2, chosen=arkvale),
    "oracle_topk": Method(full, math.inf, {"tokens": 6}, chosen=best),
    "double_sparsity": Method(
        full, math.inf, {"tokens": 6}, chosen=double_sparsity, tensors={"channels": CHANNELS[None, None]}
    ),
    "loki": Method(full, math.inf, {"share": 1 / 3}, chosen=loki, tensors={"basis": BASIS[None, None]}),
    "magicpig": Method(full, math.inf, {"bits": 2, "tables": 5, "sinks": 2, "recent": 3}, prompt=30, chosen=magicpig),
    "double_sparsity_prompt": Method(full, math.inf, {"tokens": 6, "dims": 2}, chosen=double_sparsity_prompt),
    "lu_kv": Method(once(lu_kv), 15, {"sinks": 3, "window": 2}, prompt=20, tensors={"kept": np.array([[0.75]])}),
    "kvp": Method(least_important()),
    "criticalkv_projected": Method(once(criticalkv_projected), given=given(window=2), prompt=16),
    "lkv": Method(once(least_important()), 15, {}, prompt=20, tensors={"kept": np.array([[0.75]])}),
    "lookahead_kv": Method(once(least_important())),
    "sparq": Method(full, math.inf, {"tokens": 6, "dims": 2, "recent": 2}, chosen=sparq),
    "q_filters": Method(q_filters, tensors={"filter": FILTER[None, None]}),
    "duo_attention": Method(
        streaming_head, given={"share": 0.5, "sinks": 2, "recent": 6}, tensors={"retrieval": np.array([[0.5]])}
    ),
    "moa": Method(
        streaming_head, given={"sinks": 2}, prompt=16, tensors={"start": np.array([[2.5]]), "growth": np.array([[0.25]])}
    ),
    "headkv": Method(
        once(headkv), 9, {"average": 10, "pool": 0.5, "window": 4}, prompt=20, tensors={"importance": np.array([[0.7]])}
    ),
    "paged_eviction": Method(paged_eviction, 12, given=given(budget=12, page=4), prompt=20),
}
"""The gallery's policies by stem, with the numbers that the test gives them."""

IN_BLOCKS: dict[str, Method] = {
    "keydiff_blocks": Method(keydiff, given=given(block=4), prompt=24, tokens=24),
    "locret": Method(least_important(2), given=given(chunk=4, stabilizers=2), prompt=24, tokens=24),
}
"""Those that evict while a prompt is read, after every fourth token."""

TOGETHER = ("compactor",)
"""Those whose KV heads are measured by each other, which `test_formulas.py` runs together."""
