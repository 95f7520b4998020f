"""`%%kv` in a shell of IPython, and the notebooks of docs/notebooks."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

import kvdsl
from kvdsl.compiler import analyse
from kvdsl.source import SourceFile

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import make_notebooks

pytestmark = pytest.mark.nightly

POLICY = 'kv 1\npolicy Calm {\n  "The latest."\n  param budget = 8\n  score position\n}\n'
NOTEBOOKS = make_notebooks.notebooks()


@pytest.fixture
def shell() -> Iterator[InteractiveShell]:
    made = InteractiveShell.instance()
    made.user_ns.pop("Calm", None)
    made.run_line_magic("reload_ext", "kvdsl")
    yield made
    InteractiveShell.clear_instance()


def run(shell: InteractiveShell, cell: str) -> tuple[Any, Any]:
    """What became of a cell, and what it showed."""
    with capture_output() as shown:
        result = shell.run_cell(cell)
    return result, shown


def test_a_cell_s_policy_becomes_a_class(shell: InteractiveShell) -> None:
    result, shown = run(shell, f"%%kv budget=4\n{POLICY}")
    assert result.success
    made = shell.user_ns["Calm"]
    assert made.__name__ == "CalmCache"
    assert made is kvdsl.compile(POLICY, budget=4)
    assert "Calm(model, budget=4)" in shown.outputs[0].data["text/html"]
    assert "Calm(model, budget=4)" in shown.outputs[0].data["text/plain"]


def test_what_is_wrong_is_shown_with_its_line_and_a_caret(shell: InteractiveShell) -> None:
    """No traceback, and no class of an earlier text."""
    run(shell, f"%%kv\n{POLICY}")
    result, shown = run(shell, f"%%kv\n{POLICY.replace('score position', 'score postion < 3')}")
    assert not result.success
    assert "Calm" not in shell.user_ns
    assert shown.outputs[0].data["text/plain"].splitlines()[:5] == [
        "error[KV0201]: unknown name `postion`",
        " --> <calm>:5:9",
        "  |",
        "5 |   score postion < 3",
        "  |         ^^^^^^^",
    ]
    html = shown.outputs[0].data["text/html"]
    assert "postion &lt; 3" in html
    assert "\x1b" not in html
    assert html.count("<span") == html.count("</span>") > 5
    assert shown.stderr == "UsageError: not compiled: 1 error\n"
    assert "Traceback" not in shown.stdout


def test_warnings_are_shown_beside_the_class(shell: InteractiveShell) -> None:
    result, shown = run(shell, f"%%kv\n{POLICY.replace('  score', '  param idle = 3' + chr(10) + '  score')}")
    assert result.success
    assert "warning[" in shown.outputs[0].data["text/plain"]
    assert "Calm" in shell.user_ns


@pytest.mark.parametrize("line", ["budget", "budget 4", "=4", "budget="])
def test_a_line_that_is_not_understood(shell: InteractiveShell, line: str) -> None:
    result, shown = run(shell, f"%%kv {line}\n{POLICY}")
    assert not result.success
    assert shown.stderr.startswith("UsageError: after `%%kv` stand params")
    assert "Calm" not in shell.user_ns


def test_an_unknown_param(shell: InteractiveShell) -> None:
    result, shown = run(shell, f"%%kv bugdet=4\n{POLICY}")
    assert not result.success
    assert "budget" in shown.outputs[0].data["text/plain"]


# -- the notebooks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_policies_of_notebooks_check(path: Path) -> None:
    """But for those that show what is said of a mistake."""
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.source.startswith("%%kv"):
            found = analyse(SourceFile("<cell>", cell.source.partition("\n")[2])).diagnostics
            assert bool(found) == ("raises-exception" in cell.metadata.get("tags", ())), cell.source


def test_a_page_shows_what_cells_show() -> None:
    def code(source: str, *outputs: Any) -> Any:
        return nbformat.v4.new_code_cell(source, outputs=[nbformat.v4.new_output(kind, **more) for kind, more in outputs])

    page = make_notebooks.page(
        nbformat.v4.new_notebook(
            cells=[
                nbformat.v4.new_markdown_cell("# A title"),
                code("print(1 < 2)", ("stream", {"name": "stdout", "text": "1 < 2\n\nyes\n"})),
                code("%%kv\nkv 1", ("display_data", {"data": {"text/html": "<b>\n\nbold</b>", "text/plain": "bold"}})),
                code("import x", ("stream", {"name": "stderr", "text": "a warning"})),
            ]
        ),
        "name",
    )
    assert "# A title\n\n[This notebook](name.ipynb)" in page
    assert '<pre class="output">1 &lt; 2&#10;\nyes</pre>' in page
    assert "``` {.kv .cell}\n%%kv\nkv 1\n```" in page
    assert '<div class="output"><b>&#10;\nbold</b></div>' in page
    assert "a warning" not in page


SHOWS = {
    "first_policy": [
        r"unknown name `atn`",
        r"CalmCache\(budget=64, sinks=4\): .* tokens seen",
        r"65 slots; \[-1, 0, 1, 2, 3, ",
    ],
    "choose": [r"full +1\.00 times", r"h2o +\d\.\d\d times", r"h2o +520 bytes a token"],
    "attention": [
        r'src="data:image/png;base64,',
        r"the best there are +\[0\.\d",
        r"SinksCache\(budget=40\): .*160 tokens seen",
    ],
}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{make_notebooks.ROOT}:{make_notebooks.ROOT / 'lab'}")
    page = make_notebooks.page(make_notebooks.run(path, tmp_path), path.stem)
    for pattern in SHOWS[path.stem]:
        assert re.search(pattern, page), pattern
