"""What a help offers, the editor offers: for the example of every code."""

from __future__ import annotations

import pytest
from lsprotocol import types as lsp

from kvdsl.codes import CODES
from kvdsl.lsp import read_document
from kvdsl.lsp.diagnostics import fixes

EVERYWHERE = lsp.Range(lsp.Position(0, 0), lsp.Position(10_000, 0))


@pytest.mark.parametrize("code", CODES)
def test_the_editor_offers_the_edits_of_the_help(code: str) -> None:
    document = read_document("file:///mine.kv", CODES[code].example, "utf-16")
    told = [fix.title for found in document.diagnostics for fix in found.fixes]
    assert [action.title for action in fixes(document, EVERYWHERE)] == told


def test_an_edit_that_would_not_mend_is_not_offered() -> None:
    text = 'kv 1\n\npolicy P {\n  "A test."\n  param budget = 8\n  score 2 mean(attn) + 3 std(attn)\n}\n'
    document = read_document("file:///mine.kv", text, "utf-16")
    (found,) = document.diagnostics
    assert [fix.title for fix in found.fixes] == ["write `2 * mean(attn)`"]
    assert fixes(document, EVERYWHERE) == []
