"""The language server, which answers an editor's requests about .kv files.

A `Document` is a text with the compiler's analysis. Each feature is a module with one function from a document (and a place in it) to
the protocol's result; `server` connects them to an editor. The server needs no torch, and handles texts with errors and unfinished
ones: it leaves out what it cannot determine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lark import Token
from lsprotocol import types as lsp
from pygls.uris import from_fs_path, to_fs_path

from kvdsl.diagnostics import Diagnostic, Sink
from kvdsl.explain.facts import Facts, facts
from kvdsl.ir.nodes import Policy
from kvdsl.lsp.names import Names, collect, visible_lets
from kvdsl.lsp.positions import Positions
from kvdsl.sema.check import Checker
from kvdsl.sema.files import Analysis, check_file, policy_checker
from kvdsl.sema.modules import NO_TEXTS, Loader, Module
from kvdsl.source import SourceFile
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.parser import all_tokens
from kvdsl.syntax.reader import normalized


@dataclass
class Document:
    """A text and its analysis.

    Attributes:
        source: the text with `\\n` line ends, which offsets count in.
        module: the text's syntax and imports; None if the text is too large for a policy.
        checker: resolves names in the policy, even after errors; None without a policy.
        policy: None after errors.
    """

    uri: str
    source: SourceFile
    positions: Positions
    module: Module | None
    checker: Checker | None
    policy: Policy | None
    diagnostics: tuple[Diagnostic, ...]
    read: frozenset[Path]

    @property
    def text(self) -> str:
        return self.source.text

    @cached_property
    def _tokens(self) -> tuple[list[Token], list[Token]]:
        return all_tokens(self.source)

    @property
    def tokens(self) -> list[Token]:
        """The tokens; keywords have their own types."""
        return self._tokens[0]

    @property
    def comments(self) -> list[Token]:
        return self._tokens[1]

    @cached_property
    def lets(self) -> Mapping[str, syn.Let]:
        """The lets and functions that the text can read, by name."""
        return {} if self.module is None else visible_lets(self.module)

    @cached_property
    def names(self) -> Names:
        """The names in the text, with their definitions."""
        return Names(()) if self.module is None else collect(self.module)

    @cached_property
    def facts(self) -> Facts | None:
        """The facts that `kvdsl explain` shows."""
        return None if self.policy is None else facts(self.policy)

    def offset(self, position: lsp.Position) -> int:
        """Return the offset of a client's position."""
        return self.positions.offset(position)

    def token_at(self, offset: int) -> Token | None:
        """Return the token at or right before an offset; of two adjacent ones, the word."""
        found = [token for token in self.tokens if (token.start_pos or 0) <= offset <= (token.end_pos or 0)]
        return max(found, key=lambda token: (str(token)[:1].isidentifier(), token.start_pos or 0), default=None)

    def location(self, file: SourceFile, start: int, end: int) -> lsp.Location | None:
        """Return a location in this or another file; None for a text without a file."""
        if file.path is None:
            return None
        same = file is self.source or file.path == self.source.path
        positions = self.positions if same else Positions(file.text, self.positions.encoding)
        return lsp.Location(self.uri if same else uri_of(file.path), positions.range(start, end))


def read_document(uri: str, text: str, encoding: str, texts: Mapping[Path, str] = NO_TEXTS) -> Document:
    """Read, parse and check a text.

    Args:
        texts: texts open in the editor, by resolved path; imports read these instead of files.
    """
    path = path_of(uri)
    given = SourceFile(uri if path is None else str(path), text, path)
    sink = Sink()
    source = normalized(given, sink)
    if source is None:
        plain = SourceFile(given.name, text.replace("\r\n", "\n").replace("\r", "\n"), path)
        return Document(uri, plain, Positions(plain.text, encoding), None, None, None, sink.sorted(), frozenset())
    loader = Loader(sink, texts)
    module = loader.load(source)
    checker, found = None, None
    if module.syntax.policies and not module.syntax.tests:
        checker = policy_checker(module, {}, sink)
        found = None if checker is None else checker.check()
    else:
        check_file(module, {}, sink)
    analysis = Analysis.of(found, source, sink, loader.read)
    policy = analysis.policies[0] if analysis.policies else None
    positions = Positions(source.text, encoding)
    return Document(uri, source, positions, module, checker, policy, analysis.diagnostics, analysis.read)


def path_of(uri: str) -> Path | None:
    """Return the file of a URI; None if it has none, such as an unsaved text."""
    name = to_fs_path(uri) if uri.startswith("file:") else None
    return None if name is None else Path(name)


def uri_of(path: Path) -> str:
    """Return the URI of a file."""
    return from_fs_path(str(path.resolve())) or path.resolve().as_uri()
