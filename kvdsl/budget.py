"""What a number means that is given for `budget`: tokens, or a rate of the prompt."""

from __future__ import annotations

ALLOWED = "give a number of tokens (512), or a rate of the prompt above 0 and up to 1.0, which is all of it (0.25)"


def tokens_or_rate(value: float) -> float:
    """The budget as it is handed on: an int of tokens, or a float in (0, 1] that is a rate; 1 is a token and 1.0 the whole prompt.

    Raises:
        ValueError: if it is neither; the message goes on after the budget's name.
    """
    if isinstance(value, float) and value > 1 and not value.is_integer():
        raise ValueError(f"is {value:g}, which is neither a whole number of tokens nor a rate up to 1.0; {ALLOWED}")
    if not 0 < value < float("inf"):
        raise ValueError(f"is {value:g}; {ALLOWED}")
    return float(value) if is_rate(value) else int(value)


def is_rate(value: float | None) -> bool:
    """Whether such a budget is a rate of the prompt."""
    return isinstance(value, float) and value <= 1


def tokens_of(value: float, prompt: int) -> int:
    """How many tokens such a budget is, of a prompt of so many."""
    return max(1, int(value * prompt)) if is_rate(value) else int(value)


def spelled(value: float) -> str:
    """The budget as a user would write it: 512, 0.25, 1.0, 1234567."""
    if is_rate(value) and value == 1:
        return "1.0"
    return str(int(value)) if float(value).is_integer() else f"{value:g}"


def as_written(value: float, text: str) -> float:
    """A number as a user wrote it: an int, or a float where the text has a point or an exponent."""
    return float(value) if set(text.lower()) & set(".e") else int(value)
