"""The pages of docs/ that are made from the sources."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvdsl.codes import CODES
from kvdsl.compiler import find_policy
from kvdsl.files import read_resource
from kvdsl.ir.ops import NAMED_FUNCTIONS, NAMED_INPUTS
from kvdsl.reference import STATEMENTS
from kvdsl.shipped import gallery_policies

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.make_docs import MADE, WRITTEN
from scripts.pages import markdown
from scripts.pages.diagnostics import diagnostics_page
from scripts.pages.markdown import DOCS, ROOT, escaped, with_parts
from scripts.pages.policies import policies_index, policy_page
from scripts.pages.reach import reach_page, reached
from scripts.pages.results import HOLDS, REPRODUCED, results_page


@pytest.mark.nightly
@pytest.mark.parametrize("name", WRITTEN)
def test_made_parts_are_up_to_date(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == with_parts(name, WRITTEN[name]), "run scripts/make_docs.py"


def test_made_parts_are_those_that_the_page_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(markdown, "DOCS", tmp_path)
    (tmp_path / "page.md").write_text("Before.\n\n<!-- made: a part -->\nold\n\nold\n<!-- end -->\n\nBehind.\n")
    page = with_parts("page.md", {"a part": lambda: "new\n"})
    assert page == "Before.\n\n<!-- made: a part -->\nnew\n<!-- end -->\n\nBehind.\n"
    with pytest.raises(ValueError, match="'a part'"):
        with_parts("page.md", {"another": lambda: ""})


def test_pages_that_are_made_whole_are_not_committed() -> None:
    told = subprocess.run(["git", "ls-files", "docs"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert not {f"docs/{name}" for name in MADE} & {*told}
    assert not [name for name in told if name.startswith("docs/policies/")]


def test_every_claim_of_a_paper_has_its_verdict() -> None:
    page = results_page()
    for path in REPRODUCED.glob("*.json"):
        for experiment in json.loads(path.read_text(encoding="utf-8"))["experiments"]:
            for finding in experiment["findings"]:
                claim = escaped(finding["claim"]).replace("|", "\\|")
                assert f"| {experiment['source']} | {claim} | {HOLDS[finding['holds']]} |" in page


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
    assert "[KeyDiff](keydiff.md)" in policies_index(gallery_policies(), "The gallery")


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
    page = (DOCS / "language.md").read_text(encoding="utf-8") + diagnostics_page()  # which says what edition 2 has no more
    assert all(re.search(rf"^\| .*`{name}\b", page, re.MULTILINE) for name in NAMED_INPUTS | NAMED_FUNCTIONS)


def test_examples_are_shown_as_they_are() -> None:
    page = diagnostics_page()
    for code in CODES.values():
        if code.example and len(code.example) < 2_000 and code.example.replace("\n", "").isprintable():
            assert f"```text\n{code.example}```" in page
