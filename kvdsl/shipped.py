"""Policies by name: those that come with kvdsl, their files and the names that they have in the language; and where a name or a path
that a user gives leads.

Three shelves hold them: `policies/`, the short list of what is used most, `policies/gallery/`, what else was published, and
`policies/found/`, what `kvdsl search` found. A name leads to any.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from kvdsl import codes
from kvdsl.diagnostics import DiagnosticError, Sink, did_you_mean, nearest
from kvdsl.resources import resource
from kvdsl.source import SourceFile

_SHELVES = (("policies",), ("policies", "gallery"), ("policies", "found"))
_STEM = re.compile(r"[a-z][a-z0-9_]*")
_HEAD = re.compile(r"^[ \t]*policy[ \t]+([A-Za-z_][A-Za-z0-9_]*)", re.MULTILINE)


def shipped_policies() -> list[Path]:
    """The files of the short list, by file name."""
    return _policies_in(resource(*_SHELVES[0]))


def gallery_policies() -> list[Path]:
    """The files of the gallery, by file name."""
    return _policies_in(resource(*_SHELVES[1]))


def found_policies() -> list[Path]:
    """The files of what was found by search, by file name."""
    return _policies_in(resource(*_SHELVES[2]))


def all_policies() -> list[Path]:
    """All that come with kvdsl: the short list, then the gallery, then what was found."""
    return shipped_policies() + gallery_policies() + found_policies()


def _policies_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.kv") if not path.stem.endswith("_test"))


def shipped_policy(stem: str) -> Path | None:
    """The file of the one with this stem, or None. No folder is listed: a source may name thousands."""
    if _STEM.fullmatch(stem) is None or stem.endswith("_test"):
        return None
    paths = (resource(*shelf) / f"{stem}.kv" for shelf in _SHELVES)
    return next((path for path in paths if path.is_file()), None)


def is_shipped_like_a_file(path: Path) -> bool:
    """Whether it is a file of the short list, which could once be imported as if it lay beside the source."""
    return path.parent == resource(*_SHELVES[0])


def policy_name(text: str) -> str | None:
    """The name that the first `policy NAME` line of a source gives."""
    head = _HEAD.search(text)
    return None if head is None else head[1]


@lru_cache(maxsize=1)
def stems_by_name() -> dict[str, str]:
    """`RoCo` -> `roco`, read from the files' `policy NAME` lines."""
    return {name: path.stem for path in all_policies() if (name := policy_name(path.read_text(encoding="utf-8")))}


# -- by name or path ------------------------------------------------------------------------------------------------


def find_policy(name_or_path: str | Path) -> Path:
    """The file of a shipped policy, by its stem, or the path itself.

    Raises:
        DiagnosticError: if there is no such policy or file.
    """
    text = str(name_or_path)
    shipped = {path.stem: path for path in all_policies()}
    if text in shipped:
        return shipped[text]
    path = Path(name_or_path)
    try:
        if path.is_file():
            return path
    except (OSError, ValueError):
        pass
    raise _no_such_policy(text, path, shipped)


def _no_such_policy(text: str, path: Path, shipped: Mapping[str, Path]) -> DiagnosticError:
    """What to say of a name or path that is neither a shipped policy's nor a file's."""
    sink = Sink()
    name = " ".join(text.split())
    source = SourceFile("<policy>", name)
    if "\n" in text:
        message, help = (
            "this is a text, not a policy's name or path",
            "`kvdsl.compile` takes a policy that is given as a string",
        )
    elif path.suffix == ".kv" or len(path.parts) > 1:
        message, help = f"there is no file `{name}`", _near_file(path, shipped)
    else:
        near = did_you_mean(name, [*shipped, *_kv_files(Path())])
        message, help = f"there is no policy `{name}`", near or f"{_LIST}; your own is named by its file, `mine.kv`"
    sink.report(codes.NO_SUCH_POLICY, source.span(0, len(name)), message, help)
    return DiagnosticError(sink)


_LIST = "`kvdsl list` shows the shipped policies"


def _near_file(path: Path, shipped: Mapping[str, Path]) -> str:
    """The file that was perhaps meant: one in the same folder, or a shipped policy."""
    near = nearest(path.name, [name for name in _kv_files(path.parent) if name != path.name])
    if near is not None:
        return f"did you mean `{path.with_name(near)}`?"
    if path.stem in shipped:
        return f"`{path.stem}`, without `.kv`, is the shipped policy"
    near = nearest(path.stem, shipped)
    return f"did you mean `{near}`, the shipped policy?" if near else f"paths are relative to the current folder; {_LIST}"


def _kv_files(folder: Path) -> list[str]:
    """The names of a folder's .kv files; none where it cannot be read."""
    try:
        return [path.name for path in folder.glob("*.kv")]
    except (OSError, ValueError):
        return []
