"""Policies by name: the shipped ones, and the resolution of names and paths from users.

There are three shelves: `policies/`, the short list of the most used, `policies/gallery/`, other published methods, and
`policies/found/`, results of `kvdsl search`. Names are resolved on all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path

from kvdsl import codes
from kvdsl.diagnostics import DiagnosticError, Sink, did_you_mean, nearest
from kvdsl.files import DASH, is_standard_input, read_standard_input, resource
from kvdsl.source import Combined, SourceFile

_SHELVES = (("policies",), ("policies", "gallery"), ("policies", "found"))
_STEM = re.compile(r"[a-z][a-z0-9_]*")
_PYTHON = re.compile(r"(?P<path>.+\.py)(?::(?P<name>[^\s:/\\]*))?", re.DOTALL)
_HEAD = re.compile(r"^[ \t]*policy[ \t]+([A-Za-z_][A-Za-z0-9_]*)", re.MULTILINE)


def shipped_policies() -> list[Path]:
    """Return the files of the short list, by file name."""
    return _policies_in(resource(*_SHELVES[0]))


def gallery_policies() -> list[Path]:
    """Return the files of the gallery, by file name."""
    return _policies_in(resource(*_SHELVES[1]))


def found_policies() -> list[Path]:
    """Return the files of policies found by search, by file name."""
    return _policies_in(resource(*_SHELVES[2]))


def all_policies() -> list[Path]:
    """Return all shipped policies: the short list, the gallery, then those found by search."""
    return shipped_policies() + gallery_policies() + found_policies()


def _policies_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.kv") if not path.stem.endswith("_test"))


def shipped_policy(stem: str) -> Path | None:
    """Return the file with this stem, or None. Lists no folder, because a source may name thousands."""
    if _STEM.fullmatch(stem) is None or stem.endswith("_test"):
        return None
    paths = (resource(*shelf) / f"{stem}.kv" for shelf in _SHELVES)
    return next((path for path in paths if path.is_file()), None)


def shipped_as(file: Path) -> str | None:
    """Return `kvdsl:STEM` for the file of a shipped policy, as manifests name it; None for any other file."""
    shipped = shipped_policy(file.stem)
    return f"kvdsl:{file.stem}" if shipped is not None and file.resolve() == shipped.resolve() else None


def is_shipped_like_a_file(path: Path) -> bool:
    """Return whether a file is on the short list, whose policies could once be imported like files next to the source."""
    return path.parent == resource(*_SHELVES[0])


def policy_name(text: str) -> str | None:
    """Return the name in the first `policy NAME` line of a source."""
    head = _HEAD.search(text)
    return None if head is None else head[1]


@lru_cache(maxsize=1)
def stems_by_name() -> dict[str, str]:
    """Map policy names to stems, `RoCo` -> `roco`, from the files' `policy NAME` lines."""
    return {name: path.stem for path in all_policies() if (name := policy_name(path.read_text(encoding="utf-8")))}


# -- by name or path ------------------------------------------------------------------------------------------------


Written = Callable[[Path, str], SourceFile]
"""Returns the text of a policy in a Python file, by its name there."""


def find(text: str, written: Written) -> Path | SourceFile:
    """Find a policy; see `kvdsl.compiler.find_policy`.

    Args:
        written: opens `mine.py:calm`.
    """
    if is_standard_input(text):
        return _standard_input()
    shipped = {path.stem: path for path in all_policies()}
    if (known := _known(text, shipped, written)) is not None:
        return known
    pieces = _WITH.split(text.strip())
    for count in range(1, len(pieces)):
        name = " with ".join(pieces[:count])
        if (known := _known(name, shipped, written)) is not None:
            found: Path | SourceFile = known
            for clauses in _joined(pieces[count:]):
                found = combine(found, clauses, name)
            return found
    raise _no_such_policy(pieces[0] if len(pieces) > 1 else text, shipped, whole=text)


def _standard_input() -> SourceFile:
    from kvdsl.syntax.reader import decode

    sink = Sink()
    source = decode(read_standard_input(), sink, DASH)
    if source is None:
        raise DiagnosticError(sink)
    return source


def separate(policies: str) -> list[str]:
    """Split a list of policies, `h2o,roco`, at commas outside parentheses, brackets, braces and strings."""
    pieces, depth = [""], 0
    for part in re.findall(r""""[^"]*"|'[^']*'|.""", policies, re.DOTALL):
        depth += (part in "([{") - (part in ")]}")
        if part == "," and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += part
    return [piece.strip() for piece in pieces if piece.strip()]


def text_of(found: Path | SourceFile) -> str:
    """Return the text of a policy's file, or the text that its file would have."""
    if isinstance(found, SourceFile):
        return found.as_file
    return found.read_text(encoding="utf-8-sig")


def combine(base: Path | SourceFile, clauses: str, name: str | None = None) -> Combined:
    """Combine a policy with clauses, after `with`, under the name of the base or another name.

    Raises:
        DiagnosticError: if the clauses cannot be text of a policy.
    """
    imports = ""
    match base:
        case Combined():
            name, of = base.text, base.policy
        case SourceFile():
            name, of = name or base.name, policy_name(base.text) or base.stem
        case Path():
            is_shipped = shipped_policy(base.stem) == base
            name = name or (base.stem if is_shipped else str(base))
            text = base.read_text(encoding="utf-8-sig", errors="replace")
            edition = re.search(r"^[ \t]*kv[ \t]+\d+", text, re.MULTILINE)
            imports = f"import {base.stem}" if is_shipped else f'import "{base}"'
            imports = f"{edition[0].strip() if edition else 'kv 1'}\n{imports}\n"
            of = policy_name(text) or base.stem
    from kvdsl.syntax.reader import normalized

    sink = Sink()
    source = normalized(SourceFile("<policy>", f"{name} with {clauses.strip()}"), sink)
    if source is None:
        raise DiagnosticError(sink)
    begins = len(name) + len(" with ")
    return Combined("<policy>", source.text, base=base, imports=imports, of=of, named=len(name), clauses=begins)


_WITH = re.compile(r"\s+with(?:\s+|\Z)")


def _joined(pieces: Iterable[str]) -> list[str]:
    """Join pieces at a `with` inside a string."""
    found: list[str] = []
    for piece in pieces:
        if found and any(found[-1].count(quote) % 2 for quote in "\"'"):
            found[-1] += f" with {piece}"
        else:
            found.append(piece)
    return found


def file_of(name: str) -> Path:
    """Return the file of a path, or of `mine.py:calm`."""
    python = _PYTHON.fullmatch(name)
    return Path(name if python is None else python["path"])


def _known(name: str, shipped: Mapping[str, Path], written: Written) -> Path | SourceFile | None:
    """Return the file of a shipped policy, an existing file, or the text of a policy in a Python file."""
    if name in shipped:
        return shipped[name]
    python = _PYTHON.fullmatch(name)
    if python is not None:
        return written(file_of(name), python["name"] or "")
    try:
        return path if (path := Path(name)).is_file() else None
    except (OSError, ValueError):
        return None


def _no_such_policy(text: str, shipped: Mapping[str, Path], whole: str) -> DiagnosticError:
    """Return the error for a name or path, the start of `text`, that is neither a shipped policy's nor a file's."""
    sink, path = Sink(), Path(text)
    name = " ".join(text.split())
    source = SourceFile("<policy>", " ".join(whole.split()))
    if "\n" in text:
        message, help = (
            "this is the text of a policy, not a name or path",
            "`kvdsl.compile` compiles a policy from a string",
        )
    elif path.suffix == ".kv" or len(path.parts) > 1:
        message, help = f"there is no file `{name}`", _near_file(path, shipped)
    else:
        near = did_you_mean(name, [*shipped, *_kv_files(Path())])
        message, help = f"there is no policy `{name}`", near or f"{_LIST}; name your own by its file, `mine.kv`"
    sink.report(codes.NO_SUCH_POLICY, source.span(0, len(name)), message, help)
    return DiagnosticError(sink)


_LIST = "`kvdsl list` shows the shipped policies"


def _near_file(path: Path, shipped: Mapping[str, Path]) -> str:
    """Return a help with a similar file of the same folder, or a shipped policy."""
    near = nearest(path.name, [name for name in _kv_files(path.parent) if name != path.name])
    if near is not None:
        return f"did you mean `{path.with_name(near)}`?"
    if path.stem in shipped:
        return f"`{path.stem}`, without `.kv`, is the shipped policy"
    near = nearest(path.stem, shipped)
    return f"did you mean `{near}`, the shipped policy?" if near else f"paths are relative to the current folder; {_LIST}"


def _kv_files(folder: Path) -> list[str]:
    """Return the names of a folder's .kv files; none if it cannot be read."""
    try:
        return [path.name for path in folder.glob("*.kv")]
    except (OSError, ValueError):
        return []
