"""The Jinja environment: strict, with filters as the only way for text of a .kv file into generated code."""

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
    """Caches compiled templates on disk, because compiling them takes longer than compiling a policy."""

    def load_bytecode(self, bucket: Bucket) -> None:
        place = self._place(bucket)
        if flaw(place) is None:
            bucket.bytecode_from_string((place / "code").read_bytes())

    def dump_bytecode(self, bucket: Bucket) -> None:
        def make(folder: Path) -> None:
            (folder / "code").write_bytes(bucket.bytecode_to_string())

        with contextlib.suppress(KvdslError, OSError):  # the cache folder is read-only or locked
            entry(self._place(bucket), "a template", make, patience=1)

    def _place(self, bucket: Bucket) -> Path:
        """Return the cache entry. Its key covers the code's inputs, including this file, whose filters Jinja applies to constants."""
        parts = (bucket.key, bucket.checksum, Path(__file__).read_text(encoding="utf-8"), jinja2.__version__, sys.version)
        return cache_folder() / "templates" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """Return the environment. Undefined names are errors; only the filters here escape. Cached, because it keeps compiled templates."""
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
    """Escape text for a triple-quoted Python string, so that it can neither end the string nor form escapes."""
    return re.sub(r'"(?="|$)', r'\\"', _plain(text).replace("\\", "\\\\"))


def string(text: str) -> str:
    """Return a Python (and C++) string literal in ASCII."""
    return json.dumps(_plain(text))


def literal_tuple(names: Iterable[str]) -> str:
    """Return a Python tuple of strings."""
    items = [string(name) for name in names]
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def comment(text: str) -> str:
    """Escape text for a one-line C++ comment, so that it can neither end nor continue it (with a trailing backslash)."""
    return _plain(text).replace("*/", "* /").replace("/*", "/ *").replace("??", "? ?").rstrip("\\ ")


def _plain(text: str) -> str:
    """Return printable text on one line; newlines, control and invisible characters become spaces."""
    return "".join(char if char.isprintable() else " " for char in text)
