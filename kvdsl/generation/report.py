"""Compare texts and costs of several caches in figures and tables. Needs neither torch nor transformers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Generated:
    """The result of one prompt.

    Attributes:
        token_ms: the time of every token after the first, in order.
        cache_bytes: the cache's size at the end.
        full_cache_bytes: the size of keys and values of every token.
        evicted: whether a token was evicted; None for a cache that never evicts.
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
        """The median time per token after the first; NaN without one."""
        return quartiles(self.token_ms)[1]

    def times(self) -> dict[str, float | None]:
        """Return `ttft_ms`, and `tpot_ms` with its quartiles, for JSON."""
        first, median, third = (None if x != x else round(x, 4) for x in quartiles(self.token_ms))
        return {"ttft_ms": round(self.ttft_ms, 4), "tpot_ms": median, "tpot_ms_q1": first, "tpot_ms_q3": third}


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return first quartile, median and third quartile of the values other than NaN; NaN without any."""
    known = sorted(value for value in values if not math.isnan(value))
    if not known:
        return math.nan, math.nan, math.nan
    if len(known) == 1:
        return known[0], known[0], known[0]
    first, _, third = statistics.quantiles(known, n=4, method="inclusive")
    return first, statistics.median(known), third


def same_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Count the tokens that two texts share from the start."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def size(count: float) -> str:
    """Print a number of bytes."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


def summary_line(name: str, found: Generated) -> str:
    """Summarize a text's costs in one line."""
    return (
        f"{name}: {found.prompt_tokens} prompt tokens, {len(found.tokens)} new ones; first after {found.ttft_ms:.0f} ms, then "
        f"{rate(found)} tokens a second; cache {_held(found)}"
        + (f"; {NOTHING_LEFT}" if found.evicted is False else f" (full: {size(found.full_cache_bytes)})")
    )


NOTHING_LEFT = "nothing was evicted, because the text is not longer than the budget"


FULL = "full cache"
"""The column to compare others with."""


def comparison(found: Mapping[str, Generated]) -> list[Any]:
    """Return tables of the texts, with a column per cache, and of their costs.

    Args:
        found: by column name; one may be `FULL`.
    """
    return [texts({name: one.text for name, one in found.items()}), figures(found)]


def texts(columns: Mapping[str, str]) -> Any:
    """Return a table of texts."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1))
    for name in columns:
        table.add_column(name, ratio=1, overflow="fold")
    table.add_row(*(plain(text) for text in columns.values()))
    return table


def plain(text: str) -> Any:
    """Print a text as one paragraph, escaping brackets."""
    from rich.text import Text

    return Text(" ".join(text.split()))


def figures(found: Mapping[str, Generated]) -> Any:
    """Return a table of the caches' costs and, with a full cache, of the texts' agreement with its text."""
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
    """Print a cache's size, and its ratio to the full one; for a cache with room left, what it holds."""
    if one.evicted is False:
        return f"{size(one.full_cache_bytes)} held, room for {size(one.cache_bytes)}"
    share = "" if full is None or one is full else f" ({one.cache_bytes / full.cache_bytes:.0%})"
    return size(one.cache_bytes) + share


def shared_words(found: str, wanted: str) -> float:
    """Return the ratio of words, counted with repetition, that two texts share (ROUGE-1's F-measure without stemming)."""
    from collections import Counter

    a, b = Counter(found.lower().split()), Counter(wanted.lower().split())
    total = sum(a.values()) + sum(b.values())
    return 2 * sum((a & b).values()) / total if total else 1.0


def rate(found: Generated) -> str:
    """Return tokens per second after the first, over all of them, because a policy may evict many at once."""
    return "-" if not found.token_ms else f"{1000 * len(found.token_ms) / sum(found.token_ms):.0f}"
