"""What all commands have alike: `--json`, `-`, folders, and what is said of long lines and long sums."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvdsl.cli.group import LazyGroup
from kvdsl.compiler import find_policy
from kvdsl.diagnostics import DiagnosticError
from tests.cli.harness import run

ROOT = Path(__file__).resolve().parents[2]
MINE = 'kv 2\n\npolicy Mine {\n  "Mine."\n  param budget = 64\n  score mean(attn)\n}\n'
TESTS = 'kv 2\nimport h2o\n\ntest "one token stays" {\n  use H2O\n  prompt { attend 1 }\n  expect kept 0\n}\n'
WITHOUT_JSON = {"lsp"}  # speaks its own protocol


def commands(group: click.Group, name: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for word in group.list_commands(context):
        found = group.get_command(context, word)
        assert found is not None
        if isinstance(found, click.Group):
            yield from commands(found, f"{name} {word}".strip())
        else:
            yield f"{name} {word}".strip(), found


def test_every_command_has_json() -> None:
    lacking = [
        name
        for name, command in commands(LazyGroup("kvdsl"))
        if "--json" not in [option for param in command.params for option in param.opts]
    ]
    assert set(lacking) == WITHOUT_JSON


@pytest.mark.parametrize(
    ("words", "text", "shown"),
    [
        ("check -", MINE, "no problems"),
        ("explain -", MINE, "Mine (policy.kv)"),
        ("show -", MINE, "policy Mine"),
        ("fmt -", MINE, "policy Mine"),
        ("compile -", MINE, "from generated.policy import MineCache"),
        ("diff - -", MINE, "no difference in meaning"),
        ("test -", TESTS, "1 passed"),
    ],
)
def test_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, text: str, shown: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    result = run(capsys, *words.split())
    assert result.code == 0 and shown in result.out, result


def test_no_library_call_reads_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(MINE.encode())))
    with pytest.raises(DiagnosticError):
        find_policy("-")


def test_folders(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine/deep").mkdir(parents=True)
    Path("mine/one.kv").write_text(MINE)
    Path("mine/one_test.kv").write_text(TESTS)
    Path("mine/lets.kv").write_text("kv 2\nlet half(x) = x / 2\n")
    Path("mine/deep/two.kv").write_text(MINE)
    done = run(capsys, "compile", "mine", "--json").json()["policies"]
    assert [Path(one["files"][-1]).parent.name for one in done] == ["two", "one"]
    assert (
        run(capsys, "check", "mine").code
        == run(capsys, "fmt", "--check", "mine").code
        == run(capsys, "test", "mine").code
        == 0
    )
    Path("empty").mkdir()
    assert "no .kv file below `empty` holds a policy" in run(capsys, "compile", "empty").err


def test_the_clone_has_no_errors(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert run(capsys, "check", "editors", "policies", "benchmarks").code == 0


def test_json_of_what_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "new", "mine", "--json").json()["files"] == ["mine.kv", "mine_test.kv"]
    assert run(capsys, "new", "mine", "--json").json()["error"]["message"].startswith("`mine.kv` already exists")
    Path("mine.kv").write_text(MINE.replace("  param", "     param"))
    [one] = run(capsys, "fmt", "--check", "mine.kv", "--json").json()["files"]
    assert one["changed"] and one["text"] == MINE and Path("mine.kv").read_text() != MINE
    assert run(capsys, "fmt", "mine.kv", "--json").json()["files"][0]["changed"]
    assert Path("mine.kv").read_text() == MINE


def test_a_file_without_tests_says_how_to_begin(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.kv").write_text(MINE)
    said = run(capsys, "test", "mine.kv")
    assert said.code == 2 and 'write them in `mine_test.kv` next to it, which begins with `import "mine.kv"`' in said.err


def said_of(capsys: pytest.CaptureFixture[str], folder: Path, text: str) -> list[str]:
    file = folder / "mine.kv"
    file.write_text(text)
    return run(capsys, "check", str(file)).err.splitlines()


def test_whole_words_are_marked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = said_of(capsys, tmp_path, MINE.replace("budget", "budgét_x"))
    assert lines[0] == "error[KV0102]: `budgét_x` is not a name"
    assert lines[4].count("^") == len("budgét_x")
    assert lines[5].endswith("names consist of the ASCII letters, digits and `_`: write `budget_x`, say")


@pytest.mark.parametrize("columns", [60, 100, 500])
def test_a_long_sum_is_not_nested_and_fits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = said_of(capsys, tmp_path, MINE.replace("mean(attn)", "age" + " + age" * 5000))
    assert lines[0] == "error[KV0107]: the expression has more than 100 operators in a row"
    assert lines[-1] == "1 error"
    assert max(map(len, lines[2:])) <= min(columns, 125)
    nested = said_of(capsys, tmp_path, MINE.replace("mean(attn)", "abs(" * 200 + "age" + ")" * 200))
    assert "nested" in nested[0]
