"""The Pygments lexer: nothing is unknown to it, nothing is lost, and its words are the language's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pygments.token import Comment, Error, Keyword, Name, Number, String

from kvdsl.highlight import KvLexer
from kvdsl.ir.ops import NAMED_INPUTS
from kvdsl.shipped import shipped_policies
from kvdsl.syntax.parser import keywords

ROOT = Path(__file__).resolve().parents[1]
FILES = [*sorted(shipped_policies()[0].parent.glob("*.kv")), ROOT / "grammar" / "prelude.kv"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_character_of_a_policy_is_known(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = list(KvLexer(stripnl=False).get_tokens(text))
    assert "".join(value for _, value in found) == text
    assert not [value for kind, value in found if kind is Error]


def test_words_are_told_apart() -> None:
    text = (
        "policy P extends Q {\n  param x = 1.5  # why\n  let f(y) = y\n  score mean(attn over slots) * f(budget)\n  'd'\n}\n"
    )
    kinds = {value: kind for kind, value in KvLexer().get_tokens(text)}
    assert kinds["P"] is kinds["Q"] is Name.Class
    assert kinds["score"] is kinds["over"] is Keyword
    assert (kinds["x"], kinds["f"]) == (Name.Variable, Name.Function)
    assert (kinds["mean"], kinds["attn"], kinds["1.5"]) == (Name.Builtin, Name.Builtin.Pseudo, Number)
    assert (kinds["# why"], kinds["'d'"]) == (Comment.Single, String.Double)


def test_what_is_read_is_no_statement() -> None:
    found = list(KvLexer().get_tokens("budget prompt / 2\noverride budget budget\n"))
    assert [kind for kind, value in found if value == "budget"] == [Keyword, Keyword, Name.Builtin.Pseudo]


def test_every_word_of_the_grammar_is_a_keyword() -> None:
    grammar = (ROOT / "grammar" / "kv.lark").read_text(encoding="utf-8")
    grammar = re.sub(r"//.*", "", grammar)
    assert keywords() == set(re.findall(r'"([a-z_]+)"', grammar))
    kinds = {value: kind for kind, value in KvLexer().get_tokens("\n".join(f"score {word}" for word in sorted(keywords())))}
    unlike = {word for word in keywords() if kinds[word] not in Keyword}
    assert unlike <= NAMED_INPUTS  # `expect attn`, `at layer`


def test_the_lexer_is_registered() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points."pygments.lexers"]\nkvdsl = "kvdsl.highlight:KvLexer"\n' in text
