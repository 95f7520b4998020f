"""What drawings of text have in common."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

SIZE, ADVANCE, LINE = 12, 7.23, 18.5
"""Of a fixed-width letter, in pixels: its size, how far the next one is, and the next line."""

INK = "#1f2328"
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def drawing(width: float, height: float, title: str, parts: Iterable[str]) -> str:
    """A whole file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'font-family="{FONT}" font-size="{SIZE}">'
    )
    style = "<style>text { white-space: pre }</style>"  # of the letters themselves: browsers have another rule for them
    return "\n".join([head, f"<title>{escape(title)}</title>", style, *filter(None, parts), "</svg>\n"])


def letters(part: str, column: int, row: int, colour: str, marks: str = "") -> str:
    """Some letters of a line; their width is stated, whatever font is there."""
    lead = len(part) - len(part.lstrip())
    shown = part.strip()
    if not shown:
        return ""
    return (
        f'<text x="{(column + lead) * ADVANCE:.1f}" y="{row * LINE:.1f}" fill="{colour}"{marks} '
        f'textLength="{len(shown) * ADVANCE:.1f}" lengthAdjust="spacingAndGlyphs">{escape(shown)}</text>'
    )
