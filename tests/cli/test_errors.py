"""Whatever a user does wrong: one clear line with a hint, the right exit code, no traceback (`run` checks the latter)."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import kvdsl
from kvdsl.cli.common import guarded
from kvdsl.diagnostics import DiagnosticError
from kvdsl.errors import KvdslError
from tests.cli.harness import run

POLICY = 'kv 1\n\npolicy Mine {{\n  "Mine."\n  param budget = 512\n  score mean(attn)\n  {}\n}}\n'

USAGE = [
    (["chek"], "`check`"),
    (["fmt"], "no .kv file to format"),
    (["roco.kv"], "kvdsl compile roco.kv"),
    (["compile"], "--help"),
    (["compile", "roco", "--ot", "x"], "--out"),
    (["compile", "rocco"], "`roco`"),
    (["check", "rocco"], "`roco`"),
    (["explain", "rocco"], "`roco`"),
    (["explain", "KV0300"], "KV03"),
    (["compile", "missing.kv"], "missing.kv"),
    (["check", "missing.kv"], "missing.kv"),
    (["compile", "folder"], "folder"),
    (["compile", "roco", "--set", "buget=3"], "`budget`"),
    (["compile", "roco", "--set", "budget=abc"], "--set budget=256"),
    (["compile", "roco", "--set", "budget=inf"], "--set budget=256"),
    (["compile", "roco", "--set", "budget"], "--set budget=256"),
    (["check", "roco", "--format", "xml"], "json"),
    (["compile", "roco", "--out", "file"], "file"),
]


@pytest.fixture(autouse=True)
def _files() -> None:
    Path("folder").mkdir()
    Path("file").write_text("")


@pytest.mark.parametrize(
    "arguments", [["test", "-k", "nosuch", "roco"], ["explain", "KV9999"], ["check", "folder"]], ids=" ".join
)
def test_whatever_is_wrong_is_one_object_of_json(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    result = run(capsys, *arguments, "--json", code=2)
    assert json.loads(result.out)["error"]


def test_a_log_of_nothing_is_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    """Of which a workflow's next step makes something."""
    result = run(capsys, "check", "folder", "--format", "sarif", code=2)
    (one,) = json.loads(result.out)["runs"]
    assert one["results"] == [] and not one["invocations"][0]["executionSuccessful"]


def test_a_setting_that_is_called_as_an_argument_is_none_that_a_policy_has() -> None:
    with pytest.raises(KvdslError, match="has no param `policy`"):
        kvdsl.load("roco", policy=1)
    with pytest.raises(KvdslError, match="has no param `source`"):
        kvdsl.compile(POLICY.format(""), source=1)


@pytest.mark.parametrize(
    ("arguments", "says"), USAGE, ids=lambda value: " ".join(value) if isinstance(value, list) else None
)
def test_what_cannot_run(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    result = run(capsys, *arguments, code=2)
    assert result.out == ""
    assert says in result.err
    assert result.err.startswith("error: ")
    assert len(result.err.splitlines()) <= 2


def test_a_library_is_no_policy(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.kv").write_text("kv 1\n\nlet half(x) = x / 2\n")
    assert run(capsys, "check", "mine.kv").code == 0
    for command in ("compile", "explain", "run", "build", "trace"):
        result = run(capsys, command, "mine.kv")
        assert result.code == 1 and result.out == ""
        assert "there are lets in this file, but no policy" in result.err
    with pytest.raises(DiagnosticError, match="there are lets"):
        kvdsl.load("mine.kv")


def test_a_policy_without_kernels_is_explained_wherever_it_lies(capsys: pytest.CaptureFixture[str]) -> None:
    path = "folder/mine.kv"
    Path(path).write_text(POLICY.format("keep where median(position over slots) > age"))
    assert "yes; torch evicts, because there are no C++ kernels for `median over slots`" in " ".join(
        run(capsys, "explain", path).out.split()
    )
    Path(path).write_text(POLICY.format("keep where sum(attn * median(position over slots)) > age"))
    served = {one["name"]: one["ok"] for one in run(capsys, "explain", path, "--json").json()["backends"]}
    assert not served["cpu"]
    result = run(capsys, "build", path, "--target", "cpu", code=2)
    assert "there are no C++ kernels for `median over slots` (line" in result.err
    assert "to have them, write `mean`" in result.err and "2.5×" in result.err


@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="needs Linux")
def test_what_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    os.symlink("/proc/self/mem", "mine.kv")  # opens, but its first bytes cannot be read, not even by root
    result = run(capsys, "check", "mine.kv", code=2)
    assert "cannot" in result.err


def test_an_output_folder_that_cannot_be_made(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "compile", "roco", "--out", "file/below", code=2)
    assert "file/below" in result.err
    assert len(result.err.splitlines()) <= 2


# -- what only happens when a policy is loaded -------------------------------------------------------------------------


def told(capsys: pytest.CaptureFixture[str], failure: Exception) -> str:
    """What the command line says of an exception."""

    def fail() -> None:
        raise failure

    assert guarded(fail) == 2
    err: str = capsys.readouterr().err
    assert "Traceback" not in err
    return err


def test_a_cache_folder_that_cannot_be_written(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDSL_CACHE_DIR", "/dev/null/below")
    with pytest.raises(KvdslError) as caught:
        kvdsl.load("window", budget=77)
    said = told(capsys, caught.value)
    assert "/dev/null/below" in said
    assert "KVDSL_CACHE_DIR" in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("variable", ["CXX", "PATH"])
def test_a_compiler_that_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    from kvdsl.build.cxx import shared_library

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv(variable, "/nonexistent")
    Path("kernels.cpp").write_text("int nothing;\n")
    with pytest.raises(KvdslError) as caught:
        shared_library(Path("kernels.cpp"), "nothing")
    said = told(capsys, caught.value)
    assert "compiler" in said
    assert "install g++" in said
    assert len(said.splitlines()) == 1


def test_internal_errors_ask_for_an_issue(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVDSL_DEBUG", raising=False)
    said = told(capsys, RuntimeError("first\nsecond"))
    assert "internal error: RuntimeError: first second" in said
    assert "file an issue" in said
    monkeypatch.setenv("KVDSL_DEBUG", "1")

    def fail() -> None:
        raise RuntimeError("first")

    assert guarded(fail) == 2
    assert "Traceback" in capsys.readouterr().err
