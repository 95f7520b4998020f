"""Pictures of the documents: each is there, small and told in words, and its script makes it anew."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from PIL import Image

from kvdsl.models import here
from kvdsl.models.catalogue import named
from scripts.pictures.__main__ import NAMES, PICTURES, ROOT, main
from scripts.pictures.terminal import Terminal
from tests.docs.pages import documents, read

LARGEST = 100_000

SHOWS = {
    "overview": ["a policy", "which tokens stay", "score", "for"],
    "overview_narrow": ["a policy", "which tokens stay", "score", "for"],
    "speed": ["8,000 tokens", "transformers", "kvdsl, H2O", "MiB"],
    "check": ["$ kvdsl check mine.kv", "did you mean `sinks`?", "2 errors"],
    "diff": ["- score sum(attn)", "+ score last(attn)", "expect kept"],
    "choosing": ["going on with a text", "snapkv", "cache, MiB"],
    "search": ["policies tried", "bytes of state a slot", "seeds"],
    "editor": ["unknown name `sink`", "explain | test | compile", "4 bytes a slot"],
}
"""Words of pictures that are text."""

NEEDS = {
    "editor": ["nvim", "cc"],
    **{page: ["chromium", "node", "npm"] for page in ("explain", "notebook", "playground", "trace")},
}


def words(svg: Path) -> str:
    tree = ElementTree.parse(svg)
    return " ".join(text.text or "" for text in tree.iter("{http://www.w3.org/2000/svg}text")).replace("\xa0", " ")


@pytest.mark.parametrize("file", PICTURES)
def test_a_picture_is_committed_small_and_shown(file: str) -> None:
    picture = ROOT / "docs" / "assets" / file
    assert picture.stat().st_size <= LARGEST
    assert b"/work" not in picture.read_bytes() and b"/home" not in picture.read_bytes()
    assert all(word in words(picture) for word in SHOWS.get(file.partition(".")[0], []))
    page = {
        "overview.svg": "README.md",
        "speed.svg": "README.md",
        "choosing.svg": "docs/choosing.md",
        "search.svg": "docs/search.md",
    }.get(file, "docs/tour.md")
    assert f"assets/{file})" in read(page) or f'srcset="assets/{file}"' in read("docs/index.md")


@pytest.mark.parametrize("document", documents())
def test_a_picture_is_told_in_words_and_lies_where_the_page_says(document: str) -> None:
    for words, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", read(document)):
        assert len(words.split()) >= 5, target
        assert ((ROOT / document).parent / target).exists(), target


def test_a_terminal_is_drawn_with_its_colours(tmp_path: Path) -> None:
    program = "print('\\x1b[1;31mred\\x1b[0m and \\x1b[4mlined\\x1b[0m  <b>')"
    with Terminal([sys.executable, "-c", program], tmp_path, {}, columns=40, rows=5) as screen:
        screen.until("<b>")
    (tmp_path / "screen.svg").write_text(screen.svg("a test"))
    texts = list(ElementTree.parse(tmp_path / "screen.svg").iter("{http://www.w3.org/2000/svg}text"))
    red, _, lined, last = texts
    assert (red.text, red.get("fill"), red.get("font-weight")) == ("red", "#cf222e", "bold")
    assert (lined.text, lined.get("text-decoration")) == ("lined", "underline")
    assert float(last.get("x") or 0) == pytest.approx(7.23 * len("red and lined  "), abs=0.1)


def test_words_that_never_come_are_an_error(tmp_path: Path) -> None:
    with (
        Terminal([sys.executable, "-c", "print('hello')"], tmp_path, {}) as screen,
        pytest.raises(RuntimeError, match=r"\['bye'\] did not appear; the screen shows:\nhello"),
    ):
        screen.until("hello", "bye")


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_made_anew(name: str, tmp_path: Path) -> None:
    if missing := [program for program in NEEDS.get(name, []) if not shutil.which(program)]:
        pytest.skip(f"needs {' and '.join(missing)}")
    if name == "notebook" and importlib.util.find_spec("nbconvert") is None:
        pytest.skip("needs nbconvert")
    if name.startswith("overview") and not here(named("smollm2")):
        pytest.skip("needs SmolLM2 (`kvdsl models get smollm2`)")
    done = CliRunner().invoke(main, [name, "--out", str(tmp_path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    made = tmp_path / NAMES[name]
    assert made.stat().st_size <= LARGEST
    if made.suffix == ".svg":
        shown = words(made)
        assert all(word in shown for word in SHOWS[name]), shown
    else:
        with Image.open(made) as picture, Image.open(ROOT / "docs" / "assets" / made.name) as committed:
            assert picture.width == committed.width
            assert len(picture.convert("RGB").getcolors(maxcolors=256) or []) > 20
