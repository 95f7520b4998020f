"""`h2o with when prefill`, wherever a policy is named: in Python, on command lines, in lists."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kvdsl
from kvdsl.compiler import analyse, compile_file, find_policy
from kvdsl.ir.printer import print_policy
from kvdsl.shipped import all_policies, separate, text_of
from kvdsl.source import Combined
from tests.cli.harness import run

MINE = 'kv 1\n\npolicy Mine {\n  "Mine."\n  param budget = 64\n  score position\n  keep first 2\n}\n'


def found(text: str) -> Combined:
    made = find_policy(text)
    assert isinstance(made, Combined)
    return made


# -- what it means -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("h2o with when prefill", "H2O_when_prefill"),
        ("  h2o   with  when prefill,keep last 64 ", "H2O_when_prefill_keep_last_64"),
        ("h2o with { when prefill; keep last 64 }", "H2O_when_prefill_keep_last_64"),
        ("h2o with when prefill with keep last 64", "H2O_when_prefill_keep_last_64"),
    ],
)
def test_words_make_up_its_name(text: str, name: str) -> None:
    policy = analyse(found(text)).policy
    assert (policy.name, policy.stem) == (name, name.lower())


def test_a_name_that_would_be_long_or_no_name_has_a_digest() -> None:
    names = {
        analyse(found(f"snapkv with {clauses}")).policy.name
        for clauses in ("budget budget * 0.5", "budget budget + 0.5", "layers 2..", "keep first 2, keep last 32, layers ..4")
    }
    assert len(names) == 4
    assert all(len(name.removeprefix("SnapKV_with_")) == 8 for name in names)
    same = {analyse(found(f"snapkv with {clauses}")).policy.name for clauses in ("layers 2..", " layers  2 ..  # why")}
    assert len(same) == 2  # a comment is a part of it


def test_it_is_what_the_file_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Byte for byte, as `kvdsl show` has it."""
    monkeypatch.chdir(tmp_path)
    Path("mine.kv").write_text(MINE)
    for text in ("h2o with when prefill", "snapkv with budget budget across heads floor 0.2", "mine.kv with keep last 3"):
        made = compile_file(text)
        file = Path(f"{made.policy.stem}.kv")
        file.write_text(text_of(found(text)))
        assert compile_file(file).files == made.files
        assert made.policy == compile_file(file).policy


def test_clauses_behind_clauses_change_what_is_before() -> None:
    twice = analyse(found("h2o with keep last 8, when prefill with keep last 64")).policy
    once = analyse(found("h2o with when prefill, keep last 64")).policy
    assert print_policy(twice).partition("param")[2] == print_policy(once).partition("param")[2]
    assert [kept.code for kept in analyse(found("h2o with when prefill, when decode")).diagnostics] == ["KV0207"]


@pytest.mark.nightly
def test_every_shipped_policy_can_get_a_clause() -> None:
    for path in all_policies():
        policy, base = analyse(found(f"{path.stem} with keep first 1, when prefill")), analyse(path).policy
        if not policy.ok:  # what it has does not go with that
            assert policy.diagnostics
            continue
        assert policy.policy.when == "prefill"
        assert policy.policy.score == base.score


def test_a_path_with_the_word_in_it_is_a_path(tmp_path: Path) -> None:
    folder = tmp_path / "policies with care"
    folder.mkdir()
    (folder / "mine.kv").write_text(MINE)
    assert find_policy(str(folder / "mine.kv")) == folder / "mine.kv"
    assert analyse(found(f"{folder / 'mine.kv'} with when prefill")).policy.name == "Mine_when_prefill"


def test_it_reads_no_files_but_those_of_the_policy_it_is_made_of(tmp_path: Path) -> None:
    assert analyse(found("q_filters with when prefill")).ok
    made = analyse(found('q_filters with tensor filter [layers, heads, dims] from "mine.safetensors"'))
    assert not made.ok
    assert [one.code for one in made.diagnostics] == ["KV0219"]


# -- what is wrong with it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message", "at", "help"),
    [
        ("h20 with when prefill", "there is no policy `h20`", "h20", "did you mean `h2o`?"),
        ("mine.kv with when prefill", "there is no file `mine.kv`", "mine.kv", None),
        ("h2o with whne prefill", "unknown statement `whne`", "whne", "did you mean `when`?"),
        ("h2o with when prefil", "`when` cannot be `prefil`", "prefil", "did you mean `prefill`?"),
        ("h2o with", "expected a statement after `with`", "", None),
        ("h2o with when prefill,", "expected a statement after `,`", "", None),
        ("h2o with keep last recnt", "unknown name `recnt`", "recnt", "did you mean `recent`?"),
        ("h2o with when prefill with wen decode", "unknown statement `wen`", "wen", "did you mean `when`?"),
        ("h2o_test with when prefill", "there is no policy `h2o_test`", "h2o_test", None),
    ],
)
def test_errors_point_into_what_was_written(text: str, message: str, at: str, help: str | None) -> None:
    with pytest.raises(kvdsl.DiagnosticError) as raised:
        compile_file(text)
    (one,) = raised.value.diagnostics
    assert (one.message, one.span.text) == (message, at)
    assert text.startswith(one.span.file.text.strip())
    if help is not None:
        assert one.help == help


def test_what_is_wrong_with_the_policy_itself_is_told_in_its_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.kv"
    file.write_text(MINE.replace("position", "postion"))
    (one,) = analyse(found(f"{file} with when prefill")).diagnostics
    assert (one.span.file.path, one.span.text) == (file, "postion")
    file.write_text("kv 1\nlet x = 3\n")
    (one,) = analyse(found(f"{file} with when prefill")).diagnostics
    assert (one.message, one.span.text) == (f"there is no policy in `{file}`", str(file))


# -- in Python -------------------------------------------------------------------------------------------------------------


def test_a_class_with_clauses() -> None:
    H2O = kvdsl.load("h2o")
    once = H2O.with_("when prefill")
    assert once is kvdsl.load("h2o with when prefill")
    assert (once.__name__, once.spec.stem) == ("H2O_when_prefillCache", "h2o_when_prefill")
    assert once.with_("keep last 64") is kvdsl.load("h2o with when prefill with keep last 64")
    assert once is not H2O and kvdsl.load("h2o") is H2O
    manifest = json.loads(once.spec.cpu_source.with_name("manifest.json").read_text())
    assert manifest["policy"] == "H2O_when_prefill"
    assert H2O.with_("score mean(attn)").spec.stem != H2O.with_("score max(attn)").spec.stem


def test_settings_go_along() -> None:
    def budget(cache: type) -> str:
        text = Path(sys.modules[cache.__module__].__file__ or "").read_text()
        return text.partition('"budget": ')[2].partition(" if budget is None")[0]

    small = kvdsl.load("h2o", budget=64)
    assert small.with_("when prefill") is kvdsl.load("h2o with when prefill", budget=64)
    assert budget(small.with_("when prefill")) == "64"
    assert budget(small.with_("param budget = 128")) == "128"  # what is said last holds
    assert budget(small.with_("when prefill", budget=32)) == "32"
    rate = small.with_("when prefill", ratio=1)
    assert rate is kvdsl.load("h2o with when prefill", ratio=1.0) is kvdsl.load("h2o with when prefill", budget=1.0)
    assert rate.with_("keep first 1", budget=32) is kvdsl.load("h2o with when prefill with keep first 1", budget=32)
    assert budget(rate.with_("param budget = 128")) == "128"


def test_a_policy_in_a_string_can_get_clauses() -> None:
    assert kvdsl.compile(MINE).with_("keep first 3").spec.name == "Mine_keep_first_3"


def test_errors_of_a_class_with_clauses() -> None:
    with pytest.raises(kvdsl.DiagnosticError, match="unknown statement `whne`") as raised:
        kvdsl.load("h2o").with_("whne prefill")
    assert "h2o with whne prefill" in str(raised.value)
    again = pickle.loads(pickle.dumps(raised.value))
    assert str(again) == str(raised.value)

    class Mine(kvdsl.load("h2o")):  # type: ignore[misc]
        pass

    with pytest.raises(kvdsl.KvdslError, match="`Mine` was not loaded from a policy's text"):
        Mine.with_("when prefill")


@pytest.mark.nightly
def test_a_cache_of_it_reaches_another_process(tmp_path: Path) -> None:
    from kvdsl.assets import load_reference_model

    model, _ = load_reference_model()
    cache = kvdsl.load("h2o").with_("keep last 3").with_("when prefill")(model, budget=8, backend="torch")
    model(torch.arange(12)[None], cache=cache)
    assert cache.positions(layer=0).shape[-1] == 8
    (tmp_path / "cache.pickle").write_bytes(pickle.dumps(cache))
    code = (
        "import pickle, sys\n"
        "cache = pickle.load(open(sys.argv[1], 'rb'))\n"
        "print(type(cache).__name__, cache.positions(layer=0).tolist())"
    )
    told = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "cache.pickle")], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == f"H2O_keep_last_3_when_prefillCache {cache.positions(layer=0).tolist()}"


# -- on command lines --------------------------------------------------------------------------------------------------------


def test_commands_take_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    once = "h2o with when prefill"
    assert run(capsys, "check", once).out == "1 file checked: no problems\n"
    assert run(capsys, "explain", once).out.startswith(
        "H2O_when_prefill (h2o_when_prefill.kv)\n\n  H2O with `when prefill`.\n"
    )
    edition = text_of(find_policy("h2o")).partition("\n")[0]  # the policy's own
    shown = f"{edition}\nimport h2o\n\npolicy H2O_when_prefill = H2O with when prefill\n"
    assert run(capsys, "show", once).out == shown
    assert run(capsys, "show", once, "--json").json()["path"] is None
    assert "is not in a file" in run(capsys, "show", once, "--path").err
    said = run(capsys, "diff", "h2o", once, "--json").json()["changes"]
    assert said[0] == {"title": "statements", "a": [], "b": ["when prefill"]}
    assert (
        run(capsys, "diff", "snapkv with budget budget across heads floor 0.2", "adakv").out == "no difference in meaning\n"
    )
    made = run(capsys, "compile", once, "--out", str(tmp_path), "--json").json()["policies"]
    assert [one["name"] for one in made] == ["H2O_when_prefill"]
    assert (tmp_path / "h2o_when_prefill" / "cache.py").is_file()
    assert run(capsys, "compile", once, "--out", str(tmp_path), "--check").code == 0
    assert "`h2o_when_prefill` has no tests" in run(capsys, "test", once).err
    assert "unknown statement `whne`" in run(capsys, "check", "h2o with whne prefill").err
    assert "budget=32" not in run(capsys, "explain", once, "--set", "budget=32").err


def test_a_list_is_separated_by_commas_outside_of_brackets() -> None:
    assert separate("h2o, roco,,mine.kv") == ["h2o", "roco", "mine.kv"]
    several = "roco,h2o with { when prefill; budget where(layer < 2, 4, 8) }, snapkv with budget max(4, budget / 2) ,tova"
    assert separate(several) == [
        "roco",
        "h2o with { when prefill; budget where(layer < 2, 4, 8) }",
        "snapkv with budget max(4, budget / 2)",
        "tova",
    ]
    assert separate('a with tensor x [layers, heads] from "a,b.safetensors"') == [
        'a with tensor x [layers, heads] from "a,b.safetensors"'
    ]
    assert separate("a)b,c") == ["a)b", "c"]
