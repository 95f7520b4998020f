"""`kvdsl new`: what it writes is in the canonical layout, has nothing wrong with it, and its test passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.harness import run

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("name", "path", "policy"),
    [
        ("mine", "mine.kv", "Mine"),
        ("a/deep/sparse_tail", "a/deep/sparse_tail.kv", "SparseTail"),
        ("h3o.kv", "h3o.kv", "H3o"),
    ],
)
def test_what_it_writes_works(capsys: Capture, name: str, path: str, policy: str) -> None:
    result = run(capsys, "new", name)
    assert (result.code, result.err) == (0, "")
    assert f"policy {policy} {{" in Path(path).read_text()
    assert run(capsys, "check", ".", "--deny-warnings").code == 0
    assert run(capsys, "fmt", "--check").code == 0
    tested = run(capsys, "test", path, code=0)
    assert "1 passed, 0 failed" in tested.out
    assert run(capsys, "compile", path, "--out", "generated").code == 0


def test_what_comes_next_can_be_done(capsys: Capture) -> None:
    """What each command is for stands behind it; the one that loads a model is only read."""
    told = run(capsys, "new", "mine").out.partition("next: ")[2].splitlines()
    commands = [line.partition("#") for line in told]
    assert all(what.strip() for _, _, what in commands)
    assert len({line.index("#") for line in ["      " + told[0], *told[1:]]}) == 1
    for words in (command.split() for command, _, _ in commands):
        assert words[0] == "kvdsl"
        asked = words[1:] if words[1] != "run" else ["run", "--help"]
        assert run(capsys, *asked).code == 0, words


def test_the_test_can_fail(capsys: Capture) -> None:
    run(capsys, "new", "mine")
    Path("mine.kv").write_text(Path("mine.kv").read_text().replace("mean(attn)", "position"))
    assert run(capsys, "test", "mine.kv").code == 1


def test_nothing_is_overwritten(capsys: Capture) -> None:
    Path("mine_test.kv").write_text("mine\n")
    result = run(capsys, "new", "mine")
    assert (result.code, result.out) == (2, "")
    assert "`mine_test.kv` already" in result.err
    assert not Path("mine.kv").exists()
    assert Path("mine_test.kv").read_text() == "mine\n"


@pytest.mark.parametrize("name", ["3x", "a-b", "x_test", "__x", "class", "ä", "a b"])
def test_names_that_no_policy_can_have(capsys: Capture, name: str) -> None:
    result = run(capsys, "new", name)
    assert (result.code, result.out) == (2, "")
    assert "choose another name" in result.err
    assert list(Path().iterdir()) == []
