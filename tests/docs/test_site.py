"""The site: what its menu says, and its pages in a real browser, on a phone's screen and on a desk's, light and dark."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_notebook, new_output

from scripts import make_notebooks
from scripts.pages.policies import policy_page
from tests.browser import CHROMIUM, DRIVER, Browser, browser
from tests.docs.pages import ROOT, read

WIDTHS = (390, 1280)

needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)",
)


def menu(tree: list[Any], above: str = "kvdsl") -> Iterator[tuple[str, str, str]]:
    """Of every page the section that it is in, what the menu calls it, and its file."""
    for entry in tree:
        (title, inside) = (None, entry) if isinstance(entry, str) else next(iter(entry.items()))
        if isinstance(inside, list):
            assert title is not None
            yield from menu(inside, title)
        else:
            yield above, title if title is not None else heading(inside), inside


def heading(page: str) -> str:
    """Of a page that is written by hand; the others have theirs when they are made."""
    file = ROOT / "docs" / page
    return file.read_text(encoding="utf-8").partition("# ")[2].partition("\n")[0] if file.exists() else page


def test_the_menu_says_a_thing_once() -> None:
    site = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    for section, title, page in menu(site["nav"]):
        assert title != section, page
        assert not title.startswith("How to"), page


def test_rows_of_tables_are_read_at_a_glance() -> None:
    """Of what is written by hand: a row of more than 500 letters is a paragraph in a cell."""
    assert [line for line in read("docs/support.md").splitlines() if line.startswith("|") and len(line) > 500] == []


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The front page, a policy's and a notebook's, built with the site's own settings."""
    pytest.importorskip("material", reason="needs mkdocs-material (`kvdsl[docs]`)")
    folder = tmp_path_factory.mktemp("site")
    docs = folder / "docs"
    shutil.copytree(ROOT / "docs" / "assets", docs / "assets")
    shutil.copy(ROOT / "docs" / "index.md", docs)
    (docs / "policy.md").write_text(policy_page(ROOT / "policies" / "gallery" / "chunkkv.kv"), encoding="utf-8")
    (docs / "notebook.md").write_text(make_notebooks.page(notebook(), "notebook"), encoding="utf-8")
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    settings = re.sub(r"^(exclude_docs|not_in_nav): \|\n(?:  .*\n)+", "", settings, flags=re.MULTILINE)
    (folder / "mkdocs.yml").write_text(settings, encoding="utf-8")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--quiet"], cwd=folder, check=True, capture_output=True)
    return folder / "site"


def notebook() -> Any:
    """Cells that were run, and print lines and a table that no screen has room for."""
    first = read("docs/notebooks/first_policy.ipynb")
    cells = nbformat.reads(first, as_version=4).cells[:4]
    long = " ".join(map(str, range(200)))
    row = "".join(f"<td>{n}</td>" for n in range(100))
    outputs = [
        new_output("stream", name="stdout", text=long),
        new_output("display_data", data={"text/html": f"<table><tr>{row}</tr></table>"}),
    ]
    return new_notebook(cells=[*cells, new_code_cell("print(long)", outputs=outputs)])


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as session:
        yield session


PAGES = ("index.html", "policy/index.html", "notebook/index.html")


@pytest.mark.nightly
@needs_browser
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_no_page_scrolls_sideways(reader: Browser, site: Path, page: str, width: int) -> None:
    with reader.sized(width, 900):
        reader.open(site / page)
        assert reader.run("return document.documentElement.scrollWidth") <= width
        cut = "[...document.querySelectorAll('.language-kv code')].filter((one) => one.scrollWidth > one.clientWidth + 1)"
        assert reader.run(f"return {cut}.length") == 0, "docstrings are read whole"
        assert reader.run("return document.querySelectorAll('article h1').length") == 1


@pytest.mark.nightly
@needs_browser
@pytest.mark.parametrize("page", PAGES)
def test_no_table_has_an_empty_head(reader: Browser, site: Path, page: str) -> None:
    reader.open(site / page)
    empty = "(head) => head.offsetHeight && !head.textContent.trim()"
    assert reader.run(f"return [...document.querySelectorAll('thead')].filter({empty}).length") == 0


@pytest.mark.nightly
@needs_browser
def test_the_front_page_leads_to_the_playground(reader: Browser, site: Path) -> None:
    reader.open(site / "index.html")
    links = reader.run("return [...document.querySelectorAll('article a')].map((one) => one.href)")
    assert f"{site.as_uri()}/playground/" in links


SHOWN = """
const picture = document.querySelector('article picture img');
return {source: picture.currentSrc.split('/').pop(), width: picture.clientWidth};
"""


@pytest.mark.nightly
@needs_browser
@pytest.mark.parametrize(("width", "file"), [(390, "overview_narrow.svg"), (1280, "overview.svg")])
def test_the_overview_is_large_enough_to_read(reader: Browser, site: Path, width: int, file: str) -> None:
    with reader.sized(width, 900):
        reader.open(site / "index.html")
        shown = reader.run(SHOWN)
        assert shown["source"] == file
        drawn = float(re.search(r'viewBox="0 0 (\d+)', read(f"docs/assets/{file}"))[1])  # type: ignore[index]
        assert 12 * shown["width"] / drawn >= 10, "letters of 12 pixels are drawn smaller than 10"


@pytest.mark.nightly
@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("picture", ["overview", "overview_narrow", "speed"])
def test_words_of_a_picture_can_be_read(reader: Browser, tmp_path: Path, picture: str, scheme: str) -> None:
    """On its own card, whatever the page behind it: light where the system is light, dark where it is dark."""
    page = tmp_path / "picture.html"
    page.write_text(f"<body>{read(f'docs/assets/{picture}.svg')}</body>", encoding="utf-8")
    with reader.colours(scheme):
        reader.open(page)
        assert reader.run(INK_ON_CARD) >= 4.5


INK_ON_CARD = """
const rgb = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
const light = (colour) => rgb(colour).map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const fill = (node) => light(getComputedStyle(node).fill);
const card = fill(document.querySelector('rect'));
return Math.min(...[...document.querySelectorAll('text')].map((node) => {
  const [low, high] = [card, fill(node)].sort((a, b) => a - b);
  return (high + 0.05) / (low + 0.05);
}));
"""
