"""`kvdsl check`."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdsl.cli.common import FORMAT_VERSION
from kvdsl.files import write_whole
from tests.cli.harness import run

GOOD = 'kv 1\n\npolicy Good {\n  "Mine."\n  param budget = 64\n  score mean(attn)\n}\n'
BAD = 'kv 1\n\npolicy Bad {\n  "Mine."\n  param budget = 64\n  score attn\n  keep lst 3\n}\n'
WARNED = GOOD.replace('  "Mine."\n', "")


@pytest.fixture(autouse=True)
def _files() -> None:
    for name, text in {
        "good.kv": GOOD,
        "bad.kv": BAD,
        "warned.kv": WARNED,
        "inner/deep.kv": GOOD,
        ".hidden/no.kv": BAD,
    }.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)


def test_says_that_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "check", "good.kv", "roco")
    assert (result.code, result.err) == (0, "")
    assert "2 files" in result.out


def test_points_at_the_place_and_says_how_to_mend_it(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "check", "bad.kv", code=1)
    assert "bad.kv:" in result.err
    assert "^" in result.err
    assert "help:" in result.err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "check", "bad.kv", "good.kv", "--format", "json", code=1)
    assert result.json()["format_version"] == FORMAT_VERSION
    found = result.json()["diagnostics"]
    assert found
    for one in found:
        assert {"code", "severity", "message", "help", "file", "range"} <= one.keys()
        assert one["file"] == "bad.kv"
        assert one["range"]["start"].keys() == one["range"]["end"].keys() == {"line", "column"}


def test_json_without_findings(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "check", "good.kv", "--format", "json").json()["diagnostics"] == []


def test_github(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "check", "bad.kv", "--format", "github", code=1)
    annotations = [
        re.fullmatch(r"::error file=bad.kv,line=(\d+),col=(\d+),.*title=(KV\d{4})::(.+)", line)
        for line in result.out.splitlines()
    ]
    assert [(one[1], one[2], one[3]) for one in annotations if one] == [("6", "9", "KV0301"), ("7", "8", "KV0101")]
    assert None not in annotations


def test_warnings_are_no_findings_unless_denied(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "check", "warned.kv", code=0)
    assert "warning[" in result.err
    assert run(capsys, "check", "warned.kv", "--deny-warnings").code == 1


def test_without_files_checks_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.kv").unlink()
    Path("warned.kv").unlink()
    result = run(capsys, "check", code=0)
    assert "2 files" in result.out
    assert run(capsys, "check", "inner").out == "1 file checked: no problems\n"


def test_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BAD.encode())))
    result = run(capsys, "check", "-", "--format", "json", code=1)
    assert {one["file"] for one in json.loads(result.out)["diagnostics"]} == {"-"}


def test_would_it_work_with_this_budget(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "check", "h2o", "--set", "recent=512").code == 0
    assert run(capsys, "check", "h2o", "--set", "recent=513").code == 1


def test_human_is_what_text_was_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "check", "bad.kv", "--format", "human") == run(capsys, "check", "bad.kv", "--format", "text")


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    assert [run(capsys, "check", *names).code for names in (["good.kv"], ["bad.kv", "good.kv"], ["nothing.kv", "bad.kv"])] == [
        0, 1, 2,
    ]  # fmt: skip
    assert run(capsys, "check", "--format", "xml").code == 2
    assert run(capsys, "check", ".hidden").code == 1  # a hidden folder counts where it is named


def test_standard_input_cannot_be_watched(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "check", "-", "--watch")
    assert (result.code, result.out) == (2, "")
    assert "cannot be watched" in result.err


def test_watch_checks_again_after_each_change() -> None:
    """A file, what it imports, and a file that comes into the folder; Ctrl-C ends it with the last exit code."""
    Path("inner/more").mkdir()
    Path("inner/mine.kv").write_text('kv 1\nimport "../good.kv"\n\npolicy Mine extends Good {\n  "Mine."\n}\n')
    command = [
        sys.executable,
        "-u",
        "-c",
        f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {WATCH}",
    ]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            for change, name, closes_with in [
                (None, "", "2 files checked: no problems"),
                (GOOD.replace("mean(attn)", "attn"), "good.kv", "1 error"),
                (GOOD, "good.kv", "2 files checked: no problems"),
                (BAD, "inner/more/new.kv", "2 errors"),
                ('kv 1\nimport "../../later.kv"\n\nlet f(x) = g(x)\n', "inner/more/new.kv", "1 error"),
                ("kv 1\n\nlet g(x) = x\n", "later.kv", "3 files checked: no problems"),
                (BAD, "inner/more/new.kv", "2 errors"),
            ]:
                if change is not None:
                    write_whole(Path(name), change)
                assert f"{closes_with}\n" in lines
            process.send_signal(signal.SIGINT)
            assert process.wait() == 1
        finally:
            process.kill()


def test_what_is_wrong_with_a_file_that_several_import_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    Path("lib.kv").write_text("kv 1\n\nlet z = zz\n")
    for name in ("one.kv", "two.kv"):
        Path(name).write_text(GOOD.replace("kv 1\n", 'kv 1\nimport "lib.kv"\n'))
    result = run(capsys, "check", "lib.kv", "one.kv", "two.kv")
    assert result.err.count("KV0201") == 1
    assert "\n1 error\n" in result.err


def test_one_mistake_in_two_places_is_told_twice(capsys: pytest.CaptureFixture[str]) -> None:
    Path("twice.kv").write_text(GOOD.replace("mean(attn)", "zz + zz"))
    assert run(capsys, "check", "twice.kv").err.count("KV0201") == 2


def test_watch_waits_for_the_first_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without policies is told as JSON, and looked at again."""
    Path("empty").mkdir()

    def watch(read: Callable[[], object], show: Callable[[object], object], files: object) -> None:
        show(read())
        write_whole(Path("empty/new.kv"), BAD)
        show(read())

    monkeypatch.setattr("kvdsl.cli.check.watch", watch)
    result = run(capsys, "check", "empty", "--watch", "--format", "json")
    first, then = result.out.replace("}\n{", "}\0{").split("\0")
    assert json.loads(first)["error"]["message"] == "there is no .kv file to check"
    assert len(json.loads(then)["diagnostics"]) == 2
    assert result.code == 1


WATCH = "import sys; from kvdsl.cli import main; sys.exit(main(['check', 'inner', '--watch']))"
"""Ctrl-C reaches it, whatever the process that runs the tests does with it."""
