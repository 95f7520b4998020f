"""Go to definition, find references, and rename."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lsprotocol import types as lsp

from kvdsl.errors import KvdslError
from kvdsl.files import resource
from kvdsl.ir.ops import NAMED_FUNCTIONS, NAMED_INPUTS
from kvdsl.lsp import Document, read_document
from kvdsl.lsp.names import Name, same_place
from kvdsl.sema.modules import NO_TEXTS
from kvdsl.sema.names import problem
from kvdsl.source import Span


class RenameError(KvdslError):
    """The name cannot be changed, or not to this one."""


def definition(document: Document, position: lsp.Position) -> lsp.Location | None:
    """Return where the name at a place is defined; for overrides, the first definition."""
    name = document.names.at(document.offset(position))
    if name is None or name.target is None:
        return None
    return document.location(name.target.file, name.target.start, name.target.end)


def spelled(document: Document, position: lsp.Position) -> str:
    """Return the text of the name at a place; empty if there is none."""
    name = document.names.at(document.offset(position))
    return "" if name is None else name.text


def references(
    document: Document, position: lsp.Position, others: Iterable[Document], *, declared: bool = True
) -> list[lsp.Location]:
    """Return the occurrences of the name at a place, in this and other texts.

    Args:
        declared: whether to include the definition.
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
    """Return the occurrences of the name at a place in this text."""
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
    """Return the name at a place, if it can be changed.

    Raises:
        RenameError: with the reason.
    """
    name = document.names.at(document.offset(position))
    if name is None:
        raise RenameError("there is no name here")
    if name.target is None or name.kind in ("input", "built-in"):
        raise RenameError(f"`{name.text}` is built in")
    if name.kind == "file":
        raise RenameError("rename the file itself instead")
    if name.kind == "tensor":
        raise RenameError(f"`{name.text}` is the tensor's name in its file")
    if name.text == "budget":
        raise RenameError("`budget` is part of every cache's interface")
    if _is_shipped(name.target):
        raise RenameError(f"`{name.text}` is defined in `{name.target.file.name}`, which comes with kvdsl")
    return name


def rename(
    document: Document, position: lsp.Position, to: str, others: Iterable[Document], texts: Mapping[Path, str] = NO_TEXTS
) -> lsp.WorkspaceEdit:
    """Return the edits that rename a name everywhere.

    Raises:
        RenameError: if the new name is invalid or taken, or if errors in a text could hide occurrences.
    """
    name = renamable(document, position)
    _check(name, to)
    places: dict[str, tuple[Document, list[Name]]] = {}
    for one, found in _standing(name, [document, *others]):
        places.setdefault(one.uri, (one, []))[1].append(found)
    if not any(found.defines for _, own in places.values() for found in own):
        assert name.target is not None
        raise RenameError(
            f"`{name.text}` is defined in `{name.target.file.name}`, which is neither open nor in the folder: open it"
        )
    for one, _ in places.values():
        if any(wrong.code.startswith("KV01") and wrong.severity == "error" for wrong in one.diagnostics):
            raise RenameError(f"`{one.source.name}` has syntax errors, so occurrences could be missed: fix them first")
    _try(list(places.values()), to, texts)
    changes = {uri: [lsp.TextEdit(one.positions.of(found.span), to) for found in own] for uri, (one, own) in places.items()}
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


def _try(places: list[tuple[Document, list[Name]]], to: str, texts: Mapping[Path, str]) -> None:
    """Raise if a text would have a new error, as for a name that is taken, or if another name would change its meaning."""
    changed = [(one, *_renamed(one, own, to)) for one, own in places]
    there = {**texts, **{one.source.path.resolve(): text for one, text, _ in changed if one.source.path is not None}}
    for one, text, starts in changed:
        then = read_document(one.uri, text, one.positions.encoding, there)
        errors, known = (
            [wrong.message for wrong in document.diagnostics if wrong.severity == "error"] for document in (then, one)
        )
        if len(errors) > len(known):
            raise RenameError(next((wrong for wrong in errors if wrong not in known), errors[-1]))
        here = [found for found in then.names.all if found.span.start in starts]
        same = {found.span.start for found in then.names.all if here and same_place(found.target, here[0].target)}
        if same != starts:
            raise RenameError(f"`{to}` already means something else in `{one.source.name}`")


def _renamed(document: Document, own: list[Name], to: str) -> tuple[str, set[int]]:
    """Return the text after renaming, and the offsets of the occurrences in it."""
    text, starts, moved = document.text, set(), 0
    for span in sorted((found.span for found in own), key=lambda span: span.start):
        start = span.start + moved
        text = text[:start] + to + text[span.end + moved :]
        starts.add(start)
        moved += len(to) - (span.end - span.start)
    return text, starts


def _is_shipped(target: Span) -> bool:
    path = target.file.path
    folders = (resource("policies").resolve(), resource("grammar").resolve())
    return path is None or any(path.resolve().is_relative_to(folder) for folder in folders)
