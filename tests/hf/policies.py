"""The shipped policies as cache classes, and how to make one whose budget means the same for all."""

from __future__ import annotations

from functools import cache
from typing import Any

import kvdsl

EVICTING = ("random", "window", "h2o", "scissorhands", "tova", "roco", "vatp_h2o", "streaming_llm")

NAMES = ("full", *EVICTING)

OBSERVING = "h2o"
"""A policy that reads attention and evicts, where one has to do."""

_SMALLER = {"vatp_h2o": {"sinks": 2}}
"""Defaults that leave no room in a budget as small as the tests'."""


LAYOUTS = {
    "roco_stored_in_blocks": ("roco", {"storage": "blocks:5"}),
    "streaming_blocks": ("streaming_llm", {"storage": "blocks:5"}),
    "halves": ("equip_h2o", {"rope": "cached"}),
    "paged": ("equip_h2o", {"storage": "blocks:4", "rope": "cached"}),
}
"""Shipped policies that lie in memory, or turn keys, otherwise than by default."""


@cache
def cache_class(name: str) -> Any:
    """The cache class of a shipped policy, or of one in another layout."""
    stem, memory = LAYOUTS.get(name, (name, {}))
    return kvdsl.load(stem, **memory)


def make(name: str, model: Any, **options: Any) -> Any:
    """A fresh cache; a policy without a budget ignores that."""
    if name == "full":
        options.pop("budget", None)
    return cache_class(name)(model, **_SMALLER.get(name, {}), **options)
