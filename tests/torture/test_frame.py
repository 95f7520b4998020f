"""`make torture`: what the command makes of attacks that survive, that do not, that cannot run, and that are broken themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from scripts.torture import __main__ as torture
from scripts.torture.registry import Attack, Counts, NotHere, Progress


def survives(seed: int, count: int, progress: Progress) -> Counts:
    counts = Counts()
    for number in range(count):
        with counts.trial(str(number)):
            progress()
    return counts


def dies_once(seed: int, count: int, progress: Progress) -> Counts:
    counts = survives(seed, count - 1, progress)
    with counts.trial("the last"):
        assert not seed, "it went down"
    return counts


def cannot_run(seed: int, count: int, progress: Progress) -> Counts:
    raise NotHere("needs two moons")


def is_broken(seed: int, count: int, progress: Progress) -> Counts:
    raise RuntimeError("no idea")


def attacks(*functions: Any) -> list[Attack]:
    return [Attack("group", one.__name__.replace("_", " "), "a test", 5, 2, one) for one in functions]


def run(monkeypatch: pytest.MonkeyPatch, out: Path, chosen: list[Attack], *arguments: str) -> tuple[Result, dict[str, Any]]:
    monkeypatch.setattr(torture, "registered", lambda: chosen)
    result = CliRunner().invoke(torture.main, [*arguments, "--out", str(out)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    rows = json.loads(out.read_text())["attacks"] if out.exists() else []
    return result, {row["attack"]: row for row in rows}


def test_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "new" / "torture.json"
    result, rows = run(monkeypatch, out, attacks(survives, cannot_run))
    assert result.exit_code == 0, result.output
    assert {"group", "attack", "what", "seed", "tried", "survived", "seconds", "notes"} == rows["survives"].keys()
    assert (rows["survives"]["tried"], rows["survives"]["survived"], rows["survives"]["notes"]) == (5, 5, [])
    assert (rows["cannot run"]["tried"], rows["cannot run"]["notes"]) == (0, ["not run: needs two moons"])
    whole = json.loads(out.read_text())
    assert whole["format_version"] == "1.0"
    assert {"kvdsl", "python", "torch", "cpu", "compiler"} <= whole["environment"].keys()
    assert [path.name for path in out.parent.iterdir()] == ["torture.json"]


@pytest.mark.parametrize(("one", "says"), [(dies_once, "the last: AssertionError: it went down"), (is_broken, "no idea")])
def test_what_does_not_survive_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one: Any, says: str) -> None:
    result, rows = run(monkeypatch, tmp_path / "out.json", attacks(survives, one))
    assert result.exit_code == 1
    (row,) = (row for name, row in rows.items() if name != "survives")
    assert row["survived"] == row["tried"] - 1
    assert says in row["notes"][0]
    assert says in result.output


def test_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, chosen = tmp_path / "out.json", attacks(survives, dies_once)
    _, rows = run(monkeypatch, out, chosen, "--quick", "--seed", "0")
    assert [(row["tried"], row["survived"]) for row in rows.values()] == [(2, 2), (2, 2)]
    result, rows = run(monkeypatch, out, chosen, "--only", "survives", "--count", "7")
    assert result.exit_code == 0
    assert [rows[name]["tried"] for name in ("survives", "dies once")] == [7, 2], "the other row stays"
    assert "survives (5 times)" in run(monkeypatch, out, chosen, "--list")[0].output
    assert run(monkeypatch, out, chosen, "--only", "nothing")[0].exit_code == 2


def test_rows_of_two_machines_are_not_mixed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out, chosen = tmp_path / "out.json", attacks(survives)
    run(monkeypatch, out, chosen)
    out.write_text(out.read_text().replace('"cpu": "', '"cpu": "another '))
    result, _ = run(monkeypatch, out, chosen, "--only", "survives")
    assert result.exit_code == 2
    assert "another machine" in result.output
