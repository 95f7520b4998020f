"""Where a finding names its fix, the editor offers it: for the example of every code."""

from __future__ import annotations

import pytest
from lsprotocol import types as lsp

from kvdsl.codes import CODES
from kvdsl.lsp.document import read_document
from kvdsl.lsp.fixes import fixes

EVERYWHERE = lsp.Range(lsp.Position(0, 0), lsp.Position(10_000, 0))
NOT_AN_EDIT = {
    "KV0204": "it shows the forms of an import; which one is meant is not known",
    "KV0211": "the name and what the policy does are not known",
    "KV0219": "the file is the writer's",
    "KV0220": "the number to begin with is the writer's",
    "KV0323": "the places to turn to are the writer's",
    "KV0409": "a param and a name in the line are two edits",
    "KV0415": "how many tokens are meant is not known",
    "KV0418": "what is read in its place is not the same",
    "KV0420": "how long a block is meant to be is not known",
    "KV0421": "it says what a number would do",
    "KV0422": "it says what a number costs",
    "KV0441": "`reused above` is one of two ways out, and the other one is in words",
    "KV0601": "the tests go to another file",
    "KV0602": "which policy is tested is not known",
    "KV0607": "what is kept has to be known",
}
"""Helps that quote code which is no recipe for the place, and why."""


@pytest.mark.parametrize("code", CODES)
def test_a_help_that_names_an_edit_is_one(code: str) -> None:
    document = read_document("file:///mine.kv", CODES[code].example, "utf-16")
    found = next((one for one in document.diagnostics if one.code == code), None)
    help = "" if found is None else found.help or ""
    quotes = "`" in help or help.startswith("leave out")
    offered = [action for action in fixes(document, EVERYWHERE) if (action.diagnostics or [])[0].code == code]
    assert bool(offered) == (quotes and code not in NOT_AN_EDIT), found
