"""Policies that are made of others, `A = B with ...`, in an editor."""

from __future__ import annotations

from pathlib import Path

import pytest
from lsprotocol import types as lsp

from kvdsl.lsp import Document, read_document
from kvdsl.lsp.completion import completion
from kvdsl.lsp.hover import hover
from kvdsl.lsp.navigation import definition, references, rename
from kvdsl.lsp.outline import symbols
from kvdsl.reference import STATEMENTS

HEAD = "kv 1\nimport h2o\n\n"
BASE = 'kv 1\n\npolicy Base {\n  "A base."\n  param budget = 64\n  param beta = 20\n  score mean(attn) * beta\n}\n'


def asked(marked: str, uri: str = "untitled:x") -> tuple[Document, lsp.Position]:
    """A text, and the place of the `|` in it."""
    at = marked.index("|")
    document = read_document(uri, marked.replace("|", "", 1), "utf-16")
    return document, document.positions.position(at)


def offered(marked: str) -> list[str]:
    return [item.label for item in completion(*asked(marked))]


def test_what_stands_before_with_is_a_policy() -> None:
    found = completion(*asked("kv 1\n\npolicy Mine = |"))
    (tova,) = (item for item in found if item.label == "TOVA")
    assert tova.additional_text_edits is not None
    assert tova.additional_text_edits[0].new_text == "import tova\n"
    assert offered(f"{HEAD}policy Mine = H2O |") == ["with"]


@pytest.mark.parametrize("before", ["with ", "with when prefill, ", "with score max_pool(last(attn), 7), "])
def test_clauses_are_statements(before: str) -> None:
    """Each explained, as in braces."""
    items = completion(*asked(f"{HEAD}policy Mine = H2O {before}|"))
    details = {item.label: item.detail for item in items}
    assert {"score", "keep", "when", "layers"} <= details.keys()
    assert "override" not in details
    assert details["when"] == STATEMENTS["when"][0]


@pytest.mark.parametrize(
    ("clause", "some"),
    [
        ("when |", {"prefill", "decode", "both"}),
        ("layers 2.., when |", {"prefill", "decode", "both"}),
        ("keep |", {"first", "last", "top", "where"}),
        ("score max(|", {"attn", "recent", "norm1"}),
        ("score max(age, |", {"attn", "recent", "norm1"}),
        ("keep last |", {"recent", "budget"}),
        ("score mean(attn over |", {"slots", "last"}),
    ],
)
def test_inside_of_a_clause_it_is_as_in_braces(clause: str, some: set[str]) -> None:
    line = offered(f"{HEAD}policy Mine = H2O with {clause}")
    assert some <= set(line)
    alone = clause.rpartition(".., ")[2]
    assert set(line) == set(offered(f"{HEAD}policy Mine = H2O with {{\n  {alone}"))


def test_words_are_explained() -> None:
    def said(marked: str) -> str:
        found = hover(*asked(marked))
        assert found is not None and isinstance(found.contents, lsp.MarkupContent)
        return found.contents.value

    assert "statements that replace those of the policy before it" in said(f"{HEAD}policy Mine = H2O w|ith when prefill\n")
    assert "the phase in which it evicts" in said(f"{HEAD}policy Mine = H2O with w|hen prefill\n")
    assert "with clauses" in said(f"{HEAD}poli|cy Mine = H2O with when prefill\n")
    assert "policy Mine = H2O with" in said(f"{HEAD}policy Mi|ne = H2O with when prefill\n")
    assert "sum(attn)" not in said(f"{HEAD}policy Mine = H|2O with when prefill\n")
    assert "H2O: Heavy-Hitter Oracle" in said(f"{HEAD}policy Mine = H|2O with when prefill\n")


def test_the_outline_says_of_what_it_is_made() -> None:
    document, _ = asked(f"{HEAD}policy Mine = H2O with when prefill, param recent = 3|\n")
    (policy,) = symbols(document)
    assert (policy.name, policy.detail) == ("Mine", "= H2O with")
    assert [(one.name, one.detail) for one in policy.children or ()] == [("when prefill", None), ("recent", "= 3")]


def test_what_a_clause_names_is_the_base_s(tmp_path: Path) -> None:
    base = read_document((tmp_path / "base.kv").as_uri(), BASE, "utf-16")
    (tmp_path / "base.kv").write_text(BASE)
    line = 'kv 1\nimport "base.kv"\n\npolicy Mine = Ba|se with param beta = 3, keep first beta\n'
    mine, at = asked(line, (tmp_path / "mine.kv").as_uri())
    assert not mine.diagnostics
    found = definition(mine, at)
    assert found is not None and (found.uri, found.range.start.line) == (base.uri, 2)
    beta = mine.positions.position(mine.text.index("beta"))
    found = definition(mine, beta)
    assert found is not None and (found.uri, found.range.start.line) == (base.uri, 5)
    places = references(mine, beta, [base], declared=True)
    assert [(one.uri, one.range.start.line) for one in places] == [(mine.uri, 3)] * 2 + [(base.uri, 5), (base.uri, 6)]
    edit = rename(mine, beta, "weight", [base])
    assert {uri: len(edits) for uri, edits in (edit.changes or {}).items()} == {mine.uri: 2, base.uri: 2}
