"""The Jinja environment: strict, and with the only ways in which text of a .kv file may reach generated code."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache

import jinja2

from kvdsl.resources import resource


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """Undefined names are errors; nothing is escaped but by the filters here. Made once, as it keeps what it has compiled."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(resource("templates"))),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    env.filters["docstring"] = docstring
    env.filters["string"] = string
    env.filters["comment"] = comment
    env.filters["tuple"] = literal_tuple
    return env


def docstring(text: str) -> str:
    """Text inside a triple-quoted Python string: it can neither end the string nor escape out of it."""
    return re.sub(r'"(?="|$)', r'\\"', _plain(text).replace("\\", "\\\\"))


def string(text: str) -> str:
    """A Python (and C++) string literal; ASCII only."""
    return json.dumps(_plain(text))


def literal_tuple(names: Iterable[str]) -> str:
    """A Python tuple of strings."""
    items = [string(name) for name in names]
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def comment(text: str) -> str:
    """Text inside a C++ comment, one line: it can neither end the comment nor continue it (a backslash at the end would)."""
    return _plain(text).replace("*/", "* /").replace("/*", "/ *").replace("??", "? ?").rstrip("\\ ")


def _plain(text: str) -> str:
    """One line of printable text: whatever else there is (newlines, control and invisible characters) becomes a space."""
    return "".join(char if char.isprintable() else " " for char in text)
