"""Tables for people: a policy's text and figures beside the full cache's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvdsl.generation.generate import same_prefix

if TYPE_CHECKING:
    from kvdsl.generation.generate import Generated


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
        f"{_rate(found)} tokens a second; cache {size(found.cache_bytes)} (full: {size(found.full_cache_bytes)})"
    )


def comparison(name: str, ours: Generated, full: Generated) -> list[Any]:
    """The texts side by side, then the figures."""
    return [texts(name, ours, full), figures(name, ours, full)]


def texts(name: str, ours: Generated, full: Generated) -> Any:
    """A table of two texts."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, expand=True, padding=(0, 1))
    table.add_column("full cache", ratio=1, overflow="fold")
    table.add_column(name, ratio=1, overflow="fold")
    table.add_row(_plain(full.text), _plain(ours.text))
    return table


def _plain(text: str) -> Any:
    from rich.text import Text

    return Text(" ".join(text.split()))


def figures(name: str, ours: Generated, full: Generated) -> Any:
    """A table of what both cost, and how far the texts agree."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("", "full cache", name):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("first token, ms", f"{full.ttft_ms:.0f}", f"{ours.ttft_ms:.0f}")
    table.add_row("tokens a second after that", _rate(full), _rate(ours))
    table.add_row(
        "cache at the end", size(full.cache_bytes), f"{size(ours.cache_bytes)} ({ours.cache_bytes / full.cache_bytes:.0%})"
    )
    table.add_row("first tokens in common", "", f"{same_prefix(ours.tokens, full.tokens)} of {len(full.tokens)}")
    table.add_row("words in common", "", f"{shared_words(ours.text, full.text):.0%}")
    return table


def shared_words(found: str, wanted: str) -> float:
    """Share of words, counted as often as they occur, that two texts have in common (ROUGE-1's F-measure without stemming)."""
    from collections import Counter

    a, b = Counter(found.lower().split()), Counter(wanted.lower().split())
    total = sum(a.values()) + sum(b.values())
    return 2 * sum((a & b).values()) / total if total else 1.0


def _rate(found: Generated) -> str:
    return "-" if not found.token_ms else f"{1000 / found.tpot_ms:.0f}"
