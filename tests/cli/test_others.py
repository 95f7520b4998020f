"""`kvdsl list`, `doctor`, help and version."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import kvdsl
from kvdsl import lab
from kvdsl.cli import commands
from kvdsl.cli.group import grouped
from kvdsl.compiler import shipped_policies
from kvdsl.runtime.cpu.backend import CpuBackend
from tests.cli.harness import run

STEMS = [path.stem for path in shipped_policies()]


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert kvdsl.__version__ in run(capsys, "--version").out
    result = run(capsys, "--help", code=0)
    assert all(name in result.out for name in commands())
    assert run(capsys).code == 2


@pytest.mark.parametrize("name", commands())
def test_every_command_has_examples(capsys: pytest.CaptureFixture[str], name: str) -> None:
    result = run(capsys, name, "--help", code=0)
    assert f"kvdsl {name}" in result.out


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "list", code=0)
    head, *lines = result.out.splitlines()
    assert head.split() == ["name", "what", "it", "does", "params"]
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == STEMS


@pytest.mark.parametrize("words", [["list"], ["list", "--all"]])
def test_list_has_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """Nothing of one stands below another's head, at any width of a terminal."""
    for columns in (60, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        head, *lines = run(capsys, *words).out.splitlines()
        starts = [head.index(name) for name in ("what it does", "params")]
        assert all(line[start - 2 : start].strip() == "" for line in lines for start in starts)
        assert max(map(len, lines)) <= max(min(columns, 110), starts[1] + 20)
        assert any(line[starts[1] :] == "recent=budget/2" for line in lines)


def test_help_groups_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    told = run(capsys, "--help").out
    parts = dict(zip(*[iter(re.split(r"^(\w+):\n", told, flags=re.M)[1:])] * 2, strict=True))
    groups = {head: re.findall(r"^  ([a-z]+)  ", part, re.M) for head, part in parts.items() if head != "Options"}
    assert list(groups) == ["Write", "Run", "Measure", "Serve", "Tools"]
    assert [name for names in groups.values() for name in names] == list(commands())
    assert groups["Measure"] == list(lab.COMMANDS)


def test_commands_of_other_packages_come_last() -> None:
    assert list(grouped(["theirs", "eval", "run"]).items())[-1] == ("Added", ["theirs"])


def test_list_json(capsys: pytest.CaptureFixture[str]) -> None:
    policies = {one["file"]: one for one in run(capsys, "list", "--json").json()["policies"]}
    assert list(policies) == [f"{stem}.kv" for stem in STEMS]
    roco = policies["roco.kv"]
    assert roco["name"] == "RoCo"
    assert "Efficacy" in roco["paper"]
    assert [(one["name"], one["default"]) for one in roco["params"]] == [("budget", "512"), ("protect", "budget / 2")]
    assert policies["full.kv"]["paper"] is None


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "doctor", code=0)
    for name in ("python", "torch", "transformers", "compiler", "kvdsl", "triton"):
        assert f" {name} " in result.out
    found = run(capsys, "doctor", "--json").json()
    checks = found["checks"]
    assert found["ok"] and all(
        check["ok"] is not False for check in checks if check["group"] in ("C++", "caches", "packages")
    )
    assert all({"group", "name", "ok", "detail", "help", "needed"} == check.keys() for check in checks)


def test_doctor_without_a_compiler(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    result = run(capsys, "doctor", "--json", code=0)
    checks = {check["name"]: check for check in result.json()["checks"]}
    assert checks["compiler"]["ok"] is False
    assert "install g++" in checks["compiler"]["detail"]
    assert checks["cpu"]["ok"] is False
    assert checks["torch"]["ok"] is True


@pytest.mark.parametrize(
    ("command", "says"), [("true", "wrote no file"), ("false", "without output"), ("g++ -fno-such", "-fno-such")]
)
def test_doctor_with_a_compiler_that_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, says: str
) -> None:
    monkeypatch.setenv("CXX", command)
    result = run(capsys, "doctor", "--json")
    assert (result.code, result.json()["ok"]) == (1, False)
    checks = {check["name"]: check for check in result.json()["checks"]}
    for name in ("builds", "cpu"):
        assert checks[name]["ok"] is False
        assert says in checks[name]["detail"]


def test_doctor_notices_kernels_that_go_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    decode = CpuBackend.decode
    monkeypatch.setattr(CpuBackend, "decode", lambda *arguments: decode(*arguments) * 1.1)
    result = run(capsys, "doctor", "--json", code=1)
    assert "differ by" in {check["name"]: check for check in result.json()["checks"]}["cpu"]["detail"]


def test_doctor_without_a_cache_folder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDSL_CACHE_DIR", "/dev/null/below")
    result = run(capsys, "doctor", "--json")
    assert result.code == 1, "nothing can be loaded without one"
    checks = {check["name"]: check for check in result.json()["checks"]}
    assert checks["kvdsl"]["ok"] is False
    assert "KVDSL_CACHE_DIR" in checks["kvdsl"]["help"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("targets", "code", "told"), [("cpu", 0, "decode"), ("cuda:90,cpu", 2, "Triton cannot be imported")]
)
def test_a_machine_without_triton_builds_what_it_runs(targets: str, code: int, told: str) -> None:
    """And is told what it needs for GPUs."""
    command = "import sys; sys.modules['triton'] = None; from kvdsl.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", command, "build", "roco", "--target", targets], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    assert told in done.stdout + done.stderr
