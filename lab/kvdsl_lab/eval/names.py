"""Policies and budgets as options name them. Nothing here needs torch."""

from __future__ import annotations

from kvdsl.budget import as_written, tokens_or_rate
from kvdsl.errors import KvdslError
from kvdsl.shipped import separate

ASKER = "a measurement"
"""The subject of errors about policies that need values."""


def parse_budgets(text: str) -> list[float]:
    """`128,0.25,1.0` as numbers: ints are tokens, floats rates.

    Raises:
        KvdslError: if one is no budget.
    """
    found: list[float] = []
    for part in (piece.strip() for piece in text.split(",")):
        try:
            found.append(tokens_or_rate(as_written(float(part), part)))
        except (ValueError, OverflowError) as error:
            raise KvdslError(
                f"`{part}` is no budget; give numbers of tokens (128), or rates of the prompt up to 1.0 (0.25), separated by commas"
            ) from error
    return found


def parse_policies(text: str) -> list[str]:
    """`roco,h2o` as names; commas inside of brackets and braces separate nothing: `h2o,h2o with { when prefill; keep last 64 }`.

    Raises:
        KvdslError: if there is none.
    """
    names = separate(text)
    if not names:
        raise KvdslError("no policy is named; give for example `--policies full,roco,h2o`")
    return list(dict.fromkeys(names))
