"""The Jinja environment: strict, and with the only ways in which text of a .kv file may reach generated code."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import jinja2
from jinja2.bccache import Bucket

from kvdsl.build.cache import cache_folder
from kvdsl.build.store import entry, flaw
from kvdsl.errors import KvdslError
from kvdsl.files import resource


class _Compiled(jinja2.BytecodeCache):
    """What Jinja makes of a template takes longer than a policy takes to compile: it is kept in the cache folder where there is one."""

    def load_bytecode(self, bucket: Bucket) -> None:
        place = self._place(bucket)
        if flaw(place) is None:
            bucket.bytecode_from_string((place / "code").read_bytes())

    def dump_bytecode(self, bucket: Bucket) -> None:
        def make(folder: Path) -> None:
            (folder / "code").write_bytes(bucket.bytecode_to_string())

        with contextlib.suppress(KvdslError, OSError):  # there is no writing, or no getting at it now
            entry(self._place(bucket), "a template", make, patience=1)

    def _place(self, bucket: Bucket) -> Path:
        """An entry for all that the code depends on: this file has the filters, which Jinja applies to constants, and the options."""
        parts = (bucket.key, bucket.checksum, Path(__file__).read_text(encoding="utf-8"), jinja2.__version__, sys.version)
        return cache_folder() / "templates" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


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
        bytecode_cache=_Compiled(),
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
