"""The shipped policies as cache classes, and how to make one whose budget means the same for all."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import kvdsl

EVICTING = ("random", "window", "h2o", "scissorhands", "tova", "roco", "vatp_h2o", "streaming_llm")

NAMES = ("full", *EVICTING)

OBSERVING = "h2o"
"""A policy that reads attention and evicts, where one has to do."""

_SMALLER = {"vatp_h2o": {"sinks": 2}}
"""Defaults that leave no room in a budget as small as the tests'."""


LAYOUTS = {
    "roco_stored_in_blocks": ("RocoBlocks extends RoCo", "param block = 5\n  storage blocks block"),
    "streaming_blocks": ("StreamingBlocks extends StreamingLLM", "storage blocks 5"),
    "fused": ("Fused extends EQUIP_H2O", "override rope fused"),
    "paged": ("Paged extends EQUIP_H2O", "storage blocks 4"),
}
"""Shipped policies that lie in memory, or turn keys, otherwise than they do: what is declared, and what it says."""

_FILES = {"RoCo": "roco", "StreamingLLM": "streaming_llm", "EQUIP_H2O": "equip_h2o"}


@cache
def cache_class(name: str) -> Any:
    """The cache class of a shipped policy, or of one in another layout."""
    if name not in LAYOUTS:
        return kvdsl.load(name)
    declared, lines = LAYOUTS[name]
    parent = _FILES[declared.split()[-1]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.kv"
        file.write_text(f'kv 1\nimport {parent}\n\npolicy {declared} {{\n  """In another layout."""\n  {lines}\n}}\n')
        return kvdsl.load(file)


def make(name: str, model: Any, **options: Any) -> Any:
    """A fresh cache; a policy without a budget ignores that."""
    if name == "full":
        options.pop("budget", None)
    return cache_class(name)(model, **_SMALLER.get(name, {}), **options)
