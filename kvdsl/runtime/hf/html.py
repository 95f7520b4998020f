"""A cache in a notebook: its settings, its size, and which tokens each layer holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

import torch

from kvdsl.runtime.hf.layer import SlotLayer

_CELLS = 240
"""Most cells of a strip. In a longer text a cell stands for several tokens."""

_SHADES = 10
_HEIGHT = 10
"""Pixels."""


def cache_html(facts: str, layers: Sequence[SlotLayer]) -> str:
    """Return a line of facts and a strip per layer, for the batch's first row. Colours follow the page."""
    parts = [f"<div><code>{escape(facts)}</code></div>"]
    if layers[0].state.allocated:
        parts.append(f"<table>{_head(layers[0])}{''.join(map(_line, layers))}</table>")
    return "".join(parts)


def _head(layer: SlotLayer) -> str:
    rows, heads, _ = layer.state.position.shape
    of_batch = "" if rows == 1 else f", row 0 of {rows}"
    what = f"the text{of_batch}: the darker, the more of the {heads} KV heads hold the token"
    titles = ("layer", "holds at most", "bytes", what)
    return _row("th", (escape(title) for title in titles))


def _line(layer: SlotLayer) -> str:
    cells = (f"{layer.state.layer}", _most(layer), f"{layer.bytes():,}", _strip(layer))
    return _row("td", cells)


def _row(tag: str, cells: Iterable[str]) -> str:
    style = "text-align:left;padding-block:1px"
    return "<tr>" + "".join(f'<{tag} style="{style}">{cell}</{tag}>' for cell in cells) + "</tr>"


def _most(layer: SlotLayer) -> str:
    """Describe how many tokens a KV head of the layer holds after a settle, in the first row."""
    if "capacity" not in layer.state.spec.numbers:
        return "every token"
    capacity = layer.state.settings.named(layer.state.numbers)["capacity"][0]
    least, most = ("every token" if x.isinf() else f"{float(x):,.0f} tokens" for x in (capacity.min(), capacity.max()))
    allowed = least if least == most else f"{least} to {most}"
    return f"at most {allowed}, as its budget counts" if layer.state.spec.measures else allowed


def _strip(layer: SlotLayer) -> str:
    """Return the text from left to right; a cell's opacity is the share of its tokens that are held, over all KV heads."""
    shares = _shares(layer)
    return (
        f'<svg width="{2 * len(shares)}" height="{_HEIGHT}" viewBox="0 0 {len(shares)} 1" preserveAspectRatio="none" role="img" '
        f'style="display:block;outline:1px solid rgba(128,128,128,.4)"><title>what layer {layer.state.layer} holds</title>'
        f'<g fill="currentColor">{"".join(_cells(shares))}</g></svg>'
    )


def _shares(layer: SlotLayer) -> list[int]:
    """Return the shade of each cell."""
    position, length = layer.state.position[0], max(1, int(layer.state.seen[0]))
    tokens = -(-length // _CELLS)
    held = torch.bincount(position[position >= 0].cpu() // tokens, minlength=-(-length // tokens))
    sizes = torch.full_like(held, tokens)
    sizes[-1] = length - tokens * (len(held) - 1)
    return torch.ceil(_SHADES * held / (sizes * len(position))).int().tolist()


def _cells(shares: list[int]) -> Iterator[str]:
    """Yield a rectangle per run of equal shades."""
    start = 0
    for shade, run in groupby(shares):
        size = len(list(run))
        if shade:
            yield f'<rect x="{start}" width="{size}" height="1" fill-opacity="{shade / _SHADES:g}"/>'
        start += size
