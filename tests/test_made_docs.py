"""The pages of docs/ that are made from the sources."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from kvdsl.codes import CODES
from kvdsl.compiler import shipped_policies
from kvdsl.ir.axes import INPUT_AXES
from kvdsl.reproduce.experiment import Setup
from kvdsl.sema.expressions import BUILTIN_FUNCTIONS

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import make_docs

PAGES = make_docs.pages()


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_up_to_date(name: str) -> None:
    path = make_docs.DOCS / name
    assert path.exists(), "run scripts/make_docs.py"
    assert path.read_text(encoding="utf-8") == PAGES[name], "run scripts/make_docs.py"


def test_results_are_of_the_weights_that_ship() -> None:
    setups = [json.loads(path.read_text(encoding="utf-8"))["setup"] for path in sorted(make_docs.REPRODUCED.glob("*.json"))]
    models = {setup["model"] for setup in setups if "model" in setup}  # one paper runs on shapes alone
    assert models == {Setup().facts()["model"]}, "run `kvdsl reproduce` again, or say why they stay"


def test_no_page_is_left_over() -> None:
    stems = {path.stem for path in (make_docs.DOCS / "policies").glob("*.md")} - {"index"}
    assert stems == {path.stem for path in shipped_policies()}
    notes = {path.stem for path in (make_docs.DOCS / "notes").glob("*.md")}
    assert notes <= stems


def test_every_code_has_its_place() -> None:
    page = PAGES["diagnostics.md"]
    assert all(f"### {code}: " in page for code in CODES)
    assert page.count("\n## ") == len({code[:4] for code in CODES})


def test_the_tables_know_the_whole_language() -> None:
    """A statement, input or function that is added to the language has to be explained."""
    plain = re.search(r"^\?plain: (.*?)\n\n", make_docs.read_resource("grammar", "kv.lark"), re.MULTILINE | re.DOTALL)
    assert plain is not None
    assert set(re.findall(r"\w+", plain[1])) == make_docs.STATEMENTS.keys()
    assert make_docs.INPUTS.keys() == INPUT_AXES.keys() - {"observed"}
    named = {name for title in make_docs.FUNCTIONS for name in re.findall(r"[a-z]\w+", re.sub(r"\(.*?\)", "", title))}
    assert named - {"and", "or", "not"} == BUILTIN_FUNCTIONS


def test_examples_are_shown_as_they_are() -> None:
    page = PAGES["diagnostics.md"]
    for code in CODES.values():
        if code.example and len(code.example) < 2_000 and code.example.replace("\n", "").isprintable():
            assert f"```text\n{code.example}```" in page
