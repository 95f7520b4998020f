"""A cache as a notebook shows it: what it is, what it may hold, and which tokens of the text each layer holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

import torch

from kvdsl.runtime.hf.layer import SlotLayer

_CELLS = 240
"""A strip has at most so many cells; of a longer text a cell stands for several tokens."""

_SHADES = 10
_HEIGHT = 10
"""Of a strip, in pixels."""


def cache_html(facts: str, layers: Sequence[SlotLayer]) -> str:
    """A line of facts and a strip for each layer; of a batch its first row. Colours are those of the text around it."""
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
    cells = (f"{layer.index}", _most(layer), f"{layer.bytes():,}", _strip(layer))
    return _row("td", cells)


def _row(tag: str, cells: Iterable[str]) -> str:
    style = "text-align:left;padding-block:1px"
    return "<tr>" + "".join(f'<{tag} style="{style}">{cell}</{tag}>' for cell in cells) + "</tr>"


def _most(layer: SlotLayer) -> str:
    """What each KV head of the layer is allowed once it has settled, as the numbers of the first row have it."""
    if "capacity" not in layer.state.spec.numbers:
        return "every token"
    capacity = layer.state.settings.named(layer.state.numbers)["capacity"][0]
    least, most = ("every token" if x.isinf() else f"{float(x):,.0f} tokens" for x in (capacity.min(), capacity.max()))
    allowed = least if least == most else f"{least} to {most}"
    return f"at most {allowed}, as its budget counts" if layer.state.spec.measures else allowed


def _strip(layer: SlotLayer) -> str:
    """The text from left to right; a cell's opacity is the share of its tokens, over all KV heads, that are held."""
    shares = _shares(layer)
    return (
        f'<svg width="{2 * len(shares)}" height="{_HEIGHT}" viewBox="0 0 {len(shares)} 1" preserveAspectRatio="none" role="img" '
        f'style="display:block;outline:1px solid rgba(128,128,128,.4)"><title>what layer {layer.index} holds</title>'
        f'<g fill="currentColor">{"".join(_cells(shares))}</g></svg>'
    )


def _shares(layer: SlotLayer) -> list[int]:
    """Of each cell how much is held, in shades."""
    position, length = layer.state.position[0], max(1, int(layer.state.seen[0]))
    tokens = -(-length // _CELLS)
    held = torch.bincount(position[position >= 0].cpu() // tokens, minlength=-(-length // tokens))
    sizes = torch.full_like(held, tokens)
    sizes[-1] = length - tokens * (len(held) - 1)
    return torch.ceil(_SHADES * held / (sizes * len(position))).int().tolist()


def _cells(shares: list[int]) -> Iterator[str]:
    """A rectangle for each run of equal shades."""
    start = 0
    for shade, run in groupby(shares):
        size = len(list(run))
        if shade:
            yield f'<rect x="{start}" width="{size}" height="1" fill-opacity="{shade / _SHADES:g}"/>'
        start += size
