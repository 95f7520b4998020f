"""What drawings of text have in common."""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

SIZE, ADVANCE, LINE = 12, 7.23, 18.5
"""Of a fixed-width letter, in pixels: its size, how far the next one is, and the next line."""

INK, QUIET = "#1f2328", "#57606a"
DARK = {
    INK: "#e6edf3", QUIET: "#9aa4af", "#f6f8fa": "#161b22", "#d0d7de": "#3a3f47", "#8c959f": "#8b949e", "#59636e": "#9aa4af",
    "#8250df": "#c8a5ff", "#0550ae": "#79c0ff", "#953800": "#ffa657", "#0a3069": "#a5d6ff", "#666e77": "#9aa4af", "#ffd98a": "#6b5200",
    "#0072b2": "#56b4e9",
}  # fmt: skip
"""Colours of drawings, and what stands for each where the reader's system prefers dark."""

FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def drawing(width: float, height: float, title: str, parts: Iterable[str], *, in_both: bool = False) -> str:
    """A whole file; `in_both`: dark where the reader's system prefers that, for which all its colours are `DARK`'s."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
        f'font-family="{FONT}" font-size="{SIZE}">'
    )
    rules = "text { white-space: pre }"  # of the letters themselves: browsers have another rule for them
    if in_both:
        dark = " ".join(f'[{of}="{light}"] {{ {of}: {dark} }}' for light, dark in DARK.items() for of in ("fill", "stroke"))
        rules += f" @media (prefers-color-scheme: dark) {{ {dark} }}"
    style = f"<style>{rules}</style>"
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
