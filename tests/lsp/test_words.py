"""No list of words lags behind: whatever the shipped policies say would have been offered, and is explained."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from lsprotocol import types as lsp

from kvdsl.ir.ops import NAMED_FUNCTIONS, NAMED_INPUTS
from kvdsl.lsp import Document, read_document
from kvdsl.lsp.completion import completion
from kvdsl.lsp.hover import hover
from kvdsl.lsp.tokens import LEGEND, semantic_tokens
from kvdsl.reference import ITEMS, STATEMENTS, STEPS, first_word, form, grammar_rules, meaning, parameters
from kvdsl.shipped import gallery_policies, shipped_policies
from kvdsl.syntax.parser import keywords

FILES = sorted(shipped_policies()[0].parent.glob("*.kv"))
LEARNED = [path for path in sorted(gallery_policies()[0].parent.glob("kvzap*.kv")) if "once" not in path.stem]
ONE_OF_EACH = [path for path in FILES if path.stem in ("pyramidkv", "quest", "sparcas_test", "lazy_streaming", "roco_test")]
ONE_OF_EACH += LEARNED


def read(path: Path) -> Document:
    return read_document(path.as_uri(), path.read_text(encoding="utf-8"), "utf-16")


@pytest.mark.parametrize("path", ONE_OF_EACH, ids=lambda path: path.stem)
def test_what_stands_there_would_have_been_offered(path: Path) -> None:
    """Keywords and names, each once behind every word that it follows; what is defined there is new."""
    whole = read(path)
    seen: set[tuple[str, str]] = set()
    for before_it, token in pairwise(whole.tokens):
        start = token.start_pos or 0
        name = whole.names.by_start.get(start)
        word = str(token)
        if not word.isidentifier() or (token.type == "NAME" and (name is None or name.defines)):
            continue
        if (name is not None and name.kind == "argument") or (str(before_it), word) in seen:
            continue
        seen.add((str(before_it), word))
        before = read_document(path.as_uri(), whole.text[:start], "utf-16")
        offered = {item.label for item in completion(before, before.positions.position(start))}
        assert word in offered, whole.text[max(0, start - 60) : start]


@pytest.mark.parametrize("path", [*FILES, *LEARNED], ids=lambda path: path.stem)
def test_every_word_is_explained_and_coloured(path: Path) -> None:
    document = read(path)
    data = semantic_tokens(document).data
    coloured, line, column = set(), 0, 0
    for index in range(0, len(data), 5):
        line, column = (line + data[index], data[index + 1]) if data[index] else (line, column + data[index + 1])
        coloured.add((line, column))
        assert data[index + 3] < len(LEGEND.token_types)
    for token in document.tokens:
        place = document.positions.position(token.start_pos or 0)
        if str(token).isidentifier() and token.type != "NAME":
            assert hover(document, place) is not None, token
            assert (place.line, place.character) in coloured, token


def test_tables_name_what_the_grammar_has() -> None:
    assert {*ITEMS, *STATEMENTS, *STEPS} <= grammar_rules().keys()
    firsts = {first_word(rule) for rule in (*ITEMS, *STATEMENTS, *STEPS)}
    begin = {
        first_word(rule) for rule, body in grammar_rules().items() if rule.islower() and body.startswith('"')
    } & keywords()
    inside = {
        "across",
        "at",
        "over",
        "where",
        "by",
        "override",
        "query",
        "key",
        "value",
        "rest",
        "from",
        "in",
    }  # of statements, rather than statements
    assert begin - inside <= firsts
    for rule in (*ITEMS, *STATEMENTS, *STEPS):
        assert '"' not in form(rule)


def test_every_built_in_name_has_a_meaning_and_parameters() -> None:
    for name in NAMED_FUNCTIONS | NAMED_INPUTS:
        assert meaning(name)
    for name in NAMED_FUNCTIONS:
        assert isinstance(parameters(name), tuple)
    assert parameters("max") == ("x",)
    assert parameters("max", extreme=True) == ("a", "b")
    assert parameters("where") == ("c", "a", "b")


def test_every_keyword_is_offered_somewhere() -> None:
    """By the parser's own tables, of which these prefixes ask at every kind of place."""
    policy = 'kv 1\nimport h2o\npolicy P extends H2O {\n"P."\n'
    test = 'kv 1\nimport h2o\ntest "t" {\nuse H2O'
    prefixes = [
        "", "kv 1\npolicy P ", "kv 1\npolicy P = H2O ", policy, policy + "override ", policy + "keep ",
        policy + "keep top 3 ", policy + "keep where age ",
        policy + "budget 3 ", policy + "budget 3 across ", policy + "budget 3 across heads ",
        policy + "budget 3 at ", policy + "budget 3 across layers ", policy + "budget 3 across layers by layer ", policy + "victims ",
        policy + "victims shared ", policy + "trigger ", policy + "select ", policy + "select top 3 by q ", policy + "score ",
        policy + "select top 3 by q in ",
        policy + "select top 3 by q in layers 2 ", policy + "select top 3 by q in layers 2, 3 reused ",
        policy + "sketch top 3 ", policy + "sketch top 3 dims ", policy + "prefill blocks ",
        policy + "sketch top 3 dims by q ", policy + "sketch top 3 dims by q every 3 ", policy + "score mean(attn ",
        policy + "tensor x [dims] ", policy + "given x ", policy + "pages 3 ", policy + "score mean(attn over next ",
        policy + "score mean(attn over ", policy + "score mean(attn over slots ",
        policy + "score mean(attn over text ",
        policy + "when prefill ", policy + "score mean(attn over last 3 ", test + " ", test + " at ", test + " at layer 3 ",
        test + "\n", test + "\nexpect ", test + "\nattend ", test + "\nattend 1 ", test + "\ntoken ", test + "\nprompt {\n",
        test + "\nexpect kept ", test + "\n3 ", test + "\ntoken query 3 ", test + "\nattend -",
    ]  # fmt: skip
    offered: set[str] = set()
    for text in prefixes:
        document = read_document("untitled:x", text, "utf-16")
        offered |= {one.label for one in completion(document, lsp.Position(text.count("\n"), len(text.rpartition("\n")[2])))}
    assert keywords() <= offered
