"""Write a text that tells two policies apart as a test in the language, which one passes and the other fails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from kvdsl.ir.printer import print_number
from kvdsl.scenarios.witness import Kept, Witness


def passing(found: Witness) -> int:
    """Return which policy passes: the first, unless a test cannot expect its selection."""
    return int(found.what == "selected" and found.policies[0].select is None)


def as_test(found: Witness, names: tuple[str, str]) -> str:
    """Return the test.

    Args:
        names: the names under which the policies are compared; their files may use the same name.
    """
    steps = (f"  {line}" for line in _steps(found, names[1 - passing(found)]))
    return "\n".join(['test "a text that tells two policies apart" {', *steps, "}"])


def _steps(found: Witness, other: str) -> Iterator[str]:
    which = passing(found)
    policy, mine, theirs = found.policies[which], found.found[which], found.found[1 - which]
    yield f"use {policy.name}"
    if found.layers > 1:
        yield from (f"set layer = {found.layer}", f"set layers = {found.layers}")
    own = {param.name for param in policy.params}
    yield from (f"set {name} = {value}" for name, value in found.settings.items() if name in own)
    yield "prompt {"
    yield from (f"  {_token(found, token)}" for token in range(found.text.prompt))
    yield "}"
    yield from (_token(found, token) for token in range(found.text.prompt, found.tokens))
    yield f"expect {found.what} {_places(mine)}  # {other}: {_places(theirs)}"


def _token(found: Witness, token: int) -> str:
    """Write a token, such as `attend 0.5, 0.5 value 1, 0` or `token query 1, 0 key 0, 1`."""
    words = [f"attend {_heads(_row(row) for row in found.rows[token])}"] if found.rows else ["token"]
    for name in found.vectors:
        vectors = getattr(found.text, name)[:, token]
        rows = (" and ".join(map(_row, head)) if name == "query" else _row(head) for head in vectors)
        words.append(f"{name} {_heads(rows)}")
    for given in found.policies[passing(found)].given:
        if given.name not in found.text.given:
            continue
        words.append(f"{given.name} {_heads(_row([value]) for value in found.text.given[given.name][:, token])}")
    return " ".join(words)


def _heads(rows: Iterable[str]) -> str:
    return " / ".join(rows)


def _row(values: Iterable[float]) -> str:
    return ", ".join(print_number(float(value)) for value in values)


def _places(kept: Kept) -> str:
    return " / ".join(", ".join(_runs(head)) or "nothing" for head in kept)


def _runs(positions: Iterable[int]) -> Iterator[str]:
    """Yield positions, consecutive ones as a range: `0`, `4..9`."""
    for _, run in groupby(enumerate(positions), lambda pair: pair[1] - pair[0]):
        first, *more = (position for _, position in run)
        yield f"{first}..{more[-1]}" if len(more) > 1 else ", ".join(map(str, (first, *more)))
