"""The open texts, and the files of the folders around them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from kvdsl.lsp import Document, path_of, read_document, uri_of

_MOST_FILES = 500
_SKIPPED = {"node_modules", "__pycache__", "site-packages", "generated"}


class Workspace:
    """Reads a text at its first request, and again after it or an open text that it imports has changed."""

    def __init__(self) -> None:
        self.folders: list[Path] = []
        self.encoding = "utf-16"
        self._open: dict[str, str] = {}
        self._read: dict[str, Document] = {}

    # -- what is open --------------------------------------------------------------------------------------------------

    def put(self, uri: str, text: str) -> list[str]:
        """Open a text, or change it; return the URIs of the open texts whose diagnostics may have changed."""
        self._open[uri] = text
        return self._forget(uri)

    def close(self, uri: str) -> list[str]:
        """Close a text; the file on disk counts again."""
        self._open.pop(uri, None)
        return [one for one in self._forget(uri) if one != uri]

    def touched(self, uri: str) -> list[str]:
        """Handle a change of a file on disk."""
        return self._forget(uri)

    def _forget(self, uri: str) -> list[str]:
        path = path_of(uri)
        resolved = None if path is None else path.resolve()
        self._read.pop(uri, None)
        for other, document in list(self._read.items()):
            if resolved in document.read:
                del self._read[other]
        return [one for one in self._open if one not in self._read]

    @property
    def texts(self) -> dict[Path, str]:
        """The open texts, by resolved path."""
        paths = ((path_of(uri), text) for uri, text in self._open.items())
        return {path.resolve(): text for path, text in paths if path is not None}

    # -- documents -----------------------------------------------------------------------------------------------------

    def document(self, uri: str) -> Document:
        """Return an open text, read and checked; an empty one if it is not open."""
        if uri not in self._read:
            self._read[uri] = read_document(uri, self._open.get(uri, ""), self.encoding, self.texts)
        return self._read[uri]

    def others(self, uri: str, word: str) -> Iterator[Document]:
        """Yield the other open texts and the .kv files of the workspace's folders that contain a word."""
        seen = {path.resolve() for path in map(path_of, [uri, *self._open]) if path is not None}
        for other in list(self._open):
            if other != uri and word in self._open[other]:
                yield self.document(other)
        for path in self._files():
            if path.resolve() not in seen:
                other = uri_of(path)
                seen.add(path.resolve())
                try:
                    text = path.read_text(encoding="utf-8-sig")
                except (OSError, UnicodeDecodeError):
                    continue
                if word in text:
                    yield read_document(other, text, self.encoding, self.texts)

    def _files(self) -> Iterator[Path]:
        found = 0
        for folder in self.folders:
            for path in _below(folder):
                found += 1
                if found > _MOST_FILES:
                    return
                yield path


def _below(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _SKIPPED:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry.path))
        elif entry.name.endswith(".kv"):
            yield Path(entry.path)
