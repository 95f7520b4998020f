"""From a name to where it is defined, to where it stands, and to another name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lsprotocol import types as lsp

from kvdsl.errors import KvdslError
from kvdsl.ir.ops import NAMED_FUNCTIONS, NAMED_INPUTS
from kvdsl.lsp.document import Document, read_document
from kvdsl.lsp.names import Name, same_place
from kvdsl.resources import resource
from kvdsl.sema.modules import NO_TEXTS
from kvdsl.sema.names import problem
from kvdsl.source import Span


class RenameError(KvdslError):
    """A name that cannot be changed, or not into that."""


def definition(document: Document, position: lsp.Position) -> lsp.Location | None:
    """Where the name at a place is defined; of what is overridden, where it was defined first."""
    name = document.names.at(document.offset(position))
    if name is None or name.target is None:
        return None
    return document.location(name.target.file, name.target.start, name.target.end)


def spelled(document: Document, position: lsp.Position) -> str:
    """How the name at a place is spelled, wherever it stands; empty where there is none."""
    name = document.names.at(document.offset(position))
    return "" if name is None else name.text


def references(
    document: Document, position: lsp.Position, others: Iterable[Document], *, declared: bool = True
) -> list[lsp.Location]:
    """Where the name at a place stands, in this and in other texts.

    Args:
        declared: whether where it is defined counts.
    """
    name = document.names.at(document.offset(position))
    if name is None or name.target is None:
        return []
    return [
        lsp.Location(one.uri, one.positions.of(found.span))
        for one, found in _standing(name, [document, *others])
        if declared or not found.defines
    ]


def highlights(document: Document, position: lsp.Position) -> list[lsp.DocumentHighlight]:
    """Where the name at a place stands in this text."""
    name = document.names.at(document.offset(position))
    if name is None:
        return []
    same = [one for one in document.names.all if _is_same(one, name)]
    kinds = {True: lsp.DocumentHighlightKind.Write, False: lsp.DocumentHighlightKind.Read}
    return [lsp.DocumentHighlight(document.positions.of(one.span), kinds[one.defines]) for one in same]


def _is_same(one: Name, other: Name) -> bool:
    if other.target is None:
        return one.target is None and one.text == other.text
    return same_place(one.target, other.target)


def _standing(name: Name, documents: Iterable[Document]) -> Iterable[tuple[Document, Name]]:
    seen: set[str] = set()
    for one in documents:
        if one.uri not in seen:
            seen.add(one.uri)
            yield from ((one, found) for found in one.names.all if same_place(found.target, name.target))


# -- renaming ----------------------------------------------------------------------------------------------------------


def renamable(document: Document, position: lsp.Position) -> Name:
    """The name at a place, if it can be changed.

    Raises:
        RenameError: why not.
    """
    name = document.names.at(document.offset(position))
    if name is None:
        raise RenameError("there is no name here")
    if name.target is None or name.kind in ("input", "built-in"):
        raise RenameError(f"`{name.text}` is built in")
    if name.kind == "file":
        raise RenameError("a file is renamed where files are")
    if name.kind == "tensor":
        raise RenameError(f"`{name.text}` is the name that the tensor has in its file")
    if name.text == "budget":
        raise RenameError("`budget` is what every cache calls it")
    if _is_shipped(name.target):
        raise RenameError(f"`{name.text}` is defined in `{name.target.file.name}`, which comes with kvdsl")
    return name


def rename(
    document: Document, position: lsp.Position, to: str, others: Iterable[Document], texts: Mapping[Path, str] = NO_TEXTS
) -> lsp.WorkspaceEdit:
    """The edits that give a name another spelling wherever it stands.

    Raises:
        RenameError: if that is no name, is taken, or if something is wrong in the text so that names may be missed.
    """
    name = renamable(document, position)
    if any(one.code.startswith("KV01") and one.severity == "error" for one in document.diagnostics):
        raise RenameError("the text has syntax errors, so that places would be missed: mend them first")
    _check(name, to)
    changes: dict[str, list[lsp.TextEdit]] = {}
    for one, found in _standing(name, [document, *others]):
        changes.setdefault(one.uri, []).append(lsp.TextEdit(one.positions.of(found.span), to))
    _try(document, name, to, texts)
    return lsp.WorkspaceEdit(changes=changes)


def _check(name: Name, to: str) -> None:
    kind = {"param": "param", "policy": "policy"}.get(name.kind, "name")
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", to) is None:
        raise RenameError(f"`{to}` is not a name")
    if name.kind != "policy" and to in NAMED_INPUTS | NAMED_FUNCTIONS:
        raise RenameError(f"`{to}` is built in")
    wrong = problem(to, kind)
    if wrong is not None:
        raise RenameError(wrong)


def _try(document: Document, name: Name, to: str, texts: Mapping[Path, str]) -> None:
    """Raises if the text has an error then that it has not now, as where the name is taken."""
    spans = sorted((one.span for one in document.names.all if same_place(one.target, name.target)), key=lambda s: -s.start)
    text = document.text
    for span in spans:
        text = text[: span.start] + to + text[span.end :]
    if name.target is not None and name.target.file is not document.source:
        return  # the file that defines it changes as well
    changed = read_document(document.uri, text, document.positions.encoding, texts)
    before = sum(one.severity == "error" for one in document.diagnostics)
    errors = [one for one in changed.diagnostics if one.severity == "error"]
    if len(errors) > before:
        raise RenameError(errors[-1].message)


def _is_shipped(target: Span) -> bool:
    path = target.file.path
    folders = (resource("policies").resolve(), resource("grammar").resolve())
    return path is None or any(path.resolve().is_relative_to(folder) for folder in folders)
