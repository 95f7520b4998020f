"""`kvdsl test`, and files of tests among other commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.harness import run

POLICY = 'kv 1\n\npolicy Mine {\n  "Mine."\n  param budget = 2\n  score position\n}\n'
TESTS = """kv 1
import "mine.kv"

test "the oldest leaves" {
  use Mine
  prompt { 3 times attend rest 0 }
  expect evicted 0
}

test "the oldest leaves, later too" {
  use Mine
  prompt { 3 times attend rest 0 }
  attend rest 0
  expect evicted 2  # which is wrong
}
"""
BROKEN = 'kv 1\nimport "mine.kv"\ntest "a" {\n  use Yours\n  attend 1\n  expect live 1\n}\n'


@pytest.fixture(autouse=True)
def _files() -> None:
    Path("mine.kv").write_text(POLICY)
    Path("mine_test.kv").write_text(TESTS)


def test_a_failure_is_shown_at_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "test")
    assert (result.code, result.err) == (1, "")
    assert result.out == (
        "mine_test.kv  1 passed, 1 failed\n"
        "\n"
        "FAILED the oldest leaves, later too\n"
        "  --> mine_test.kv:14:3\n"
        "   |\n"
        "14 |   expect evicted 2  # which is wrong\n"
        "   |   ^^^^^^^^^^^^^^^^ evicted: expected 2, found 1\n"
        "\n"
        "    position   1    2  3\n"
        "    attn       0    0  0\n"
        "    protected  .    .  yes\n"
        "    score      1    2  3\n"
        "    evicted    yes  .  .\n"
        "\n"
        "1 passed, 1 failed\n"
    )


@pytest.mark.parametrize("name", ["mine_test.kv", "mine.kv", "."])
def test_what_to_run(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run(capsys, "test", name).out.startswith("mine_test.kv  1 passed, 1 failed\n")


def test_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "test", "roco", "h2o_test")
    assert (result.code, result.err) == (0, "")
    assert "roco_test.kv" in result.out
    assert "h2o_test.kv" in result.out
    assert result.out.endswith(" passed, 0 failed\n")


@pytest.mark.nightly
def test_without_tests_of_ones_own_the_shipped_ones_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine_test.kv").unlink()
    result = run(capsys, "test", "-k", "oldest or standard deviation or value's norm", code=0)
    assert "vatp_code_test.kv" in result.out


@pytest.mark.parametrize(
    ("expression", "passed", "failed"),
    [
        ("later", 0, 1),
        ("LEAVES", 1, 1),
        ("not later", 1, 0),
        ("oldest and not later", 1, 0),
        ("nonsense or later", 0, 1),
        ("nonsense and oldest or later", 0, 1),
        ("mine_test", 1, 1),
    ],
)
def test_some_of_them(capsys: pytest.CaptureFixture[str], expression: str, passed: int, failed: int) -> None:
    result = run(capsys, "test", "-k", expression)
    assert result.out.endswith(f"{passed} passed, {failed} failed\n")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "test", "--json")
    content = result.json()
    assert result.code == 1
    assert (content["passed"], content["failed"], content["diagnostics"]) == (1, 1, [])
    good, bad = content["tests"]
    assert good == {"file": "mine_test.kv", "title": "the oldest leaves", "line": 4, "passed": True, "failures": []}
    assert bad["failures"] == [{"line": 14, "step": "expect evicted 2", "message": "evicted: expected 2, found 1"}]


def test_a_file_with_errors_is_told_and_the_others_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("other_test.kv").write_text(BROKEN)
    result = run(capsys, "test", code=1)
    assert "unknown policy `Yours`" in result.err
    assert result.out.endswith("1 passed, 1 failed, 1 file not run\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere_test.kv",), "cannot read `nowhere_test.kv`: there is no such file"),
        (("nonsense",), "there is no policy `nonsense`"),
        (("-k", "nonsense"), "no test matches"),
        (("alone.kv",), "`alone.kv` has no tests"),
        (("empty",), "there are no tests in these files"),
    ],
)
def test_what_cannot_be_run(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    Path("alone.kv").write_text(POLICY)
    Path("empty").mkdir()
    result = run(capsys, "test", *arguments, code=2)
    assert message in result.err
    assert result.out == "" or result.out.endswith("0 passed, 0 failed, 1 file not run\n")


def test_a_shipped_policy_without_tests(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a wheel, which leaves most of them out."""
    monkeypatch.setattr("kvdsl.cli.test._shipped", dict)
    assert "an installed kvdsl has no tests of `h2o`" in run(capsys, "test", "h2o", code=2).err


# -- files of tests among other commands -------------------------------------------------------------------------------


def test_check_takes_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "check").out == "2 files checked: no problems\n"
    Path("other_test.kv").write_text(BROKEN)
    result = run(capsys, "check", "--format", "json", code=1)
    (found,) = result.json()["diagnostics"]
    assert (found["code"], found["file"]) == ("KV0203", "other_test.kv")


def test_others_say_that_there_is_no_policy(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("compile", "explain"):
        result = run(capsys, command, "mine_test.kv", code=1)
        assert "there are tests in this file, but no policy" in result.err and "`kvdsl test` runs them" in result.err


def test_list_does_not_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert "_test" not in run(capsys, "list").out
