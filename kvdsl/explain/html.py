"""Render facts about a policy, or a code, as one self-contained HTML page, for light, dark and print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

from kvdsl.codes import Code
from kvdsl.explain.facts import Facts
from kvdsl.explain.words import rows
from kvdsl.provenance import fields, prose

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }}
th {{ text-align: left; vertical-align: top; padding: .3rem 1.5rem .3rem 0; font-weight: 600 }}
td {{ padding: .3rem 0 }}
pre {{ overflow-x: auto; padding: 1rem; border: 1px solid; border-radius: .4rem }}
{light}
@media (prefers-color-scheme: dark) {{
{dark}
}}
</style>
<main>
{body}
</main>
</html>
"""


def policy_page(found: Facts, source: str) -> str:
    """Return a page with a policy in words and its `source`, the text of its file."""
    policy = found.policy
    return _page(policy.name, "\n".join(_policy(found, source)))


def code_page(code: Code) -> str:
    """Return a page with a code's explanation and a failing example."""
    title = f"{code.severity} {code.id}: {code.title}"
    example = _coloured(code.example) if code.example and len(code.example) < 2_000 else ""
    return _page(code.id, f"<h1>{escape(title)}</h1>\n{_prose(code.explanation)}\n{example}")


def _policy(found: Facts, source: str) -> Iterator[str]:
    yield f"<h1>{escape(found.policy.name)}</h1>"
    for paragraph in re.split(r"\n\s*\n", prose(found.policy.doc)):
        yield _prose(" ".join(paragraph.split()))
    yield "<table>"
    provenance = {key: [value] for key, value in fields(found.policy.doc).items()}
    for title, lines in (provenance | rows(found)).items():
        yield f'<tr><th scope="row">{escape(title)}</th><td>{"<br>".join(map(escape, lines))}</td></tr>'
    yield "</table>"
    yield f"<h2>{escape(found.policy.stem)}.kv</h2>"
    yield _coloured(source)


def _prose(text: str) -> str:
    """Render a paragraph; text in backticks is code."""
    marked = re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))
    return f"<p>{marked}</p>"


def _page(title: str, body: str) -> str:
    light, dark = (_colours(style) for style in ("default", "github-dark"))
    return _PAGE.format(title=escape(title), body=body, light=light, dark=dark)


def _coloured(text: str) -> str:
    from pygments import highlight
    from pygments.formatters import HtmlFormatter

    from kvdsl.highlight import KvLexer

    return str(highlight(text, KvLexer(), HtmlFormatter(cssclass="kv"))).strip()


def _colours(name: str) -> str:
    """Return style sheet lines for the language's tokens, in the colours of a Pygments style."""
    from pygments.styles import get_style_by_name
    from pygments.token import STANDARD_TYPES, Comment, Keyword, Name, Number, String

    style = get_style_by_name(name)
    kinds = (Comment.Single, Keyword, Keyword.Declaration, Name.Builtin, Name.Builtin.Pseudo, Name.Class, Name.Function)
    lines = []
    for kind in (*kinds, Name.Variable, Number, String.Double):
        look = style.style_for_token(kind)
        weight = "; font-weight: bold" if look["bold"] else ""
        if look["color"]:
            lines.append(f".kv .{STANDARD_TYPES[kind]} {{ color: #{look['color']}{weight} }}")
    return "\n".join(lines)
