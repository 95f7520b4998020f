"""Every paper at toy sizes, from the command line, on a model of random weights: what is written, not what holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvdsl_lab.reproduce import PAPERS, Setup
from kvdsl_lab.reproduce.run import load_paper
from tests.cli.harness import run


@pytest.mark.parametrize("name", PAPERS)
def test_names(name: str) -> None:
    paper = load_paper(name)
    assert paper.name == name
    names = [one.name for one in paper.experiments]
    assert len(set(names)) == len(names) and all(one.isidentifier() for one in names)
    for setup in (Setup(), Setup(quick=True)):
        for one in paper.experiments:
            cells = [cell.name for cell in one.cells(setup)]
            assert cells and len(set(cells)) == len(cells), one.name


@pytest.mark.parametrize("name", list(PAPERS))
def test_quick(name: str, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("reproduce", name, "--quick", "--model", str(tiny), "--backend", "torch", "--out", str(tmp_path / "out"))
    found = run(capsys, *words, "--seed", "5", "--json").json()
    assert found["finished"] and found["setup"]["seed"] == found["environment"]["seed"] == 5
    assert found == json.loads((tmp_path / "out" / f"{name}.json").read_text(encoding="utf-8"))
    paper = load_paper(name)
    for one, part in zip(paper.experiments, found["experiments"], strict=True):
        assert len({tuple(row) for row in part["rows"]}) == 1, f"{one.name}: rows have different keys"
        assert bool(part["findings"]) == bool(one.findings(part["rows"]))
        for figure in part["figures"]:
            assert (tmp_path / "out" / figure).stat().st_size > 1000
    for suffix, rule in ((".md", r"^\| -"), (".tex", r"\\midrule$")):
        text = (tmp_path / "out" / f"{name}{suffix}").read_text(encoding="utf-8")
        assert len(re.findall(rule, text, re.MULTILINE)) == len(paper.experiments)
    again = run(capsys, *words, "--seed", "5")
    assert f"{len(paper.experiments)} tables and figures" in again.out and again.code == 0


def test_what_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "reproduce", "lost", "--out", str(tmp_path)).code == 2
    (tmp_path / "sparcas.json").write_text("{}", encoding="utf-8")
    found = run(capsys, "reproduce", "sparcas", "--quick", "--out", str(tmp_path))
    assert found.code == 2 and "is no result" in found.err and "--out" in found.err


def test_help_names_every_paper(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run(capsys, "reproduce", "--help").out
    assert all(name in shown and line in shown for name, line in PAPERS.items())
