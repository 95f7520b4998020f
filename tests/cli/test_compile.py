"""`kvdsl compile`."""

from __future__ import annotations

import ast
import os
import shlex
from pathlib import Path

import pytest

from kvdsl.compiler import analyse, compile_file, find_policy, shipped_policies
from kvdsl.ir.nodes import Policy
from tests.cli.harness import run

PYTHON = ["__init__.py", "cache.py", "kernels_torch.py"]


@pytest.mark.parametrize("stem", [path.stem for path in shipped_policies()])
def test_compiles_every_shipped_policy(capsys: pytest.CaptureFixture[str], stem: str) -> None:
    result = run(capsys, "compile", stem, code=0)
    assert "error" not in result.err
    for name in PYTHON:
        ast.parse(Path("generated", stem, name).read_text())
    served = {one["name"]: one["ok"] for one in run(capsys, "explain", stem, "--json").json()["backends"]}
    assert Path("generated", stem, "kernels_cpu.cpp").exists() == served["cpu"]
    assert f"from generated.{stem} import " in result.out


def test_leaves_alone_what_would_not_change(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "compile", "roco")
    file = Path("generated/roco/cache.py")
    os.utime(file, ns=(1, 1))
    Path("generated/__init__.py").write_text("# mine\n")
    result = run(capsys, "compile", "roco", code=0)
    assert "written" not in result.out
    assert file.stat().st_mtime_ns == 1
    assert Path("generated/__init__.py").read_text() == "# mine\n"


def test_check_shows_the_difference_and_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "compile", "roco")
    assert run(capsys, "compile", "roco", "--check").code == 0
    file = Path("generated/roco/cache.py")
    edited = file.read_text().replace("class RoCoCache", "class Edited")
    file.write_text(edited)
    result = run(capsys, "compile", "roco", "--check", code=1)
    assert "-class Edited" in result.out
    assert "+class RoCoCache" in result.out
    assert "kvdsl compile roco" in result.err
    assert file.read_text() == edited


def test_check_says_the_command_that_mends_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my policies").mkdir()
    Path("my policies/calm.kv").write_text('kv 1\n\npolicy Calm {\n  "Mine."\n  param budget = 64\n  score mean(attn)\n}\n')
    arguments = ["compile", "my policies/calm.kv", "--out", "caches", "--set", "budget=32"]
    said = run(capsys, *arguments, "--check").err
    command = shlex.split(said.partition("`")[2].partition("`")[0])
    assert command == ["kvdsl", *arguments]
    assert run(capsys, *command[1:]).code == 0
    assert run(capsys, *arguments, "--check").code == 0


def test_check_reports_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "compile", "h2o", "--check", code=1)
    assert "generated/h2o/cache.py" in result.out
    assert not Path("generated").exists()


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    first = run(capsys, "compile", "roco", "h2o", "--out", "caches", "--json").json()["policies"]
    assert [one["name"] for one in first] == ["RoCo", "H2O"]
    assert "caches/roco/cache.py" in first[0]["files"]
    assert first[0]["changed"] == first[0]["files"]
    second = run(capsys, "compile", "roco", "h2o", "--out", "caches", "--json").json()["policies"]
    assert [one["changed"] for one in second] == [[], []]


def test_python_writes_what_the_command_writes(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo writes so, and `compile --check` then finds nothing to do."""
    assert run(capsys, "compile", "roco").code == 0
    files = compile_file("roco").files
    assert files == {path.name: path.read_text() for path in Path("generated/roco").iterdir()}


@pytest.mark.parametrize(
    ("arguments", "code", "diagnostic"),
    [
        (["compile", "bad.kv"], 1, "KV0301"),
        (["compile", "roco", "--set", "budget=0"], 1, "KV0403"),
        (["compile", "rocco"], 2, "KV0214"),
        (["compile", "roco", "--bogus"], 2, None),
        (["compile", "."], 1, "KV0301"),
        (["explain", "bad.kv"], 1, "KV0301"),
        (["run", "rocco"], 2, "KV0214"),
        (["run", "roco", "--policy", "h2o"], 2, None),
    ],
)
def test_errors_are_one_json_object(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, diagnostic: str | None
) -> None:
    Path("bad.kv").write_text('kv 1\n\npolicy Bad {\n  "Mine."\n  param budget = 64\n  score attn\n}\n')
    result = run(capsys, *arguments, "--json")
    told = result.json()
    assert (result.code, [one["code"] for one in told["diagnostics"]]) == (code, [] if diagnostic is None else [diagnostic])
    assert told["error"]["message"]
    if diagnostic is not None:
        assert told["error"]["message"] == told["diagnostics"][0]["message"]
    assert "error" in result.err


def test_two_files_of_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    Path("roco.kv").write_text('kv 1\n\npolicy Mine {\n  "Mine."\n}\n')
    result = run(capsys, "compile", "roco", "roco.kv", code=2)
    assert "`roco`" in result.err


@pytest.mark.parametrize("stage", ["syntax", "ir", "plan", "code"])
def test_emit_prints_a_stage_and_writes_nothing(capsys: pytest.CaptureFixture[str], stage: str) -> None:
    result = run(capsys, "compile", "roco", "--emit", stage, code=0)
    assert "RoCo" in result.out
    assert not Path("generated").exists()


@pytest.mark.parametrize("stage", ["syntax", "ir", "plan", "code"])
def test_emit_as_data(capsys: pytest.CaptureFixture[str], stage: str) -> None:
    [roco] = run(capsys, "compile", "roco", "--emit", stage, "--json").json()["policies"]
    assert roco["name"] == "RoCo"
    assert roco.keys() == {"name", stage}
    assert "RoCo" in str(roco[stage])
    assert not Path("generated").exists()


def test_the_ir_as_data_is_the_policy(capsys: pytest.CaptureFixture[str]) -> None:
    [quest] = run(capsys, "compile", "quest", "--emit", "ir", "--json").json()["policies"]
    assert Policy.model_validate(quest["ir"]) == analyse(find_policy("quest")).policy


def test_the_ir_can_be_compiled(capsys: pytest.CaptureFixture[str]) -> None:
    Path("vatp_h2o.kv").write_text(run(capsys, "compile", "vatp_h2o", "--emit", "ir").out)
    assert analyse(Path("vatp_h2o.kv")).policy == analyse(find_policy("vatp_h2o")).policy


def test_an_error_in_one_file_writes_none(capsys: pytest.CaptureFixture[str]) -> None:
    Path("bad.kv").write_text('kv 1\n\npolicy Bad {\n  "Mine."\n  param budget = 64\n  score attn\n}\n')
    result = run(capsys, "compile", "roco", "bad.kv", code=1)
    assert "KV0301" in result.err
    assert not Path("generated").exists()


MINE = 'kv 2\n\npolicy RoCo {\n  "Mine."\n  param budget = 64\n  score position\n  keep last 1\n}\n'
PYTHON_POLICY = """\
import kvdsl.lang

@kvdsl.policy
def calm(p, budget=64):
    "Mine."
    p.score(kvdsl.lang.position)
"""


def test_a_package_from_another_source_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "compile", "roco")
    Path("roco.kv").write_text(MINE)
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "calm.kv").write_text(MINE.replace("RoCo", "Calm"))
    run(capsys, "compile", "a/calm.kv")
    Path("calm.py").write_text(PYTHON_POLICY)
    before = {path: path.read_bytes() for path in Path("generated").rglob("*.*")}
    for name, there in (("roco.kv", "kvdsl:roco"), ("b/calm.kv", "a/calm.kv"), ("calm.py:calm", "a/calm.kv")):
        result = run(capsys, "compile", name)
        assert result.code == 2, result
        assert f"`{there}`" in result.err and f"`{name}`" in result.err and "--force" in result.err
    assert {path: path.read_bytes() for path in Path("generated").rglob("*.*")} == before
    assert run(capsys, "compile", "roco.kv", "--check").code == 1
    assert run(capsys, "compile", "roco.kv", "--force").code == 0
    assert run(capsys, "compile", "roco.kv").code == 0, "it is its own source by now"
    assert run(capsys, "compile", "roco").code == 2


def test_the_same_source_goes_by_several_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Path("policies").mkdir()
    Path("policies/calm.kv").write_text(MINE.replace("RoCo", "Calm"))
    assert run(capsys, "compile", "policies/calm.kv").code == 0
    Path("policies/calm.kv").write_text(MINE.replace("RoCo", "Calm").replace("64", "128"))
    assert run(capsys, "compile", str(tmp_path / "policies" / "calm.kv"), "--out", str(tmp_path / "generated")).code == 0
    assert run(capsys, "compile", "roco").code == 0
    assert run(capsys, "compile", str(find_policy("roco")), "--set", "budget=32").code == 0


def test_files_that_kvdsl_did_not_make_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    Path("src/calm").mkdir(parents=True)
    Path("src/calm/cache.py").write_text("mine = 1\n")
    Path("calm.kv").write_text(MINE.replace("RoCo", "Calm"))
    result = run(capsys, "compile", "calm.kv", "--out", "src", code=2)
    assert "`src/calm` was not made by kvdsl" in result.err
    assert [path.name for path in Path("src").rglob("*.py")] == ["cache.py"]
    Path("src/calm/cache.py").unlink()
    run(capsys, "compile", "calm.kv", "--out", "src")
    Path("src/calm/manifest.json").unlink()
    Path("src/calm/cache.py").write_text(Path("src/calm/cache.py").read_text() + "\n")
    assert run(capsys, "compile", "calm.kv", "--out", "src").code == 0, "what was cut short is finished"
