"""Commands that other packages add by an entry point of the group `kvdsl.commands`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from kvdsl import lab
from kvdsl.cli import commands
from tests.cli.harness import run


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """The commands are looked for once a process."""
    commands.cache_clear()
    yield
    commands.cache_clear()


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, table: str) -> None:
    """A package with one command, `greet`, and an entry point to its table of commands."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(table)
    (folder / name / "greet.py").write_text("import click\n@click.command()\ndef command():\n    click.echo('hello')\n")
    point = metadata.EntryPoint(name, f"{name}:COMMANDS", "kvdsl.commands")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    monkeypatch.delitem(sys.modules, name, raising=False)


def test_a_package_adds_a_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "greeting", "COMMANDS = {'greet': 'Say hello.', 'check': 'Not this one.'}\n")
    told = run(capsys, "--help").out
    assert "greet" in told and "Say hello." in told
    assert "greeting.greet" not in sys.modules
    assert run(capsys, "greet").out == "hello\n"
    assert "Not this one." not in told, "kvdsl's own commands come first"


@pytest.mark.parametrize("table", ["COMMANDS = 1 / 0\n", "import nothing_of_this_name\n", ""])
def test_a_broken_package_takes_no_other_command_away(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    install(tmp_path, monkeypatch, "broken_greeting", table)
    result = run(capsys, "--help")
    assert result.code == 0 and "bench" in result.out
    assert "the commands of broken_greeting cannot be imported" in result.err


def test_without_the_laboratory(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "PACKAGE", "no_laboratory")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [])
    assert "trace, bench, eval, reproduce" in run(capsys, "--help").out
    result = run(capsys, "bench", "decode")
    assert result.code == 2 and "pip install 'kvdsl[lab]'" in result.err.splitlines()[0]
    result = run(capsys, "run")
    assert result.code == 2 and "without --model is part of kvdsl-lab" in result.err
