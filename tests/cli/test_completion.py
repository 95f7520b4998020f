"""What a shell completes. `kvdsl.cli.completion` gives the words; click and bash put them in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvdsl.cli.completion import _Bash
from kvdsl.cli.group import commands, group
from tests.cli.harness import run

ROOT = Path(__file__).resolve().parents[2]
MINE = (
    'kv 1\n\npolicy Mine {\n  "Mine."\n  param budget = 64\n  param sinks = 4\n  score mean(attn)\n  keep first sinks\n}\n'
)


@pytest.fixture(autouse=True)
def _files() -> None:
    Path("mine.kv").write_text(MINE)
    Path("broken.kv").write_text("kv 1\npolicy {")
    Path("notes.txt").write_text("")
    Path("more").mkdir()
    Path("more/other.kv").write_text(MINE.replace("sinks", "first_ones"))


def completed(line: str) -> list[str]:
    """What could stand in the place of the line's last word."""
    *words, last = line.split(" ")
    return [item.value for item in _Bash(group, {}, "kvdsl", "_KVDSL_COMPLETE").get_completions(words, last)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("c", [name for name in commands() if name.startswith("c")]),
        ("run roco", ["roco", "roco_easykv", "roco_sparcas"]),
        ("run mi", ["mine.kv"]),
        ("run mor", ["morphkv", "more/"]),
        ("run more/", ["more/other.kv"]),
        ("run --policy stream", ["streaming_llm", "streaming_llm_once"]),
        ("compile h2o mi", ["mine.kv"]),
        ("check mi", ["mine.kv"]),
        ("fmt mi", ["mine.kv"]),
        ("fmt roc", []),  # a shipped policy has no file of the user's
        ("explain KV010", [f"KV010{digit}" for digit in range(1, 10)]),
        ("explain kv0101", ["KV0101"]),
        ("run h2o --set ", ["budget=", "recent=", "ratio="]),
        ("run --policy h2o --set re", ["recent="]),
        ("run --set ", ["budget=", "protect=", "ratio="]),
        ("compile mine.kv more/other.kv --set ", ["budget=", "sinks=", "ratio=", "first_ones="]),
        ("explain mine.kv --set si", ["sinks="]),
        ("compile broken.kv --set ", []),
        ("compile nowhere.kv --set ", []),
        ("show quest more", ["more/"][:0]),
    ],
)
def test_words(line: str, words: list[str]) -> None:
    assert completed(line) == words


def test_behind_an_unknown_command_nothing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    completed("nocommand ")
    assert capsys.readouterr() == ("", "")


def test_lists_of_policies() -> None:
    pytest.importorskip("kvdsl_lab")
    assert completed("eval ppl --policies h2o,tov") == ["h2o,tova", "h2o,tova_once"]
    assert completed("eval ppl --policies h2o,tova --set re") == ["recent="]


def test_completing_commands_imports_none_of_them() -> None:
    code = (
        "import sys; from kvdsl.cli.completion import _Bash; from kvdsl.cli.group import group\n"
        "assert _Bash(group, {}, 'kvdsl', 'X').get_completions([], 'comp')\n"
        "assert 'kvdsl.cli.compile' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def test_bash_completes(tmp_path: Path) -> None:
    """A real bash: the script that the page says to source, and what it puts on the line."""
    program = tmp_path / "bin" / "kvdsl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvdsl "$@"\n')
    program.chmod(0o755)
    script = """
        compopt() { printf '%s ' option: "$@"; }
        eval "$(_KVDSL_COMPLETE=bash_source kvdsl)"
        COMP_WORDS=(kvdsl run h2o --set bud); COMP_CWORD=4
        _kvdsl_completion kvdsl bud --set
        echo "words: ${COMPREPLY[*]}"
    """
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=True)
    assert done.stdout == "option: -o nospace words: budget=\n"


# -- show --------------------------------------------------------------------------------------------------------------


def test_show_prints_the_source_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "show", "mine.kv")
    assert (result.code, result.out, result.err) == (0, MINE, "mine.kv\n")
    assert run(capsys, "show", "roco").out == (ROOT / "policies" / "roco.kv").read_text()
    assert run(capsys, "show", "roco", "--path").out == f"{ROOT / 'policies' / 'roco.kv'}\n"
    shown = run(capsys, "show", "more/other.kv", "--json").json()
    assert (shown["name"], shown["path"]) == ("other", str(Path("more/other.kv").resolve()))
    assert shown["source"] == Path("more/other.kv").read_text()


def test_show_shows_what_cannot_be_compiled_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "show", "broken.kv").out == "kv 1\npolicy {"
    result = run(capsys, "show", "rocco")
    assert (result.code, "did you mean `roco`?" in result.err) == (2, True)
    Path("bytes.kv").write_bytes(b"\xff")
    assert run(capsys, "show", "bytes.kv").code == 1


def test_show_highlights_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdsl.diagnostics.wants_color", lambda *_: True)
    out = run(capsys, "show", "mine.kv").out
    assert "\x1b[" in out
    assert "mean" in out
