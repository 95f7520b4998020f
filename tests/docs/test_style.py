"""The words that docs/style.md rules out: the table is read, each phrase is found, and nothing that is linted has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import style
from tests.docs.pages import read

WORDS = style.vocabulary(style.PAGE.read_text(encoding="utf-8"))


def phrases(file: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    monkeypatch.setattr(style, "ROOT", file.parent)
    file.write_text(text, encoding="utf-8")
    return [(one.line, one.phrase) for one in style.findings(file, WORDS)]


def test_the_glossary_is_read() -> None:
    assert WORDS["a rate of"] == "ratio" and WORDS["of which"].startswith("whose")
    assert (
        len(WORDS) == read("docs/style.md").partition("## Words")[2].count("`") // 2 - 1 > 30
    )  # `make lint` is the other one


@pytest.mark.parametrize("phrase", WORDS)
def test_a_phrase_is_found_across_lines_and_not_in_code(
    phrase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"Text.\n\nOne {phrase.replace(' ', chr(10), 1)} two, `{phrase}`.\n\n```text\n{phrase}\n```\n"
    assert phrases(tmp_path / "page.md", text, monkeypatch) == [(3, phrase)]


def test_strings_and_comments_of_a_program_are_prose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = '"""A list,\nbut for one."""\nanew = "built anew"  # whoever reads it\nraise ValueError(f"{anew} is told so")\n'
    assert sorted(phrases(tmp_path / "program.py", text, monkeypatch)) == [
        (2, "but for"),
        (3, "anew"),
        (3, "whoever"),
        (4, "is told"),
    ]


def test_pages_messages_and_policies_have_none() -> None:
    files = style.files()
    assert {
        style.ROOT / "README.md",
        style.ROOT / "kvdsl/codes.py",
        style.ROOT / "policies/roco.kv",
        style.ROOT / "tests/diagnostics/mistakes/open.txt",
    } <= {*files}
    assert [str(one) for file in files for one in style.findings(file, WORDS)] == []


def test_the_fifty_sentences_are_what_their_files_say_now() -> None:
    rows = re.findall(
        r"^\| (\d+) \| (?:`[^`]+` → )?`([^`]+)` \| (.+) \| (.+) \|$", read("docs/records/sentences.md"), re.MULTILINE
    )
    assert [int(number) for number, *_ in rows] == [*range(1, 51)]
    for number, file, before, after in rows:
        sentence = before if after == "as it was" else after
        assert plain(sentence) in plain(read(file)), number


def plain(text: str) -> str:
    """Without the ends of lines and of strings, links and list marks."""
    text = re.sub(r'"\s*\n\s*f?"', "", text)
    return " ".join(re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text).replace("\\|", "|").split())
