"""Compare texts under several caches and what they cost, in figures and tables. Needs neither torch nor transformers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Generated:
    """What one prompt gave.

    Attributes:
        token_ms: the time of every token after the first, in order.
        cache_bytes: what the cache occupies at the end.
        full_cache_bytes: what keys and values of every token would occupy.
        evicted: whether a token has left; None of a cache that lets none go.
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    ttft_ms: float
    token_ms: tuple[float, ...]
    cache_bytes: int
    full_cache_bytes: int
    evicted: bool | None = None

    @property
    def tpot_ms(self) -> float:
        """Median time of a token after the first; NaN if there is none."""
        return quartiles(self.token_ms)[1]

    def times(self) -> dict[str, float | None]:
        """`ttft_ms`, and `tpot_ms` with its quartiles, for JSON."""
        first, median, third = (None if x != x else round(x, 4) for x in quartiles(self.token_ms))
        return {"ttft_ms": round(self.ttft_ms, 4), "tpot_ms": median, "tpot_ms_q1": first, "tpot_ms_q3": third}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return first quartile, median and third quartile of the values that are numbers; NaN if there are none."""
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return math.nan, math.nan, math.nan
    if len(known) == 1:
        return known[0], known[0], known[0]
    first, _, third = statistics.quantiles(known, n=4, method="inclusive")
    return first, statistics.median(known), third


def same_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two texts have in common from the start."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def size(count: float) -> str:
    """Bytes in words."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def summary_line(name: str, found: Generated) -> str:
    """What a text cost, in one line."""
    return (
        f"{name}: {found.prompt_tokens} prompt tokens, {len(found.tokens)} new ones; first after {found.ttft_ms:.0f} ms, then "
        f"{rate(found)} tokens a second; cache {_held(found)}"
        + (f"; {NOTHING_LEFT}" if found.evicted is False else f" (full: {size(found.full_cache_bytes)})")
    )


NOTHING_LEFT = "nothing was evicted yet, since the text is no longer than the budget"


FULL = "full cache"
"""The column that others are compared with."""


def comparison(found: Mapping[str, Generated]) -> list[Any]:
    """The texts side by side, a column for every cache, then what they cost.

    Args:
        found: by the names of columns; one of them may be `FULL`.
    """
    return [texts({name: one.text for name, one in found.items()}), figures(found)]


def texts(columns: Mapping[str, str]) -> Any:
    """A table of texts."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1))
    for name in columns:
        table.add_column(name, ratio=1, overflow="fold")
    table.add_row(*(plain(text) for text in columns.values()))
    return table


def plain(text: str) -> Any:
    """A text in one paragraph, whatever brackets are in it."""
    from rich.text import Text

    return Text(" ".join(text.split()))


def figures(found: Mapping[str, Generated]) -> Any:
    """A table of what the caches cost and, where the full one is there, how far the texts agree with its."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", *found):
        table.add_column(column, justify="left" if not column else "right")
    full = found.get(FULL)
    table.add_row("first token, ms", *(f"{one.ttft_ms:.0f}" for one in found.values()))
    table.add_row("tokens a second after that", *(rate(one) for one in found.values()))
    table.add_row("cache at the end", *(_held(one, full) for one in found.values()))
    if full is not None:
        others = {name: one for name, one in found.items() if name != FULL}
        blank = ["" for name in found if name == FULL]
        table.add_row("first tokens in common", *blank,
                      *(f"{same_prefix(one.tokens, full.tokens)} of {len(full.tokens)}" for one in others.values()))  # fmt: skip
        table.add_row("words in common", *blank, *(f"{shared_words(one.text, full.text):.0%}" for one in others.values()))
    waiting = [name for name, one in found.items() if one.evicted is False]
    if waiting:
        table.caption = f"{', '.join(waiting)}: {NOTHING_LEFT}."
    return table


def _held(one: Generated, full: Generated | None = None) -> str:
    """What a cache occupies, and which share of the full one that is; of one that has room left, what it holds."""
    if one.evicted is False:
        return f"{size(one.full_cache_bytes)} held, room for {size(one.cache_bytes)}"
    share = "" if full is None or one is full else f" ({one.cache_bytes / full.cache_bytes:.0%})"
    return size(one.cache_bytes) + share


def shared_words(found: str, wanted: str) -> float:
    """Share of words, counted as often as they occur, that two texts have in common (ROUGE-1's F-measure without stemming)."""
    from collections import Counter

    a, b = Counter(found.lower().split()), Counter(wanted.lower().split())
    total = sum(a.values()) + sum(b.values())
    return 2 * sum((a & b).values()) / total if total else 1.0


def rate(found: Generated) -> str:
    """Tokens a second after the first: all of them, also where a policy evicts many at once now and then."""
    return "-" if not found.token_ms else f"{1000 * len(found.token_ms) / sum(found.token_ms):.0f}"
