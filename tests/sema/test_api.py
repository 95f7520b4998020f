"""The compiler as others use it: light to import, fast, and independent of where it runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvdsl.compiler import Analysis, analyse, find_policy, shipped_policies
from kvdsl.diagnostics import DiagnosticError
from kvdsl.source import SourceFile

HEAVY = ("torch", "transformers", "numpy", "triton", "rich", "difflib")


def test_analysing_imports_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; from kvdsl.compiler import analyse, find_policy; assert analyse(find_policy('roco')).ok;"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_an_analysis_without_a_policy_says_why() -> None:
    analysis = analyse(SourceFile("x.kv", "kv 1\npolicy P { scor x }"))
    assert isinstance(analysis, Analysis)
    assert not analysis.ok
    with pytest.raises(DiagnosticError, match="unknown statement `scor`"):
        _ = analysis.policy


def test_policies_are_found_by_stem_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_policy("roco").name == "roco.kv"
    own = tmp_path / "own.kv"
    own.write_text('kv 1\npolicy Own { "d" }\n')
    assert find_policy(own) == own
    assert find_policy(str(own)) == own
    monkeypatch.chdir(tmp_path)
    assert analyse(find_policy("own.kv")).policy.name == "Own"
    assert analyse(find_policy("vatp_h2o")).ok


@pytest.mark.parametrize("name", ["rocco", "no/such.kv", "such.kv", "", "a\0b", "x" * 5_000, ".", "/"])
def test_policies_that_are_not_there(name: str) -> None:
    with pytest.raises(DiagnosticError) as raised:
        find_policy(name)
    (found,) = raised.value.diagnostics
    assert found.code == "KV0214"
    assert found.help


@pytest.mark.parametrize(
    ("name", "help"),
    [
        ("rocco", "did you mean `roco`?"),
        ("calm", "did you mean `calm.kv`?"),
        ("nothing_like_it", "`kvdsl list` shows the shipped policies; name your own by its file, `mine.kv`"),
        ("clam.kv", "did you mean `calm.kv`?"),
        ("below/tiny.kv", "did you mean `below/tiny2.kv`?"),
        ("roco.kv", "`roco`, without `.kv`, is the shipped policy"),
        ("below/rocco.kv", "did you mean `roco`, the shipped policy?"),
        ("else/where.kv", "paths are relative to the current folder; `kvdsl list` shows the shipped policies"),
        ('kv 1\npolicy P { "d" }', "`kvdsl.compile` compiles a policy from a string"),
    ],
)
def test_what_was_perhaps_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, help: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    for own in ("calm.kv", "below/tiny2.kv"):
        (tmp_path / own).write_text("kv 1\n")
    with pytest.raises(DiagnosticError) as raised:
        find_policy(name)
    assert raised.value.diagnostics[0].help == help


def test_tests_are_no_policies() -> None:
    assert all(not path.stem.endswith("_test") for path in shipped_policies())


def test_analysing_is_repeatable() -> None:
    assert analyse(find_policy("scissorhands")) == analyse(find_policy("scissorhands"))
    assert hash(analyse(find_policy("roco")).policy) == hash(analyse(find_policy("roco")).policy)
