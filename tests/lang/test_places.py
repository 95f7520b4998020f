"""Policies in Python files, by their names: mistakes are told where they were made in Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvdsl.compiler import find_policy
from kvdsl.diagnostics import DiagnosticError
from kvdsl.lang.places import Place
from tests.cli.harness import run

HEAD = """\
import kvdsl
from kvdsl.lang import *

"""
COLUMNS = sys.version_info >= (3, 11)
"""Whether Python knows them."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def policy(*lines: str, head: str = "def mine(p, budget=8):") -> str:
    """A Python file with one policy, whose first line is the seventh."""
    return HEAD + "".join(
        f"{line}\n" for line in ("@kvdsl.policy", head, '    "A test."', *(f"    {line}" for line in lines))
    )


def found(capsys: pytest.CaptureFixture[str], text: str, name: str = "mine.py:mine") -> dict[str, object]:
    """The only diagnostic of a Python file's policy."""
    Path("mine.py").write_text(text, encoding="utf-8")
    result = run(capsys, "check", name, "--format", "json", code=1)
    (one,) = result.json()["diagnostics"]
    return one


def pointed_at(one: dict[str, object]) -> tuple[int, str]:
    """The line that a diagnostic is about, and what is marked in it."""
    start, end = one["range"]["start"], one["range"]["end"]
    lines = Path(str(one["file"])).read_text(encoding="utf-8").splitlines()
    last = end["column"] - 1 if end["line"] == start["line"] else None
    return start["line"], lines[start["line"] - 1][start["column"] - 1 : last]


@pytest.mark.parametrize(
    ("lines", "code", "line", "marked"),
    [
        (["p.score(mean(k) * 2)"], "KV0304", 7, "mean(k)"),
        (["p.score(", "    mean(attn)", "    * mean(k))"], "KV0304", 9, "mean(k)"),
        (["x = mean(k)", "p.score(x)"], "KV0304", 7, "mean(k)"),
        (["p.score(2 + name('agee'))"], "KV0201", 7, "2 + name('agee')"),
        (["é = age * 'é'.isascii().real; p.score(é * 2 + mean(k))"], "KV0304", 7, "mean(k)"),
        (["p.score(attn)"], "KV0301", 7, "p.score(attn)"),
        (["p.score(age)", "p.keep(where=position % 4)"], "KV0303", 8, "position % 4"),
        (["p.score(age)", "p.when('somewhen')"], "KV0310", 8, "p.when('somewhen')"),
        (["p.score(age)", "p.keep(first=4) or p.score(position)"], "KV0207", 8, "p.score(position)"),
        (["far = p.let('far', mean(k))", "p.score(far)"], "KV0304", 7, "mean(k)"),
        (["p.score(age)", "if age > 3:", "    pass"], "KV0115", 8, "age > 3"),
        (["p.score(age)", "p.keep(frist=3)"], "KV0115", 8, "p.keep(frist=3)"),
        (["p.score(age)", "p.scor(age)"], "KV0115", 8, "p.scor"),
        (["p.score(age)", "1 / 0"], "KV0115", 8, "1 / 0"),
        (["p.score(age)", "raise SystemExit(3)"], "KV0115", 8, "raise SystemExit(3)"),
        (["p.score(age", "p.keep(last=3)"], "KV0115", 7, None),
    ],
)
def test_mistakes_are_told_where_they_were_made(
    capsys: pytest.CaptureFixture[str], lines: list[str], code: str | None, line: int, marked: str | None
) -> None:
    one = found(capsys, policy(*lines))
    assert one["file"] == "mine.py"
    assert code in (None, one["code"])
    at, text = pointed_at(one)
    assert at == line
    if marked is not None and COLUMNS:
        assert text == marked


def test_params_and_the_policy_are_told_where_the_function_is(capsys: pytest.CaptureFixture[str]) -> None:
    one = found(capsys, policy("p.score(age)", head="def mine(p, budget=8,\n         sinks=1.5, layer=3):"))
    assert (one["code"], pointed_at(one)) == ("KV0210", (6, "layer"))
    one = found(capsys, policy("p.score(age)", head="def a__b(p, budget=8):"), "mine.py")
    assert (one["code"], pointed_at(one)) == ("KV0111", (5, "a__b"))


def test_what_was_made_elsewhere_says_where_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    Path("parts.py").write_text("from kvdsl.lang import k, mean\n\n\ndef unlike(x):\n    return mean(x)\n")
    one = found(capsys, "from parts import unlike\n" + policy("p.score(unlike(k))"))
    assert one["file"].endswith("parts.py")
    assert pointed_at(one)[0] == 5
    (label,) = one["labels"]
    assert (label["file"], label["range"]["start"]["line"], label["message"]) == ("mine.py", 8, "used here")
    assert "parts" in sys.modules and not any(entry == str(Path.cwd()) for entry in sys.path)
    del sys.modules["parts"]


def test_a_statement_that_is_given_twice_shows_both(capsys: pytest.CaptureFixture[str]) -> None:
    one = found(capsys, policy("p.score(age)", "p.score(position)"))
    assert pointed_at(one)[0] == 8
    assert [(label["range"]["start"]["line"], label["message"]) for label in one["labels"]] == [(7, "first here")]


def test_a_place_without_columns_is_the_line(folder: Path) -> None:
    Path("a.py").write_text("x = 3\n    y = é(4)  \n")
    assert Place("a.py", 2).span().text == "y = é(4)"
    assert Place("a.py", 2, 2, 8, 13).span().text == "é(4)"
    assert Place("gone.py", 7).span().file.location(Place("gone.py", 7).span().start) == (7, 1)


# -- by name -----------------------------------------------------------------------------------------------------------

TWO = HEAD + "@kvdsl.policy\ndef one(p, budget=8):\n    'One.'\n    p.score(age)\n\nuno = one\n"


def test_names() -> None:
    Path("two.py").write_text(TWO)
    assert find_policy("two.py").text == find_policy("two.py:one").text == find_policy("./two.py:uno").text
    Path("two.py").write_text(TWO + "two = kvdsl.policy(name='Two')(lambda p, budget=8: p.score(position))\n")
    assert "policy Two {" in find_policy("two.py:two").text
    Path("empty.py").write_text("")
    for name, said in (
        ("two.py", "name one: `two.py:one`, `two.py:uno` or `two.py:two`"),
        ("two.py:twoo", "did you mean `two`?"),
        ("empty.py", "`empty.py` has no policy"),
        ("empty.py:x", "there is no policy `x` in `empty.py`"),
        ("gone.py:x", "there is no file `gone.py`"),
    ):
        with pytest.raises(DiagnosticError, match="KV0214") as raised:
            find_policy(name)
        assert said in str(raised.value)


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    Path("two.py").write_text("print('hello')\n" + TWO)
    shown = run(capsys, "show", "two.py:one")
    assert shown.out.startswith("kv 2\n\npolicy One {\n")
    assert shown.err == "hello\ntwo.py\n"
    Path("one.kv").write_text(shown.out)
    assert run(capsys, "show", "two.py:one", "--json").json()["source"] == shown.out
    for command in ("explain", "check"):
        hello = "hello\n" + run(capsys, command, "one.kv").out
        assert hello == "hello\n" + run(capsys, command, "two.py:one").out
    assert (
        run(capsys, "explain", "two.py:one", "--format", "html").out
        == run(capsys, "explain", "one.kv", "--format", "html").out
    )
    assert run(capsys, "compile", "two.py:one").code == 0
    assert run(capsys, "compile", "one.kv", "--out", "other").code == 0
    written, python = (
        {path.name: path.read_bytes() for path in Path(out, "one").iterdir()} for out in ("other", "generated")
    )
    assert written.keys() == python.keys()
    assert {name for name in python if written[name] != python[name]} == {"manifest.json"}  # which names the source
    assert run(capsys, "diff", "two.py:one", "one.kv").code == 0
    assert run(capsys, "diff", "two.py:one", "h2o", "--set", "budget=16").code == 1
    assert run(capsys, "check", "two.py:one", "--set", "budget=0").code == 1
    once = run(capsys, "show", "two.py:one with when prefill").out
    assert once.startswith("kv 1\n\npolicy One_when_prefill {\n") and "  when prefill\n" in once
    assert run(capsys, "check", "two.py:one with when somewhen").code == 1
    assert run(capsys, "check").out == "1 file checked: no problems\n"  # no Python file is run unasked


def test_a_tensors_file_lies_beside_the_python_file(folder: Path) -> None:
    below = folder / "below"
    below.mkdir()
    text = policy("head = p.input('head', 'layers', from_='gone.safetensors')", "p.score(age * head)")
    (below / "mine.py").write_text(text)
    from kvdsl.compiler import analyse, compile_file
    from kvdsl.errors import KvdslError

    assert analyse(find_policy("below/mine.py")).ok
    with pytest.raises(KvdslError, match=r"below/gone\.safetensors"):
        compile_file("below/mine.py")


def test_a_shell_that_completes_runs_nothing() -> None:
    from kvdsl.cli.completion import _params

    Path("two.py").write_text("open('ran', 'w')\n" + TWO)
    assert [*_params("two.py:one")] == [] and not Path("ran").exists()
