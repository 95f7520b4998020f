"""The meaning of a number given as `budget`: tokens, or a ratio of the prompt."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any, TypeGuard

from kvdsl.errors import KvdslError

ALLOWED = "use a number of tokens (512), or a ratio of the prompt above 0 and up to 1.0, which is all of it (0.25)"


def tokens_or_rate(value: float) -> float:
    """Return the budget as an int of tokens, or a float in (0, 1] as a ratio; 1 is a token and 1.0 the whole prompt.

    Raises:
        ValueError: if it is neither; the message follows the budget's name.
    """
    if value > 1 and value % 1:
        raise ValueError(f"is {value:g}, which is neither a whole number of tokens nor a ratio up to 1.0; {ALLOWED}")
    if not 0 < value < float("inf"):
        raise ValueError(f"is {value:g}; {ALLOWED}")
    return float(value) if is_rate(value) else int(value)


RATE = "use a ratio of the prompt above 0 and up to 1, which is all of it, or a number of tokens as `budget`"


def offers_ratio(params: Collection[str]) -> bool:
    """Return whether `ratio` can set the budget: the policy has a param `budget`, and none named `ratio`."""
    return "budget" in params and "ratio" not in params


def with_ratio(given: Mapping[str, Any], params: Collection[str], policy: str) -> dict[str, Any]:
    """Return params by name, with a `ratio` replaced by the budget that it means: a ratio, 1 as well as 1.0.

    Raises:
        KvdslError: if the policy has no such budget, both are given, or it is not a ratio.
    """
    rest = dict(given)
    if "ratio" in params or rest.get("ratio") is None:
        return rest if "ratio" in params else {name: value for name, value in rest.items() if name != "ratio"}
    ratio = rest.pop("ratio")
    if "budget" not in params:
        raise KvdslError(f"{policy} has no param `budget` that a `ratio` could set")
    if rest.get("budget") is not None:
        raise KvdslError(f"`budget` and `ratio` of {policy} are both given; use one of them")
    if not is_number(ratio) or not 0 < float(ratio) <= 1:
        raise KvdslError(f"`ratio` of {policy} is {ratio!r}; {RATE}")
    return {**rest, "budget": float(ratio)}


def is_rate(value: float | None) -> bool:
    """Return whether a budget is a ratio of the prompt."""
    return isinstance(value, float) and value <= 1


def tokens_of(value: float, prompt: int) -> int:
    """Return a budget in tokens, for a prompt of so many."""
    return max(1, int(value * prompt)) if is_rate(value) else int(value)


def spelled(value: float) -> str:
    """Print a budget as a user would write it: 512, 0.25, 1.0, 1234567."""
    if is_rate(value) and value == 1:
        return "1.0"
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def is_number(value: object) -> TypeGuard[Real]:
    """Return whether a value is a real number; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: object, least: int) -> TypeGuard[int]:
    """Return whether a value is an int of at least this much; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def as_written(value: float, text: str) -> float:
    """Return a number as its text means it: an int, or a float if the text has a point or an exponent."""
    return float(value) if set(text.lower()) & set(".e") else int(value)
