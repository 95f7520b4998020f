"""The pages of docs/ that are made from the sources."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from kvdsl.codes import CODES
from kvdsl.compiler import find_policy
from kvdsl.ir.ops import NAMED_FUNCTIONS, NAMED_INPUTS
from kvdsl.reference import STATEMENTS
from kvdsl.resources import read_resource

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.make_docs import COMMITTED
from scripts.pages.diagnostics import diagnostics_page
from scripts.pages.language import language_reference
from scripts.pages.markdown import DOCS, ROOT
from scripts.pages.policies import policy_page, policy_pages
from scripts.pages.reach import reach_page, reached


@pytest.mark.nightly
@pytest.mark.parametrize("name", COMMITTED)
def test_pages_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == COMMITTED[name](), "run scripts/make_docs.py"


def test_a_policy_s_page_has_its_file_its_notes_and_its_tests() -> None:
    page = policy_page(find_policy("roco"))
    for path in (ROOT / "policies/roco.kv", ROOT / "docs/notes/roco.md", ROOT / "policies/roco_test.kv"):
        assert path.read_text(encoding="utf-8") in page


@pytest.mark.nightly
def test_reach_counts_every_method_once_and_links_every_policy_that_names_one() -> None:
    page = reach_page()
    total, exact, near, missing = map(
        int, re.findall(r"Of (\d+) published.*?\*\*(\d+) ex.*?\*\*(\d+) app.*?(\d+) not", page, re.DOTALL)[0]
    )
    assert total == exact + near + missing
    exactly, nearly, out = (re.findall(r"^\| ([^|`]+?) \| [^|]+ \|", part, re.MULTILINE) for part in page.split("\n## ")[1:])
    heads = {"method", "---", "idea"}
    assert [len({*rows} - heads) for rows in (exactly, {*nearly} - {*exactly}, out)] == [exact, near, missing]
    for one in reached():
        assert one.link in page


@pytest.mark.nightly
def test_a_gallery_policy_has_a_page() -> None:
    page = policy_page(find_policy("keydiff"))
    assert "## policies/gallery/keydiff.kv" in page
    assert "| year | 2025, arXiv 2504.15364 |" in page
    assert "policies/gallery/keydiff.md" in policy_pages()


def test_every_code_has_its_place() -> None:
    page = diagnostics_page()
    assert all(f"### {code}: " in page for code in CODES)
    assert page.count("\n## ") == len({code[:4] for code in CODES})


def test_the_tables_know_the_whole_language() -> None:
    """A statement, input or function that is added to the language has to be explained."""
    grammar = re.sub(r"[ ]+//.*", "", read_resource("grammar", "kv.lark"))
    plain = re.search(r"^\?plain: (.*?)\n\n", grammar, re.MULTILINE | re.DOTALL)
    assert plain is not None
    named = {
        rule: re.findall(r"-> (\w+)$", text, re.MULTILINE)
        for rule, text in re.findall(r"^\?(\w+): (.*(?:\n +\|.*)+)", grammar, re.MULTILINE)
    }
    assert {name for rule in re.findall(r"\w+", plain[1]) for name in named.get(rule) or [rule]} == STATEMENTS.keys()
    page = language_reference()
    assert all(re.search(rf"^\| .*`{name}\b", page, re.MULTILINE) for name in NAMED_INPUTS | NAMED_FUNCTIONS)


def test_examples_are_shown_as_they_are() -> None:
    page = diagnostics_page()
    for code in CODES.values():
        if code.example and len(code.example) < 2_000 and code.example.replace("\n", "").isprintable():
            assert f"```text\n{code.example}```" in page
