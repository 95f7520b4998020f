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


@cache
def cache_class(name: str) -> Any:
    """The cache class of a shipped policy."""
    return kvdsl.load(name)


def make(name: str, model: Any, **options: Any) -> Any:
    """A fresh cache; a policy without a budget ignores that."""
    if name == "full":
        options.pop("budget", None)
    return cache_class(name)(model, **_SMALLER.get(name, {}), **options)
