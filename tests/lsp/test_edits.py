"""Random edits of shipped policies: whatever stands there, every question has an answer."""

from __future__ import annotations

import pytest

from kvdsl.lsp import read_document
from tests.lsp.edits import QUESTIONS, edited


def ask_everything(seed: int, count: int) -> None:
    for text, at in edited(seed, count):
        document = read_document("untitled:policy", text, "utf-16")
        assert document.positions.offset(document.positions.position(len(document.text))) == len(document.text)
        place = document.positions.position(min(at, len(document.text)))
        for question in QUESTIONS.values():
            question(document, place)


def test_every_question_is_answered() -> None:
    ask_everything(seed=1, count=30)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 6))
def test_every_question_is_answered_of_many_more(seed: int) -> None:
    ask_everything(seed, count=1_000)


def test_edits_are_what_they_are_called() -> None:
    """The same for the same seed, others for others, and most of them of texts that still have something in them."""
    texts = [text for text, _ in edited(7, 40)]
    assert texts == [text for text, _ in edited(7, 40)]
    assert texts != [text for text, _ in edited(8, 40)]
    assert sum(len(text) > 100 for text in texts) > 20
