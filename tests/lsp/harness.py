"""A client that speaks with `kvdsl lsp` over pipes, as an editor does: pygls's own, on a loop in a thread."""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
from collections import defaultdict
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from lsprotocol import types as lsp
from pygls.lsp.client import LanguageClient

ROOT = Path(__file__).resolve().parents[2]
T = TypeVar("T")
LONG = 1_800
"""Seconds after which a server counts as stuck, on a machine however loaded."""


class Client:
    """One server, and the texts that are open in it. `ask` is pygls's client, whose requests are awaited."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.ask = LanguageClient("tests", "1")
        self.published: defaultdict[str, queue.Queue[list[lsp.Diagnostic]]] = defaultdict(queue.Queue)
        self.messages: queue.Queue[str] = queue.Queue()
        self.registered: queue.Queue[lsp.Registration] = queue.Queue()
        self.versions: dict[str, int] = {}

        @self.ask.feature(lsp.TEXT_DOCUMENT_PUBLISH_DIAGNOSTICS)
        def published(params: lsp.PublishDiagnosticsParams) -> None:
            self.published[params.uri].put(list(params.diagnostics))

        @self.ask.feature(lsp.CLIENT_REGISTER_CAPABILITY)
        def registered(params: lsp.RegistrationParams) -> None:
            for one in params.registrations:
                self.registered.put(one)

        @self.ask.feature(lsp.WINDOW_SHOW_MESSAGE)
        def shown(params: lsp.ShowMessageParams) -> None:
            self.messages.put(params.message)

    def wait(self, request: Coroutine[Any, Any, T]) -> T:
        """The answer to a request."""
        return asyncio.run_coroutine_threadsafe(request, self.loop).result(LONG)

    def start(self, folder: Path, encodings: list[lsp.PositionEncodingKind] | None = None) -> lsp.InitializeResult:
        """Starts the server, with no torch to be had."""
        code = "import sys; sys.modules.update(torch=None, transformers=None)\nfrom kvdsl.cli import main; sys.exit(main(['lsp']))"
        self.wait(self.ask.start_io(sys.executable, "-c", code, env=os.environ | {"PYTHONPATH": str(ROOT)}))
        watching = lsp.DidChangeWatchedFilesClientCapabilities(dynamic_registration=True)
        capabilities = lsp.ClientCapabilities(
            general=lsp.GeneralClientCapabilities(position_encodings=encodings),
            workspace=lsp.WorkspaceClientCapabilities(did_change_watched_files=watching),
        )
        folders = [lsp.WorkspaceFolder(folder.as_uri(), folder.name)]
        params = lsp.InitializeParams(
            capabilities, process_id=os.getpid(), root_uri=folder.as_uri(), workspace_folders=folders
        )
        started = self.wait(self.ask.initialize_async(params))
        self.do(lambda: self.ask.initialized(lsp.InitializedParams()))
        return started

    def do(self, notify: Any) -> None:
        """Sends a notification, from the loop's own thread."""

        async def send() -> None:
            notify()

        self.wait(send())

    def stop(self) -> int | None:
        """Ends the server as an editor does; its exit code."""
        self.wait(self.ask.shutdown_async(None))
        server = self.ask._server
        self.do(lambda: self.ask.exit(None))

        async def ended() -> int | None:
            assert server is not None
            return await server.wait()

        code = self.wait(ended())
        self.wait(self.ask.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        return code

    # -- texts ---------------------------------------------------------------------------------------------------------

    def open(self, uri: str, text: str) -> list[lsp.Diagnostic]:
        """Opens a text, or changes it, and gives what is wrong with it."""
        if uri in self.versions:
            self.versions[uri] += 1
            changed = lsp.VersionedTextDocumentIdentifier(self.versions[uri], uri)
            whole = [lsp.TextDocumentContentChangeWholeDocument(text)]
            self.do(lambda: self.ask.text_document_did_change(lsp.DidChangeTextDocumentParams(changed, whole)))
        else:
            self.versions[uri] = 1
            item = lsp.TextDocumentItem(uri, "kv", 1, text)
            self.do(lambda: self.ask.text_document_did_open(lsp.DidOpenTextDocumentParams(item)))
        return self.diagnostics(uri)

    def diagnostics(self, uri: str) -> list[lsp.Diagnostic]:
        """What is published next of a text."""
        return self.published[uri].get(timeout=LONG)

    def close(self, uri: str) -> None:
        """Closes a text."""
        del self.versions[uri]
        document = lsp.TextDocumentIdentifier(uri)
        self.do(lambda: self.ask.text_document_did_close(lsp.DidCloseTextDocumentParams(document)))
        self.diagnostics(uri)


@contextmanager
def client(folder: Path) -> Iterator[Client]:
    """A client with a started server, which is ended and has ended well."""
    one = Client()
    one.start(folder)
    yield one
    code = one.stop()
    assert code == 0, code


def marked(text: str) -> tuple[str, lsp.Position]:
    """A text with `|` in it without that, and the position at which it stood."""
    before, _, after = text.partition("|")
    return before + after, lsp.Position(before.count("\n"), len(before.rpartition("\n")[2].encode("utf-16-le")) // 2)
