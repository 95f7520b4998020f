"""The gallery's methods whose layers share a budget, by brute force: who leaves which layer and head, by each paper's formula.

Nothing in here knows the language or the interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.gallery.formulas import asked, mean_asked
from tests.interp.brute import Cache

Heads = Sequence[Sequence[Cache]]
"""By layer and head."""

Stays = list[list[list[int]]]
"""Which tokens, by layer and head."""

Ask = Callable[[int, int, int], float]
"""What the caller gives of a layer's head's token."""


@dataclass(frozen=True)
class Layered:
    """A method with the numbers that a test gives it; `stays` has the caller's numbers as well."""

    stays: Callable[[Heads, int, Ask], Stays]
    budget: int = 8
    given: dict[str, float] = field(default_factory=dict)
    prompt: int = 20
    layers: int = 3
    heads: int = 2


def importance(layer: int, head: int, token: int) -> float:
    """Between 0 and 1, none twice; large in one layer and small in another."""
    return (((token * 7 + head * 3 + 1) * 37 + layer) % 101 / 101) ** (1 + 2 * layer)


def best(tokens: Sequence[int], score: Callable[[int], float], count: int) -> list[int]:
    """The `count` tokens with the highest score."""
    return sorted(sorted(tokens, key=score)[len(tokens) - count :])


def shares(weights: Sequence[float], tokens: float) -> list[int]:
    """Of so many tokens, in proportion to the weights, whole ones."""
    return [math.floor(tokens * weight / sum(weights)) for weight in weights]


def cake(layers: Heads, budget: int, ask: Ask, window: int = 3, gamma: float = 20, tau: float = 2) -> Stays:
    """P = H ** (1 / tau) * V ** (1 / tau) of the window's attention to what is before it; every layer has the window besides."""

    def weight(heads: Sequence[Cache]) -> float:
        past = [(head, token) for head in heads for token in head.kept[:-window]]
        entropy = -sum(p * math.log(p) for head, token in past for p in asked(head, token, window))
        shift = sum(float(np.var(asked(head, token, window))) for head, token in past)
        return float(entropy ** (1 / tau) * shift ** (1 / tau))

    def score(head: Cache, token: int) -> float:
        return mean_asked(head, token, window) + gamma * float(np.var(asked(head, token, window)))

    parts = shares([weight(heads) for heads in layers], len(layers) * (budget - window))
    return [
        [
            best(head.kept[:-window], lambda token, head=head: score(head, token), part) + head.kept[-window:]
            for head in heads
        ]
        for heads, part in zip(layers, parts, strict=True)
    ]


def lava(layers: Heads, budget: int, ask: Ask, window: int = 3) -> Stays:
    """Losses compared between a layer's heads; a layer's part by their entropy."""

    def losses(heads: Sequence[Cache]) -> dict[tuple[int, int], float]:
        largest = [max(head.norm(token) for token in head.kept[:-window]) for head in heads]
        return {
            (index, token): mean_asked(head, token, window) * largest[index]
            for index, head in enumerate(heads)
            for token in head.kept[:-window]
        }

    def entropy(found: dict[tuple[int, int], float]) -> float:
        total = sum(found.values())
        return -sum(x / total * math.log(x / total) for x in found.values())

    of_layers = [losses(heads) for heads in layers]
    parts = shares([entropy(found) for found in of_layers], len(layers) * (budget - window))
    made = []
    for heads, found, part in zip(layers, of_layers, parts, strict=True):
        stays = sorted(found, key=found.__getitem__)[len(found) - part * len(heads) :]
        made.append([sorted(t for h, t in stays if h == index) + head.kept[-window:] for index, head in enumerate(heads)])
    return made


def zigzagkv(layers: Heads, budget: int, ask: Ask, window: int = 3, recovered: float = 0.9, own: float = 0.5) -> Stays:
    """B_l = own * B + (1 - own) * B * L * M_l / sum(M): M_l tokens come to 90 % of the window's attention, by the heads' mean."""

    def minimum(head: Cache) -> int:
        masses = sorted((mean_asked(head, token, window) for token in head.kept), reverse=True)
        return next(n for n in range(1, len(masses) + 1) if sum(masses[:n]) >= recovered * sum(masses))

    needs = [sum(minimum(head) for head in heads) / len(heads) for heads in layers]
    parts = [max(own * budget, window) + part for part in shares(needs, len(layers) * (budget - max(own * budget, window)))]
    return [
        [
            best(head.kept[:-window], lambda token, head=head: mean_asked(head, token, window), round(part) - window)
            + head.kept[-window:]
            for head in heads
        ]
        for heads, part in zip(layers, parts, strict=True)
    ]


def one_pool(sinks: int, window: Callable[[int], int]) -> Callable[[Heads, int, Ask], Stays]:
    """The most important of all layers and heads; sinks and window have the highest importance there is."""

    def stays(layers: Heads, budget: int, ask: Ask) -> Stays:
        every = [(layer, h, t) for layer, heads in enumerate(layers) for h, head in enumerate(heads) for t in head.kept]
        length = len(layers[0][0].kept)

        def worth(place: tuple[int, int, int]) -> float:
            return 1.0 if place[2] < sinks or place[2] >= length - window(length) else ask(*place)

        chosen = sorted(every, key=worth)[len(every) - budget * len(layers) * len(layers[0]) :]
        return [
            [sorted(t for one, other, t in chosen if (one, other) == (layer, h)) for h in range(len(heads))]
            for layer, heads in enumerate(layers)
        ]

    return stays


def criticaladakv(layers: Heads, budget: int, ask: Ask, window: int = 2) -> Stays:
    """Shares by the layer's highest pooled attention, a fifth each head's own; half of a share by that, half by that times what is told."""
    return [_critical(index, heads, budget, ask, window) for index, heads in enumerate(layers)]


def _critical(layer: int, heads: Sequence[Cache], budget: int, ask: Ask, window: int) -> list[list[int]]:
    asks, owns = [], []
    for head in heads:
        text = head.kept[:-window]
        padded = [0.0] * 2 + [mean_asked(head, token, window) for token in text] + [0.0] * 2
        pooled = {token: sum(padded[place : place + 5]) / 5 for place, token in enumerate(text)}
        asks.append(pooled | dict.fromkeys(head.kept[-window:], 2.0))
        owns.append(sorted(head.kept, key=lambda token, own=asks[-1]: (-own[token], -token))[: max(budget // 5, 1)])
    everyone = [
        (3.0 if token in owns[index] else asks[index][token], token, index)
        for index in range(len(heads))
        for token in asks[index]
    ]
    best = sorted(everyone, reverse=True)[: budget * len(heads)]
    kept = []
    for index, head in enumerate(heads):
        share = sum(1 for *_, owner in best if owner == index)
        order = sorted(head.kept, key=lambda token, own=asks[index]: (-own[token], -token))
        sure = set(owns[index]) | set(order[: share // 2])
        rest = sorted(
            (token for token in head.kept if token not in sure),
            key=lambda token, index=index: -(asks[index][token] + 1e-4) * ask(layer, index, token),
        )
        kept.append(sorted([*sure, *rest[: share - len(sure)]]))
    return kept


LAYERED: dict[str, Layered] = {
    "criticaladakv": Layered(criticaladakv, 8, {"window": 2}),
    "cake": Layered(cake, given={"window": 3, "gamma": 20, "tau1": 2, "tau2": 2}),
    "lava": Layered(lava, given={"window": 3}),
    "zigzagkv": Layered(zigzagkv, budget=10, given={"window": 3, "recovered": 0.9, "own": 0.5}),
    "kvzip": Layered(one_pool(2, lambda length: 0), given={"sinks": 2}),
    "fast_kvzip": Layered(one_pool(2, lambda length: math.floor(0.02 * length)), given={"sinks": 2}, prompt=110, budget=30),
}
"""By the policy's stem."""
