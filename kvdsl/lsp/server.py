"""The server: maps requests of the protocol to this package's modules. Uses pygls."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer

from kvdsl.abi import VERSION
from kvdsl.lsp import Document, navigation, path_of
from kvdsl.lsp.completion import completion
from kvdsl.lsp.diagnostics import diagnostics, fixes, formatting
from kvdsl.lsp.hints import COMMANDS, inlay_hints, lenses
from kvdsl.lsp.hover import hover
from kvdsl.lsp.outline import foldings, symbols
from kvdsl.lsp.signature import signature
from kvdsl.lsp.tokens import LEGEND, semantic_tokens
from kvdsl.lsp.workspace import Workspace


class Server(LanguageServer):
    """A server with its client's open texts. Texts are small, so each change sends the whole text."""

    def __init__(self) -> None:
        super().__init__("kvdsl", VERSION, text_document_sync_kind=lsp.TextDocumentSyncKind.Full)
        self.texts = Workspace()
        self.dismissed = False  # whether the client has requested a shutdown

    def document(self, params: object) -> Document:
        """Return the text of a request."""
        return self.texts.document(params.text_document.uri)  # type: ignore[attr-defined]

    def look_at_folders(self) -> None:
        """Use the files in the workspace's folders for requests about other files."""
        paths = (path_of(folder.uri) for folder in self.workspace.folders.values())
        self.texts.folders = [path for path in paths if path is not None]

    def watch(self) -> None:
        """Register for changes of files on disk, if the client supports it."""
        asked = self.client_capabilities.workspace and self.client_capabilities.workspace.did_change_watched_files
        if asked and asked.dynamic_registration:
            watched = lsp.DidChangeWatchedFilesRegistrationOptions([lsp.FileSystemWatcher("**/*.kv")])
            one = lsp.Registration("kvdsl-files", lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES, watched)
            self.client_register_capability(lsp.RegistrationParams([one]))

    def publish(self, uris: list[str]) -> None:
        """Send the diagnostics of these texts."""
        for uri in uris:
            found = diagnostics(self.texts.document(uri))
            self.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, found))


def make_server() -> Server:
    """Return a server; `start_io()` runs it on standard input and output."""
    server = Server()
    for add in (_texts, _questions, _names, _commands):
        add(server)
    return server


# -- texts -------------------------------------------------------------------------------------------------------------


def _texts(server: Server) -> None:
    @server.feature(lsp.INITIALIZED)
    def initialized(ls: Server, params: lsp.InitializedParams) -> None:
        ls.texts.encoding = lsp.PositionEncodingKind(ls.workspace.position_encoding).value
        ls.look_at_folders()
        ls.watch()

    @server.feature(lsp.WORKSPACE_DID_CHANGE_WORKSPACE_FOLDERS)
    def folders_changed(ls: Server, params: lsp.DidChangeWorkspaceFoldersParams) -> None:
        ls.look_at_folders()

    @server.feature(lsp.SHUTDOWN)
    def dismissed(ls: Server, params: None = None) -> None:
        ls.dismissed = True

    @server.feature(lsp.TEXT_DOCUMENT_DID_OPEN)
    def opened(ls: Server, params: lsp.DidOpenTextDocumentParams) -> None:
        ls.publish(ls.texts.put(params.text_document.uri, params.text_document.text))

    @server.feature(lsp.TEXT_DOCUMENT_DID_CHANGE)
    def changed(ls: Server, params: lsp.DidChangeTextDocumentParams) -> None:
        ls.publish(ls.texts.put(params.text_document.uri, params.content_changes[-1].text))

    @server.feature(lsp.TEXT_DOCUMENT_DID_CLOSE)
    def closed(ls: Server, params: lsp.DidCloseTextDocumentParams) -> None:
        uri = params.text_document.uri
        ls.publish(ls.texts.close(uri))
        ls.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, []))

    @server.feature(lsp.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    def touched(ls: Server, params: lsp.DidChangeWatchedFilesParams) -> None:
        ls.publish([uri for change in params.changes for uri in ls.texts.touched(change.uri)])


# -- questions about a place or a text ---------------------------------------------------------------------------------


def _questions(server: Server) -> None:
    @server.feature(lsp.TEXT_DOCUMENT_HOVER)
    def hovers(ls: Server, params: lsp.HoverParams) -> lsp.Hover | None:
        return hover(ls.document(params), params.position)

    @server.feature(lsp.TEXT_DOCUMENT_COMPLETION, lsp.CompletionOptions(trigger_characters=[" ", "(", ",", '"']))
    def completes(ls: Server, params: lsp.CompletionParams) -> list[lsp.CompletionItem]:
        return completion(ls.document(params), params.position)

    @server.feature(lsp.TEXT_DOCUMENT_SIGNATURE_HELP, lsp.SignatureHelpOptions(trigger_characters=["(", ","]))
    def signs(ls: Server, params: lsp.SignatureHelpParams) -> lsp.SignatureHelp | None:
        return signature(ls.document(params), params.position)

    @server.feature(lsp.TEXT_DOCUMENT_CODE_ACTION, lsp.CodeActionOptions([lsp.CodeActionKind.QuickFix]))
    def mends(ls: Server, params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
        return fixes(ls.document(params), params.range, ls.texts.texts)

    @server.feature(lsp.TEXT_DOCUMENT_INLAY_HINT)
    def hints(ls: Server, params: lsp.InlayHintParams) -> list[lsp.InlayHint]:
        return inlay_hints(ls.document(params), params.range)

    _about_a_text(server, lsp.TEXT_DOCUMENT_DOCUMENT_SYMBOL, symbols)
    _about_a_text(server, lsp.TEXT_DOCUMENT_FOLDING_RANGE, foldings)
    _about_a_text(server, lsp.TEXT_DOCUMENT_FORMATTING, formatting)
    _about_a_text(server, lsp.TEXT_DOCUMENT_CODE_LENS, lenses)
    _about_a_text(server, lsp.TEXT_DOCUMENT_SEMANTIC_TOKENS_FULL, semantic_tokens, LEGEND)


def _about_a_text(server: Server, feature: str, answer: Callable[[Document], object], options: object = None) -> None:
    @server.feature(feature, options)
    def answers(ls: Server, params: object) -> object:
        return answer(ls.document(params))


# -- names -------------------------------------------------------------------------------------------------------------


def _names(server: Server) -> None:
    @server.feature(lsp.TEXT_DOCUMENT_DEFINITION)
    def defines(ls: Server, params: lsp.DefinitionParams) -> lsp.Location | None:
        return navigation.definition(ls.document(params), params.position)

    @server.feature(lsp.TEXT_DOCUMENT_REFERENCES)
    def refers(ls: Server, params: lsp.ReferenceParams) -> list[lsp.Location]:
        document, declared = ls.document(params), params.context.include_declaration
        others = ls.texts.others(document.uri, navigation.spelled(document, params.position))
        return navigation.references(document, params.position, others, declared=declared)

    @server.feature(lsp.TEXT_DOCUMENT_DOCUMENT_HIGHLIGHT)
    def stands(ls: Server, params: lsp.DocumentHighlightParams) -> list[lsp.DocumentHighlight]:
        return navigation.highlights(ls.document(params), params.position)

    @server.feature(lsp.TEXT_DOCUMENT_PREPARE_RENAME)
    def may_rename(ls: Server, params: lsp.PrepareRenameParams) -> lsp.Range:
        document = ls.document(params)
        try:
            return document.positions.of(navigation.renamable(document, params.position).span)
        except navigation.RenameError as failure:
            raise JsonRpcInvalidParams(str(failure)) from None

    @server.feature(lsp.TEXT_DOCUMENT_RENAME, lsp.RenameOptions(prepare_provider=True))
    def renames(ls: Server, params: lsp.RenameParams) -> lsp.WorkspaceEdit:
        document = ls.document(params)
        others = ls.texts.others(document.uri, navigation.spelled(document, params.position))
        try:
            return navigation.rename(document, params.position, params.new_name, others, ls.texts.texts)
        except navigation.RenameError as failure:
            raise JsonRpcInvalidParams(str(failure)) from None


# -- commands ----------------------------------------------------------------------------------------------------------


def _commands(server: Server) -> None:
    for title, name in COMMANDS.items():
        _command(server, title, name)


def _command(server: Server, title: str, name: str) -> None:
    @server.command(name)
    async def runs(ls: Server, uri: str) -> str:
        """Run `kvdsl TITLE FILE` on the saved file, show its output, and return it."""
        path = path_of(uri)
        if path is None or not path.is_file():
            said = "save the text first"
        else:
            said = await _kvdsl(title, path)
        ls.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, said))
        return said


_RUN = "import sys; sys.path[:] = filter(None, sys.path); from kvdsl.cli import main; sys.exit(main())"
"""`python -m kvdsl`, without the current folder on the import path: modules next to a policy must not replace Python's."""


async def _kvdsl(title: str, path: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _RUN, title, str(path.resolve()), cwd=path.parent, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    out, _ = await process.communicate()
    return out.decode(errors="replace").strip()
