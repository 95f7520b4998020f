"""The texts of a record: which policies with which params, and the vectors that come in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from kvdsl.compiler import analyse, find_policy
from kvdsl.ir.nodes import Given, Policy
from kvdsl.ir.printer import print_policy
from kvdsl.passes.fold import fold
from tests.gallery.formulas import METHODS
from tests.gallery.reusing import REUSING
from tests.gallery.test_backends import SMALL

Array = NDArray[np.float64]

HEADS, GROUP, DIMS, RANK = 2, 2, 8, 3
"""KV heads of a layer, query heads of each, dims of keys and values, and the `rank` of matrices in files."""

TEXTS: dict[str, tuple[int, ...]] = {
    "48": (40, *[1] * 8),
    "96": (80, *[1] * 16),
    "176": (160, *[1] * 16),
    "chat": (40, *[1] * 6, 20, *[1] * 6),
}
"""The forwards of each: how many tokens come in together."""

SETTINGS: dict[str, dict[str, float]] = {
    "adakv": {"budget": 36},
    "cake": {"budget": 8, "window": 3, "gamma": 20, "tau1": 2, "tau2": 2},
    "equip_h2o": {"budget": 12, "recent": 4},
    "equip_streaming": {"budget": 12},
    "full": {},
    "h2o": {"budget": 12, "recent": 4},
    "h2o_answer": {"budget": 4},
    "keydiff_answer": {"budget": 4},
    "layer_budgets": {"budget": 36},
    "lazy_answer": {"budget": 4, "window": 2},
    "lazy_streaming": {"budget": 16, "R": 4, "sigma": 2, "delta": 3},
    "less_is_more": {"tokens": 7, "share": 0.3, "start": 0, "again": 2},
    "omnikv": {"share": 0.2, "first": 0, "second": 1, "third": 2},
    "per_layer": {},
    "pyramidkv": {"budget": 660},
    "quest": {"tokens": 24},
    "random_answer": {"budget": 4},
    "recent_answer": {"budget": 4},
    "rkv_answer": {"budget": 4, "buffer": 3, "window": 2},
    "roco": {"budget": 12, "protect": 5},
    "roco_easykv": {"generated": 4},
    "roco_sparcas": {"budget": 20, "protect": 8, "tokens": 6, "dims": 3},
    "scissorhands": {"budget": 12, "recent": 4},
    "scissorhands_window": {"budget": 16, "history": 9},
    "snapkv": {"budget": 36},
    "sparcas": {"tokens": 6, "dims": 3},
    "streaming_llm": {"budget": 12},
    "tidaldecode": {"tokens": 5, "start": 0, "again": 2},
    "simlayerkv": {"threshold": 0.12, "asked": 2, "recent": 16, "sinks": 2},
    "triattention": {"interval": 3},
    "vatp_code": {"budget": 34, "history": 9},
    "vatp_h2o": {"budget": 34, "recent": 6},
    "vatp_roco": {"budget": 34, "protect": 8},
    "vatp_scissorhands": {"budget": 34, "history": 9},
}
"""Params at which a policy evicts or selects in the texts, where those that its tests run it with are none or too small."""

ABOVE_PROMPT = {"random_attention": 4, "triattention": 4}
"""By how much the budget exceeds the prompt, in policies that evict of what is generated alone."""

LAYERS = {"omnikv": 4}
"""Of models in which policies run that need more than three."""


@dataclass(frozen=True)
class Subject:
    """A policy as it is recorded.

    Attributes:
        stem: its file's name.
        settings: its params.
        layers: of the model; all of them run.
        seed: of the vectors.
    """

    stem: str
    settings: Mapping[str, float]
    layers: int
    seed: int = 0

    @property
    def policy(self) -> Policy:
        """The checked policy."""
        return _policy(self.stem, tuple(self.settings.items()))

    def given(self, text: str) -> dict[str, float]:
        """What the user of the cache gives besides."""
        above = ABOVE_PROMPT.get(self.stem)
        last = max(number for number, tokens in enumerate(TEXTS[text]) if tokens > 1)
        return {} if above is None else {"budget": sum(TEXTS[text][: last + 1]) + above}


@cache
def _policy(stem: str, settings: tuple[tuple[str, float], ...]) -> Policy:
    return fold(analyse(find_policy(stem), settings={name: str(value) for name, value in settings}).policy)


def subject(stem: str, seed: int = 0) -> Subject:
    """A shipped policy to record: what tells layers apart is run through three of them, anything else through one."""
    policy = analyse(find_policy(stem)).policy
    known = METHODS | REUSING
    tests = dict(known[stem].given) if stem in known else SMALL.get(stem, {"budget": 8})
    wanted = SETTINGS.get(stem, tests)
    settings = {param.name: wanted[param.name] for param in policy.params if param.name in wanted}
    return Subject(stem, settings, LAYERS.get(stem, 3) if "layer" in print_policy(policy) else 1, seed)


@dataclass(frozen=True)
class Forward:
    """What comes in together: query [layers, heads, tokens, group, dims], key and value [layers, heads, tokens, dims], and by name what
    the caller gives, [layers, heads, tokens].
    """

    query: Array
    key: Array
    value: Array
    given: dict[str, Array]


def forwards(subject: Subject, text: str, shaken: float = 0.0) -> list[Forward]:
    """A text's forwards, of float32's numbers.

    Args:
        shaken: by how much, in proportion, every number is made larger or smaller.
    """
    draw = _Draw(subject, text, shaken)
    told = subject.policy.given
    made = []
    for number, tokens in enumerate(TEXTS[text]):
        shape = (subject.layers, HEADS, tokens)
        given = {one.name: _told(one, draw(f"{number} {one.name}", shape)) for one in told}
        vectors = (draw(f"{number} {name}", (*shape, *dims)) for name, dims in _VECTORS.items())
        made.append(Forward(*vectors, given))
    return made


def _told(given: Given, numbers: Array) -> Array:
    """What the cache is told of tokens: of spans whether they lie in them, all heads alike; it is the first turn."""
    if given.source == "turn":
        return np.zeros_like(numbers)
    return np.broadcast_to(numbers[:1, :1] > 0, numbers.shape).astype(np.float64) if given.source == "spans" else numbers


_VECTORS = {"query": (GROUP, DIMS), "key": (DIMS,), "value": (DIMS,)}


def tensors(subject: Subject) -> dict[str, Array]:
    """What the policy's files hold, by name: vectors and matrices of normal numbers, and shares between a quarter and 1."""
    draw = _Draw(subject, "files", 0.0)
    sizes = {"layers": subject.layers, "heads": HEADS, "group": GROUP, "dims": DIMS, "rank": RANK}
    return {
        tensor.name: draw(tensor.name, tuple(sizes[axis] for axis in tensor.axes), share="dims" not in tensor.axes)
        for tensor in subject.policy.tensors
    }


class _Draw:
    """Random numbers by what they are for: the same in any order, and on any machine."""

    def __init__(self, subject: Subject, text: str, shaken: float) -> None:
        self._for, self._shaken = f"{subject.seed} {text}", shaken

    def __call__(self, name: str, shape: tuple[int, ...], *, share: bool = False) -> Array:
        random = np.random.RandomState(list(hashlib.sha256(f"{self._for} {name}".encode()).digest()))
        numbers = random.uniform(0.25, 1.0, shape) if share else random.standard_normal(shape)
        rounded = numbers.astype(np.float32).astype(np.float64)
        made: Array = rounded * (1 + self._shaken * random.choice([-1.0, 1.0], shape)) if self._shaken else rounded
        return made
