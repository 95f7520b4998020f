"""What docstrings say of a policy's source."""

from __future__ import annotations

import pytest

from kvdsl.errors import KvdslError
from kvdsl.provenance import NOT_COMPARED, Provenance, fields, prose, provenance

DOC = """
Evicts something.

It does so well.

paper: Doe and Roe, "A Title that
  is long: and goes on"
year: 2025, arXiv 2501.00001
method: One, Two
reach: approximate: in blocks, not by token
kvpress: OnePress
checked: formula, language
code: differs: each query head
  chooses
"""


def test_the_last_paragraph_says_it() -> None:
    assert provenance("Mine", DOC) == Provenance(
        paper='Doe and Roe, "A Title that is long: and goes on"',
        year=2025,
        arxiv="2501.00001",
        methods=("One", "Two"),
        how="in blocks, not by token",
        presses=("OnePress",),
        checks=("formula", "language"),
        code="differs: each query head chooses",
    )
    assert prose(DOC) == "Evicts something.\n\nIt does so well."
    assert list(fields(DOC)) == ["paper", "year", "method", "reach", "kvpress", "checked", "code"]


def test_what_may_be_left_out() -> None:
    found = provenance("Mine", "It.\n\npaper: no paper; a baseline\nreach: exact\nchecked: language")
    assert found is not None and found.exact and found.code == NOT_COMPARED
    assert (found.methods, found.paper, found.year, found.arxiv, found.presses) == (("Mine",), None, None, None, ())


@pytest.mark.parametrize("code", ["same", "same with window=8", "differs: in blocks", "none released", "not compared"])
def test_how_far_the_authors_code_agrees(code: str) -> None:
    found = provenance("Mine", DOC.replace("differs: each query head\n  chooses", code))
    assert found is not None and found.code == code


@pytest.mark.parametrize("doc", ["", "Evicts.", 'Evicts.\n\nDoe, "Paper: a Title", 2024.', "paper: alone"])
def test_a_docstring_may_say_nothing_of_it(doc: str) -> None:
    assert provenance("Mine", doc) is None
    assert fields(doc) == {}
    assert prose(doc) == doc


@pytest.mark.parametrize(
    ("line", "by", "message"),
    [
        ("reach: approximate: in blocks, not by token\n", "", "Mine states its source, but has no `reach:`"),
        ("arXiv 2501.00001", "arxiv.org/2501", "Mine: `year: 2025, arxiv.org/2501` is not of the form"),
        ("approximate: in", "nearly: in", "is neither `exact` nor `approximate: ` with how"),
        ("differs: each", "unlike: each", "Mine: `code: unlike: each query head chooses` has none of the forms `same`, `same with`, `diff"),
        ("differs: each query head\n  chooses", "same with", "Mine: `code: same with` has none of the forms"),
        ("checked: formula", "checked: looked", "there is no check `looked`; there are language, formula, kvpress"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(line: str, by: str, message: str) -> None:
    with pytest.raises(KvdslError) as raised:
        provenance("Mine", DOC.replace(line, by))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
