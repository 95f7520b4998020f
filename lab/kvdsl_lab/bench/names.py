"""What `--policies` of `kvdsl bench` may name beside policies. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Sequence

NATIVE = "transformers"
"""The name of transformers' own growing cache, with the model's own attention."""

STATIC = "static"
"""The name of transformers' cache that has room for the whole text from the start, with the model's own attention."""

RECOMPUTE = "recompute"
"""The name of a window of `budget` tokens that is computed anew for every token, without a cache."""

SHIFT, FRESH = "shift:", "fresh:"
"""Before a policy's name: its rule with a cache that is shifted for every token, done well or as published (`kvdsl_lab.bench.shifting`)."""

KVPRESS = "kvpress:"
"""Before the name of a press: it leaves `budget` tokens of the prompt, and those that are generated stay."""


def policies_among(names: Sequence[str]) -> list[str]:
    """Whose policies are named, each once."""
    return list(dict.fromkeys(plain(name) for name in names if is_policy(name)))


def is_policy(name: str) -> bool:
    """Whether the name is a policy's, be it one that is to be shifted."""
    return name not in (NATIVE, STATIC, RECOMPUTE) and not name.startswith(KVPRESS)


def plain(name: str) -> str:
    """The policy's name, where it is to be shifted as well."""
    return name.removeprefix(SHIFT).removeprefix(FRESH)
