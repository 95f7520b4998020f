"""What a command says while it works, and what it does about a machine that others use, too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvdsl import busy
from kvdsl.cli import progress
from tests.cli.harness import run


@pytest.mark.parametrize("kind", ["progress", "status", "stages"])
def test_without_a_terminal_a_line_comes_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(progress, "FIRST", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.01)
    said = ""
    if kind == "progress":
        with progress.progress("reading", 3) as tick:
            tick()
            while "1 of 3" not in said:
                said += capsys.readouterr().err
    else:
        made = progress.status("reading") if kind == "status" else progress.stages("reading", 3)
        with made as tell:
            tell("a book")
            while "a book" not in said:
                said += capsys.readouterr().err
    lines = said.splitlines()
    assert lines and all(line.startswith("kvdsl: reading") and line.endswith("s so far") for line in lines)


def test_short_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress("reading", 3) as tick, progress.status("writing") as tell:
        tick()
        tell("a page")
    assert capsys.readouterr().err == ""


def stat(*idle: int, total: int = 1000) -> str:
    return "".join(f"cpu{core} {total - ticks} 0 0 {ticks} 0 0 0 0 0 0\n" for core, ticks in enumerate(idle))


@pytest.mark.parametrize(
    ("idle", "wanted", "used"), [((20, 20), 2, 2), ((0, 20), 2, 1), ((0, 0), 2, 1), ((0, 0, 20, 20), 4, 2)]
)
def test_fewer_threads_where_others_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, idle: tuple[int, ...], wanted: int, used: int
) -> None:
    """Of 20 ticks, how many each core was idle for while it was watched."""
    file = tmp_path / "stat"
    file.write_text("cpu  1 2 3\n" + stat(*(100 for _ in idle)))
    monkeypatch.setattr(busy, "_STAT", file)
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(len(idle))}, raising=False)
    later = stat(*(100 + ticks for ticks in idle), total=1020)
    monkeypatch.setattr("time.sleep", lambda _: file.write_text(later))
    assert busy.idle_cores() == pytest.approx(sum(idle) / 20)
    file.write_text(stat(*(100 for _ in idle)))
    count, told = busy.threads(wanted)
    assert count == used and (told is None) == (used == wanted)
    assert told is None or f"--threads {wanted}" in told
    monkeypatch.setenv("OMP_NUM_THREADS", str(wanted))
    assert busy.threads(wanted) == (wanted, None)


def test_where_the_system_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy, "_STAT", tmp_path / "nowhere")
    assert busy.idle_cores() is None and busy.threads(8) == (8, None)


def test_threads_wait_passively(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    run(capsys, "--version")
    assert os.environ["GOMP_SPINCOUNT"] == busy.SPINS
    monkeypatch.delenv("GOMP_SPINCOUNT")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    run(capsys, "--version")
    assert "GOMP_SPINCOUNT" not in os.environ
