"""What is said about mistakes is what the corpus shows, and every edit that a help offers mends."""

from __future__ import annotations

import re

import pytest

from kvdsl.codes import CODES
from kvdsl.compiler import analyse
from kvdsl.source import SourceFile
from tests.diagnostics.mistakes import FILES, Mistake, applied, broken_rule, read

MISTAKES = [(name, mistake) for name in FILES for mistake in read(name)]
WORDS_ONLY = {
    "KV0101": "the rest of the statement is not known",
    "KV0104": "which statement is meant is not known",
    "KV0111": "it says what a file may be called",
    "KV0117": "what is written instead depends on what is read",
    "KV0201": "what stands for the name is a choice",
    "KV0202": "a statement does what the function would",
    "KV0204": "it shows the forms of an import; which one is meant is not known",
    "KV0211": "the name and what the policy does are not known",
    "KV0302": "it says what can be read",
    "KV0305": "it says what can stand there",
    "KV0306": "it names what there is",
    "KV0307": "it names what there is",
    "KV0308": "it says what can be read",
    "KV0309": "it says what the function does",
    "KV0321": "the dims to multiply with are the writer's",
    "KV0409": "a param and a name in the line are two edits",
    "KV0421": "it says what a number would do",
    "KV0422": "it says what a number costs",
    "KV0601": "the tests go to another file",
    "KV0602": "which policy is tested is not known",
    "KV0607": "what is kept has to be known",
}
"""Codes some of whose helps quote what is no edit, and why."""


def files() -> list[SourceFile]:
    """The corpus, and the examples of all codes."""
    return [mistake.file for _, mistake in MISTAKES] + [SourceFile("example.kv", code.example) for code in CODES.values()]


@pytest.mark.parametrize(("name", "mistake"), MISTAKES, ids=lambda one: one.title if isinstance(one, Mistake) else one)
def test_what_is_said_is_what_the_corpus_shows(name: str, mistake: Mistake) -> None:
    assert mistake.block() == f"=== {mistake.title}\n{mistake.written}\n---\n{mistake.said}"


def test_every_edit_that_a_help_offers_mends() -> None:
    analyses = [analyse(file) for file in files()]
    assert not [broken for one in analyses for found in one.diagnostics for broken in broken_rule(found, one)]


def test_a_help_that_quotes_code_has_an_edit() -> None:
    found = [one for file in files() for one in analyse(file).diagnostics if one.help and "`" in one.help]
    without = {one.code for one in found if not one.fixes}
    assert without <= WORDS_ONLY.keys()
    proposing = [one for one in found if re.match(r"write |did you mean |compare it|add ", one.help or "")]
    assert not [(one.code, one.help) for one in proposing if not one.fixes and one.code not in ("KV0204", "KV0409")]


@pytest.mark.parametrize(
    ("lines", "help"),
    [
        ("keep where newline > 0", "add `input newline = 0`"),
        ("keep where position >= turn_start", "`keep where turn == turns`, say"),
        ("given importance from caller", "write `input importance`"),
        ("param sizes = [1, 2]", "come from a file: `input sizes [layers] from"),
    ],
)
def test_helps_speak_the_edition_of_the_file(lines: str, help: str) -> None:
    file = Mistake("", lines).file
    analysis = analyse(SourceFile(file.name, file.text.replace("kv 1", "kv 2", 1), file.path))
    found = analysis.diagnostics[0]
    assert help in (found.help or "")
    assert [applied(fix).ok for fix in found.fixes if fix.text.count("\n") < 2] in ([True], [])
    assert not broken_rule(found, analysis)


def test_no_mistake_is_there_twice() -> None:
    written = [mistake.written for _, mistake in MISTAKES]
    assert len(set(written)) == len(written)
