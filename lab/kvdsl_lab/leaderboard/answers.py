"""Reading the answer out of what a model wrote for a problem of arithmetic or mathematics, and comparing it with the right one.

Both sides are read by the same rules, so that `\\frac{1}{2}`, `1/2`, `0.5` and `$\\dfrac12$` are one answer. What is no number is compared
as text, without what LaTeX has for looks alone.
"""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?"


def written(text: str) -> str | None:
    """Return the final answer of a text, None if there is none.

    In this order: the last `\\boxed{...}`; what follows the last `####`; the first number behind the last "answer is" or "answer:";
    the last number. A box that never closes is no box: the text was cut off in it.
    """
    box = _boxed(text)
    if box is not None:
        return box
    marked = re.findall(r"####\s*(\S[^\n]*)", text)
    if marked:
        return str(marked[-1]).strip()
    said = re.split(r"answer\s*(?:is|:)", text, flags=re.IGNORECASE)
    if len(said) > 1:
        numbers = _numbers(said[-1])
        if numbers:
            return numbers[0]
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def right(found: str | None, wanted: str) -> bool:
    """Whether an answer that was read is the wanted one."""
    if found is None:
        return False
    one, other = _plain(found), _plain(wanted)
    if one == other:
        return True
    left, right = _value(one), _value(other)
    return left is not None and left == right


def _boxed(text: str) -> str | None:
    """What the last box holds that closes, its own braces included."""
    for opening in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth = 1
        for at in range(opening.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if depth == 0:
                return text[opening.end() : at].strip()
    return None


def _numbers(text: str) -> list[str]:
    """The numbers of a text, fractions included; a full stop behind one is the sentence's."""
    found = re.findall(rf"{_NUMBER}(?:\s*/\s*\d+)?", text)
    return [number for number in found if re.search(r"\d", number)]


_LOOKS = (
    (r"\{,\}", ","),
    (r"\\(?:left|right|displaystyle|,|!|;|:|quad|qquad)(?![a-zA-Z])", ""),
    (r"\\[dt]frac", r"\\frac"),
    (r"\^\s*\{?\s*\\circ\s*\}?|\\degree|°", ""),
    (r"\\%|%", ""),
    (r"\\\$|\$", ""),
    (r"(?<=[\d}])\s*\\(?:text|mbox|mathrm)\s*\{\s*[a-zA-Z ]+\}(?:\^\{?[23]\}?)?\s*$", ""),
    (r"(?<=\d)\s+[a-zA-Z]{2,}(?:\^\{?[23]\}?)?\s*$", ""),
    (r"\\(?:text|mbox|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
    (r"\s+", ""),
)
"""What is taken off or spelled alike, in this order; a unit goes where a number stands before it."""


def _plain(answer: str) -> str:
    """An answer without what it has for looks alone; `x = 5` is 5."""
    for pattern, spelled in _LOOKS:
        answer = re.sub(pattern, spelled, answer)
    answer = answer.strip().rstrip(".").lower()
    named = re.fullmatch(r"[a-z]\s*=(.+)", answer)
    return named[1] if named else answer


def _value(plain: str) -> Fraction | None:
    """The number that a plain answer is; None if it is none."""
    fraction = re.fullmatch(r"([-+]?)\\frac\{([-+]?\d+)\}\{([-+]?\d+)\}", plain)
    if fraction is None:
        fraction = re.fullmatch(r"([-+]?)(\d+)/(\d+)", plain)
    if fraction is not None:
        sign, over, under = fraction.groups()
        return None if int(under) == 0 else Fraction(int(over), int(under)) * (-1 if sign == "-" else 1)
    number = re.fullmatch(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+))", plain)
    return None if number is None else Fraction(number[1].rstrip("."))
