#!/usr/bin/env python
"""Edits shipped policies at random through `kvdsl lsp`, over pipes, as an editor does, and asks a question after each edit.

    python -m scripts.fuzz.edits --edits 100000

Says how many edits were made, whether the server ever failed, and how long the slowest answers took: the time from the edit to its
diagnostics, and from each question to its answer; and how long the server had the processor for it, which does not grow where the
machine does other work as well. `--minutes` ends it sooner, with what was made until then.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from lsprotocol import types as lsp

from kvdsl.lsp.positions import Positions
from tests.lsp.edits import EDITS_A_TEXT, edited
from tests.lsp.harness import Client, client

TOO_LONG = 1.0
"""Seconds in which every answer has to come."""


def questions(one: Client, document: lsp.TextDocumentIdentifier, place: lsp.Position) -> dict[str, Callable[[], Any]]:
    """The requests, by the last part of their names."""
    ask, whole = one.ask, lsp.Range(lsp.Position(0, 0), lsp.Position(2_000, 0))
    context = lsp.CodeActionContext([])
    return {
        "hover": lambda: ask.text_document_hover_async(lsp.HoverParams(document, place)),
        "completion": lambda: ask.text_document_completion_async(lsp.CompletionParams(document, place)),
        "signatureHelp": lambda: ask.text_document_signature_help_async(lsp.SignatureHelpParams(document, place)),
        "definition": lambda: ask.text_document_definition_async(lsp.DefinitionParams(document, place)),
        "references": lambda: ask.text_document_references_async(
            lsp.ReferenceParams(lsp.ReferenceContext(True), document, place)
        ),
        "documentHighlight": lambda: ask.text_document_document_highlight_async(
            lsp.DocumentHighlightParams(document, place)
        ),
        "documentSymbol": lambda: ask.text_document_document_symbol_async(lsp.DocumentSymbolParams(document)),
        "foldingRange": lambda: ask.text_document_folding_range_async(lsp.FoldingRangeParams(document)),
        "formatting": lambda: ask.text_document_formatting_async(
            lsp.DocumentFormattingParams(document, lsp.FormattingOptions(2, True))
        ),
        "semanticTokens": lambda: ask.text_document_semantic_tokens_full_async(lsp.SemanticTokensParams(document)),
        "inlayHint": lambda: ask.text_document_inlay_hint_async(lsp.InlayHintParams(document, whole)),
        "codeLens": lambda: ask.text_document_code_lens_async(lsp.CodeLensParams(document)),
        "codeAction": lambda: ask.text_document_code_action_async(
            lsp.CodeActionParams(document, lsp.Range(place, place), context)
        ),
    }


class Watch:
    """How long the slowest answers took, by name: in all, and of the server's processor."""

    def __init__(self, server: psutil.Process) -> None:
        self._server = server
        self.wall: defaultdict[str, float] = defaultdict(float)
        self.processor: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        begun, used = time.monotonic(), self._used()
        try:
            yield
        finally:
            self.wall[name] = max(self.wall[name], time.monotonic() - begun)
            self.processor[name] = max(self.processor[name], self._used() - used)

    def _used(self) -> float:
        return sum(self._server.cpu_times()[:2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end sooner, after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the texts are said to lie; an empty folder unless given")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        run(given, given.folder or Path(empty))


def run(given: argparse.Namespace, folder: Path) -> None:
    begun, failed, made = time.monotonic(), [], 0
    chance = random.Random(given.seed)
    with client(folder) as one:
        watch = Watch(psutil.Process(one.ask._server.pid))
        for made, (text, offset) in enumerate(edited(given.seed, given.edits), 1):
            uri = (folder / f"edited_{(made - 1) // EDITS_A_TEXT % 4}.kv").as_uri()
            with watch("diagnostics"):
                one.open(uri, text)
            plain = text.replace("\r\n", "\n").replace("\r", "\n")
            place = Positions(plain).position(min(offset, len(plain)))
            name, ask = chance.choice(list(questions(one, lsp.TextDocumentIdentifier(uri), place).items()))
            try:
                with watch(name):
                    one.wait(ask())
            except Exception as failure:
                failed.append({"edit": made, "question": name, "failure": str(failure), "text": text})
            if time.monotonic() - begun > 60 * given.minutes:
                break
    late = {name: round(seconds, 3) for name, seconds in sorted(watch.wall.items()) if seconds > TOO_LONG}
    said = {
        "edits": made,
        "failures": len(failed),
        "first": failed[:3],
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "slowest_ms": {name: round(1e3 * seconds) for name, seconds in sorted(watch.wall.items())},
        "processor_ms": {name: round(1e3 * seconds) for name, seconds in sorted(watch.processor.items())},
        "over_a_second": late,
    }
    print(json.dumps(said, indent=2, ensure_ascii=False))
    raise SystemExit(bool(failed))


if __name__ == "__main__":
    main()
