"""Running, resuming, saving, tables and pictures, with a paper made up for it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvdsl.errors import KvdslError
from kvdsl_lab.reproduce import Cell, Experiment, Finding, Paper, Row, Setup, plots, tables
from kvdsl_lab.reproduce.run import count, reproduce

HEAD = {"format_version": "1.0", "environment": {
    "kvdsl": "0", "torch": "2", "transformers": "4", "cpu": "slow", "gpu": None, "threads": 2, "dtype": "float32",
}}  # fmt: skip


class Made:
    """A paper of two experiments that notes which cells were run, and dies where it is told to."""

    def __init__(self, dies_at: str | None = None) -> None:
        self.ran: list[str] = []
        self.dies_at = dies_at
        self.paper = Paper("made", "On made-up tables (Nobody, 2024)", (
            Experiment(
                "table1", "100 % of a_b", "Table 1", partial(self.cells, name="one"), says="more is more", findings=self.findings,
                table=lambda rows: tables.pivot(rows, ["policy"], "budget", "ppl", "b = {}"), plot=self.draw,
            ),
            Experiment("figure2", "Nothing", "Figure 2", partial(self.cells, name="two")),
        ))  # fmt: skip

    def cells(self, setup: Setup, name: str) -> Iterator[Cell]:
        for budget in setup.size((16, 32, 64), (16, 32)):
            yield Cell(f"budget {budget}", partial(self.run, name=name, budget=budget))

    def run(self, setup: Setup, name: str, budget: int) -> list[Row]:
        if f"{name} {budget}" == self.dies_at:
            raise KeyboardInterrupt
        self.ran.append(f"{name} {budget}")
        return [{"policy": policy, "budget": budget, "ppl": 1 / budget} for policy in ("a|b", "c_d")]

    def findings(self, rows: Sequence[Row]) -> list[Finding]:
        return [Finding("it falls", rows[0]["ppl"] > rows[-1]["ppl"], f"{rows[0]['ppl']} to {rows[-1]['ppl']}")]

    def draw(self, figure: Any, rows: Sequence[Row]) -> None:
        plots.lines(figure.subplots(), rows, x="budget", y="ppl", by="policy", log_x=True)


ALL = ["one 16", "one 32", "one 64", "two 16", "two 32", "two 64"]


def test_the_result_has_every_row_and_what_was_found(tmp_path: Path) -> None:
    made, told = Made(), list[str]()
    result = reproduce(made.paper, Setup(seed=7), tmp_path, HEAD, tick=told.append)
    assert result == json.loads((tmp_path / "made.json").read_text())
    assert made.ran == ALL and told[0] == "Table 1: budget 16" and len(told) == count(made.paper, Setup()) == 6
    assert result["finished"] and result["setup"]["seed"] == 7
    table, figure = result["experiments"]
    assert [row["budget"] for row in table["rows"]] == [16, 16, 32, 32, 64, 64]
    assert [(cell["name"], cell["rows"]) for cell in table["cells"]] == [
        ("budget 16", 2),
        ("budget 32", 2),
        ("budget 64", 2),
    ]
    assert table["findings"] == [{"claim": "it falls", "holds": True, "measured": "0.0625 to 0.015625"}]
    assert table["figures"] == ["made/table1.png", "made/table1.svg"] and figure["figures"] == []


def test_a_killed_run_loses_one_cell(tmp_path: Path) -> None:
    killed = Made(dies_at="two 16")
    with pytest.raises(KeyboardInterrupt):
        reproduce(killed.paper, Setup(), tmp_path, HEAD)
    left = json.loads((tmp_path / "made.json").read_text())
    assert not left["finished"] and len(left["experiments"][0]["findings"]) == 1, (
        "what is complete is held against its claims"
    )
    assert left["experiments"][1]["rows"] == left["experiments"][1]["findings"] == []
    again = Made()
    result = reproduce(again.paper, Setup(), tmp_path, HEAD)
    assert again.ran == ["two 16", "two 32", "two 64"]
    whole = reproduce(Made().paper, Setup(), tmp_path / "elsewhere", HEAD)
    assert [one["rows"] for one in result["experiments"]] == [one["rows"] for one in whole["experiments"]]


def test_some_experiments_only(tmp_path: Path) -> None:
    made = Made()
    part = reproduce(made.paper, Setup(), tmp_path, HEAD, only=["figure2"])
    assert made.ran == ALL[3:] and not part["finished"] and count(made.paper, Setup(), ["figure2"]) == 3
    assert "Table 1" not in tables.markdown(made.paper, part) and "Figure 2" in tables.latex(made.paper, part)
    plots.draw_all(made.paper, part, tmp_path)
    whole = reproduce(made.paper, Setup(), tmp_path, HEAD)
    assert made.ran == ALL[3:] + ALL[:3] and whole["finished"]
    with pytest.raises(KvdslError, match="made has no experiment `figure3`; it has table1, figure2"):
        reproduce(made.paper, Setup(), tmp_path, HEAD, only=["figure3"])


def test_a_complete_run_measures_nothing_again_unless_asked(tmp_path: Path) -> None:
    first = reproduce(Made().paper, Setup(), tmp_path, HEAD)
    again = Made()
    assert reproduce(again.paper, Setup(), tmp_path, HEAD) == first and again.ran == []
    reproduce(again.paper, Setup(), tmp_path, HEAD, fresh=True)
    assert again.ran == ALL
    part = reproduce(again.paper, Setup(), tmp_path, HEAD, only=["figure2"], fresh=True)
    assert again.ran == ALL + ALL[3:] and part["finished"]


def test_another_setup_begins_anew_and_keeps_the_old_result(tmp_path: Path) -> None:
    first, quick = reproduce(Made().paper, Setup(), tmp_path, HEAD), Made()
    reproduce(quick.paper, Setup(quick=True), tmp_path, HEAD)
    assert quick.ran == ["one 16", "one 32", "two 16", "two 32"]
    assert json.loads((tmp_path / "made.previous.json").read_text()) == first


def test_what_was_measured_elsewhere_stays_unless_it_is_asked_for(tmp_path: Path) -> None:
    there = HEAD | {"environment": HEAD["environment"] | {"cpu": "fast"}}
    first = reproduce(Made().paper, Setup(), tmp_path, there, only=["table1"])
    made = Made()
    both = reproduce(made.paper, Setup(), tmp_path, HEAD, only=["figure2"])
    table, figure = both["experiments"]
    assert made.ran == ALL[3:] and both["finished"] and both["environment"]["cpu"] == "slow"
    assert table["environment"]["cpu"] == "fast" and table["rows"] == first["experiments"][0]["rows"]
    assert "environment" not in figure
    assert "Measured on fast, 2 threads" in tables.markdown(made.paper, both)
    assert "% measured on fast, 2 threads" in tables.latex(made.paper, both)
    again = Made()
    assert reproduce(again.paper, Setup(), tmp_path, HEAD, only=["figure2"]) == both and again.ran == []
    assert not (tmp_path / "made.previous.json").exists()
    anew = reproduce(again.paper, Setup(), tmp_path, HEAD)
    assert again.ran == ALL[:3] and not any("environment" in one for one in anew["experiments"])
    assert json.loads((tmp_path / "made.previous.json").read_text()) == both


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "made.json").write_text("[1]")
    with pytest.raises(KvdslError, match=r"made\.json is no result"):
        reproduce(Made().paper, Setup(), tmp_path, HEAD)
    assert (tmp_path / "made.json").read_text() == "[1]"


def test_a_result_without_plots_names_no_figures(tmp_path: Path) -> None:
    made = Made()
    result = reproduce(made.paper, Setup(), tmp_path, HEAD, drawn=False)
    assert all(part["figures"] == [] for part in result["experiments"])
    assert "![" not in tables.markdown(made.paper, result)
    assert reproduce(made.paper, Setup(), tmp_path, HEAD)["experiments"][0]["figures"] and made.ran == ALL


def test_tables(tmp_path: Path) -> None:
    made = Made()
    result = reproduce(made.paper, Setup(), tmp_path, HEAD)
    markdown, latex = tables.markdown(made.paper, result), tables.latex(made.paper, result)
    assert (
        "| policy | b = 16 | b = 32 | b = 64 |\n| --- | ---: | ---: | ---: |\n| a\\|b | 0.0625 | 0.03125 | 0.01562 |"
        in markdown
    )
    assert "- holds: it falls (0.0625 to 0.015625)" in markdown and "![100 % of a_b](made/table1.png)" in markdown
    assert r"\caption{100 \% of a\_b (Table 1)}" in latex and r"a\textbar{}b & 0.0625 & 0.03125 & 0.01562 \\" in latex
    assert latex.count(r"\begin{table}") == latex.count(r"\end{table}") == 2
    assert len(re.findall(r"\\(?:top|mid|bottom)rule", latex)) == 6


def test_pictures_are_drawn_without_a_display_and_always_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DISPLAY", raising=False)
    made = Made()
    result = reproduce(made.paper, Setup(), tmp_path, HEAD)
    plots.draw_all(made.paper, result, tmp_path)
    picture, drawing = tmp_path / "made/table1.png", tmp_path / "made/table1.svg"
    assert picture.read_bytes().startswith(b"\x89PNG") and "c_d" in drawing.read_text()
    first = drawing.read_bytes()
    plots.draw_all(made.paper, result, tmp_path)
    assert drawing.read_bytes() == first
