"""`kvdsl.load` and `kvdsl.compile`, and the errors that they raise."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import kvdsl

CALM = 'kv 1\n\npolicy Calm {\n  "Mine."\n  param budget = 64\n  score mean(attn) * norm1(v)\n}\n'


def test_a_policy_in_a_string(tmp_path: Path) -> None:
    Calm = kvdsl.compile(CALM)
    assert (Calm.__name__, Calm.spec.name, Calm.spec.stem) == ("CalmCache", "Calm", "calm")
    assert kvdsl.compile(CALM) is Calm
    (tmp_path / "calm.kv").write_text(CALM)
    assert kvdsl.load(tmp_path / "calm.kv") is Calm  # the same package, byte for byte
    assert "32 if budget is None" in Path(sys.modules[kvdsl.compile(CALM, budget=32).__module__].__file__ or "").read_text()


def test_what_a_package_says_of_its_making_names_no_file_that_may_lie_elsewhere() -> None:
    module = sys.modules[kvdsl.compile(CALM).__module__]
    text = Path(module.__file__ or "").read_text()
    assert "from calm.kv (" in text and "Do not edit: `kvdsl compile` rewrites it." in text


def test_a_policy_in_a_string_may_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "calm.kv").write_text(CALM)
    text = 'kv 1\nimport "calm.kv"\nimport roco\npolicy Calm2 extends Calm { "Mine."; keep first 4 }\n'
    assert kvdsl.compile(text).spec.name == "Calm2"


def test_errors_of_a_string_name_the_policy() -> None:
    with pytest.raises(kvdsl.DiagnosticError, match=r"<calm>:6:14") as raised:
        kvdsl.compile(CALM.replace("attn", "atn"))
    (found,) = raised.value.diagnostics
    assert (found.code, found.help) == ("KV0201", "did you mean `attn`?")
    with pytest.raises(kvdsl.DiagnosticError, match="there is no policy in this file"):
        kvdsl.compile("")
    with pytest.raises(kvdsl.KvdslError, match=r"`kvdsl.load\('calm.kv'\)` compiles the file"):
        kvdsl.compile("calm.kv")
    assert kvdsl.compile(CALM.replace("Calm", "Class")).spec.stem == "policy"  # `class` cannot name a package


def test_errors_have_a_base_class() -> None:
    assert issubclass(kvdsl.DiagnosticError, kvdsl.KvdslError)
    assert issubclass(kvdsl.KvdslError, ValueError)
    with pytest.raises(kvdsl.KvdslError, match="there is no policy `rocco`"):
        kvdsl.load("rocco")


def test_diagnostics_reach_another_process() -> None:
    with pytest.raises(kvdsl.DiagnosticError) as raised:
        kvdsl.load("rocco")
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value)
    assert [one.message for one in again.diagnostics] == ["there is no policy `rocco`"]


def test_the_errors_are_there_without_torch() -> None:
    code = "import sys, kvdsl; kvdsl.KvdslError, kvdsl.DiagnosticError, kvdsl.compile; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_check_warns_of_is_a_python_warning() -> None:
    text = 'kv 1\npolicy Mine {\n  "A test."\n  param budget = 50\n  score mean(attn)\n  keep where position < prompt\n}\n'
    with pytest.warns(UserWarning, match=r":6: `keep where position < prompt` protects .* \(KV0424\)") as seen:
        kvdsl.compile(text)
    assert seen[0].filename == __file__
