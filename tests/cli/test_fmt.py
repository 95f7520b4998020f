"""`kvdsl fmt`."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path

import pytest

from kvdsl.files import resource
from tests.cli.harness import run

GOOD = 'kv 1\n\npolicy Good {\n  "Mine."\n  param budget = 64\n  score mean(attn)\n}\n'
LOOSE = 'kv 1\r\npolicy Good{ \r\n "Mine." ;param budget=64\n  score mean( attn ) }'
BROKEN = "kv 1\n\npolicy Bad {\n  score (\n}\n"


@pytest.fixture(autouse=True)
def _files() -> None:
    Path("inner").mkdir()
    for name, text in {"good.kv": GOOD, "loose.kv": LOOSE, "inner/loose_test.kv": LOOSE}.items():
        Path(name).write_bytes(text.encode())


def stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def test_writes_what_changes(capsys: pytest.CaptureFixture[str]) -> None:
    os.utime("good.kv", ns=(1, 1))
    Path("loose.kv").chmod(0o640)
    result = run(capsys, "fmt")
    assert (result.code, result.err) == (0, "")
    assert Path("loose.kv").read_bytes() == Path("inner/loose_test.kv").read_bytes() == GOOD.encode()
    assert Path("loose.kv").stat().st_mode & 0o777 == 0o640
    assert Path("good.kv").stat().st_mtime_ns == 1
    assert "formatted loose.kv" in result.out
    assert result.out.endswith("3 files: 2 formatted, 1 unchanged\n")
    assert sorted(path.name for path in Path().iterdir()) == ["good.kv", "inner", "loose.kv"]
    assert run(capsys, "fmt").out == "3 files: 3 unchanged\n"


def test_check_lists_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "fmt", "--check", "good.kv", "loose.kv", code=1)
    assert result.out.splitlines()[0] == "would change loose.kv"
    assert Path("loose.kv").read_bytes() == LOOSE.encode()
    assert run(capsys, "fmt", "--check", "good.kv").code == 0


def test_diff_shows_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "fmt", "--diff", "good.kv", "loose.kv", code=1)
    assert "--- loose.kv" in result.out
    assert "+  score mean(attn)\n" in result.out
    assert "good.kv" not in result.out
    assert Path("loose.kv").read_bytes() == LOOSE.encode()
    assert (run(capsys, "fmt", "--diff", "good.kv").code, run(capsys, "fmt", "--diff", "good.kv").out) == (0, "")


def test_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, LOOSE)
    assert run(capsys, "fmt", "-").out == GOOD
    stdin(monkeypatch, LOOSE)
    assert run(capsys, "fmt", "-", "--check").code == 1
    stdin(monkeypatch, BROKEN)
    result = run(capsys, "fmt", "-")
    assert (result.code, result.out) == (2, "")
    assert "KV0101" in result.err
    assert run(capsys, "fmt", "-", "good.kv").code == 2


def test_files_with_syntax_errors_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.kv").write_text(BROKEN)
    result = run(capsys, "fmt", "broken.kv", "loose.kv", code=2)
    assert "broken.kv:4" in result.err
    assert Path("broken.kv").read_text() == BROKEN
    assert Path("loose.kv").read_text() == GOOD
    assert "1 formatted, 1 with syntax errors" in result.out


def test_what_cannot_be_read_or_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "fmt", "missing.kv").code == 2
    Path("bytes.kv").write_bytes(b"kv 1\n\xff")
    assert "UTF-8" in run(capsys, "fmt", "bytes.kv").err
    Path("empty").mkdir()
    assert run(capsys, "fmt", "empty").code == 2


def test_a_link_stays_a_link(capsys: pytest.CaptureFixture[str]) -> None:
    Path("link.kv").symlink_to("loose.kv")
    assert run(capsys, "fmt", "link.kv").code == 0
    assert Path("link.kv").is_symlink()
    assert Path("loose.kv").read_text() == GOOD


def test_a_failed_write_leaves_the_file_as_it_was(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "loose.kv")

    monkeypatch.setattr(os, "replace", full)
    result = run(capsys, "fmt", "loose.kv", code=2)
    assert "No space left" in result.err
    assert Path("loose.kv").read_bytes() == LOOSE.encode()
    assert sorted(path.name for path in Path().iterdir()) == ["good.kv", "inner", "loose.kv"]


@pytest.mark.nightly
def test_shipped_policies_are_formatted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "fmt", "--check", str(resource("policies")), str(resource("grammar"))).code == 0
