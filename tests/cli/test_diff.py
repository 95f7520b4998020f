"""`kvdsl diff`: what it says is different is, and the test that it finds tells the two policies apart."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvdsl.compiler import analyse
from kvdsl.scenarios.run import run_scenario
from tests.cli.harness import run

Capture = pytest.CaptureFixture[str]


def write(name: str, *statements: str) -> str:
    body = "".join(f"  {statement}\n" for statement in statements)
    Path(name).write_text(f'kv 1\n\npolicy {Path(name).stem.capitalize()} {{\n  "{name}"\n{body}}}\n')
    return name


def diff(capsys: Capture, a: str, b: str, *more: str) -> tuple[dict[str, Any], int]:
    result = run(capsys, "diff", a, b, *more, "--json")
    return result.json(), result.code


def test_the_same_meaning(capsys: Capture) -> None:
    """Lets, comments, names, docstrings and the order of params are no difference."""
    a = write("one.kv", "param budget = 64", "param x = 2", "score mean(attn) * x", "keep last 1")
    b = write("two.kv", "param x = 2", "let m = mas  # the same", "param budget = 64", "score m * x")
    assert run(capsys, "diff", a, b).out == "no difference in meaning\n"
    found, code = diff(capsys, a, b)
    assert (code, found["same"], found["changes"], found["scenario"]) == (0, True, [], None)


def test_what_is_inherited_counts(capsys: Capture) -> None:
    Path("mine.kv").write_text('kv 1\nimport h2o\n\npolicy Mine extends H2O {\n  "Mine."\n}\n')
    assert diff(capsys, "h2o", "mine.kv")[0]["same"]


def test_how_slots_lie_in_memory_keeps_the_same_tokens(capsys: Capture) -> None:
    a = write("one.kv", "param budget = 64", "score mean(attn)")
    b = write("two.kv", "param budget = 64", "score mean(attn)", "storage blocks 16")
    found, code = diff(capsys, a, b)
    assert (code, found["same"], found["in_memory_only"], found["texts_tried"]) == (1, False, True, 0)
    assert found["changes"][0] == {"title": "statements", "a": [], "b": ["storage blocks 16"]}


def test_what_is_said(capsys: Capture) -> None:
    a = write("one.kv", "param budget = 64", "score sum(attn)")
    b = write("two.kv", "param budget = 64", "score mean(attn) * norm1(v)")
    result = run(capsys, "diff", a, b, code=1)
    for line in ("  - score sum(attn)", "  + score mean(attn) * sum(abs(v) over dims)", "  + value vectors"):
        assert f"{line}\n" in result.out
    found, _ = diff(capsys, a, b)
    assert found["b"]["bytes_per_token"] > found["a"]["bytes_per_token"]
    state = next(one for one in found["changes"] if one["title"] == "state")
    assert state["a"] == []
    assert len(state["b"]) == 1


def test_errors(capsys: Capture) -> None:
    bad = write("bad.kv", "param budget = 64", "score attn")
    assert run(capsys, "diff", "h2o", "nothing").code == 2
    result = run(capsys, "diff", "h2o", bad)
    assert result.code == 2, "1 is for two policies that differ"
    assert "KV0301" in result.err
    told = run(capsys, "diff", "h2o", bad, "--json")
    assert told.code == 2 and "error" in told.json()


def test_sizes_that_settings_do_not_name_are_tried(capsys: Capture) -> None:
    """Twelve tokens that no param says: the smallest texts do not fill them."""
    one, other = (
        write(f"{name}.kv", "budget 12", f"score {sign}mean(attn)") for name, sign in (("one", ""), ("other", "-"))
    )
    found, code = diff(capsys, one, other)
    assert code == 1 and found["scenario"] is not None


def test_no_text_at_all_is_said(capsys: Capture) -> None:
    lines = "param budget = 64 in 50..100", "score mean(attn)", "score -mean(attn)"
    one, other = write("one.kv", lines[0], lines[1]), write("other.kv", lines[0], lines[2])
    assert "No text was tried: their protected tokens or budgets fit no small text." in run(capsys, "diff", one, other).out


def test_what_has_no_order_makes_no_difference(capsys: Capture) -> None:
    lines = "param budget = 64", "given weight = 1", "given bias", "score mean(attn) * weight + bias"
    one = write("one.kv", *lines, "keep first 4", "keep last 8")
    other = write("other.kv", lines[0], lines[2], lines[1], lines[3], "keep last 8", "keep first 4")
    assert run(capsys, "diff", one, other).code == 0


PAIRS = [
    ("h2o", "tova"),  # by attention
    ("vatp_h2o", "h2o"),  # and by values
    ("snapkv", "pyramidkv"),  # layer by layer
    ("adakv", "snapkv"),  # heads that share a budget
    ("sparcas", "quest"),  # what is attended to
    ("roco", "roco_sparcas"),  # the same, of which the second can be asked only
    ("full", "window"),  # one has no budget
    ("streaming_llm", "lazy_streaming"),
    ("roco", "roco_easykv"),
    ("random", "h2o"),
]


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_what_is_found_tells_them_apart(capsys: Capture, a: str, b: str) -> None:
    """One passes the test as it stands, the other fails it."""
    found, code = diff(capsys, a, b)
    assert code == 1
    scenario = found["scenario"]
    assert scenario["a"] != scenario["b"]
    passes, fails = (a, b) if scenario["passes"] == "a" else (b, a)
    names = {"a": found["a"]["name"], "b": found["b"]["name"]}
    mine = names[scenario["passes"]]
    theirs = names["b" if scenario["passes"] == "a" else "a"]
    assert outcome(passes, scenario["test"]) is True
    settings = {param.name for param in analyse_shipped(fails).policy.params} | {"layer", "layers"}
    lines = [line for line in scenario["test"].splitlines() if not line.startswith("  set ") or line.split()[1] in settings]
    other = "\n".join(lines).replace(f"use {mine}", f"use {theirs}", 1)
    given = [f"  set {name} = {value}" for name, value in scenario["settings"].items() if name in settings]
    missing = [line for line in given if line not in lines]
    assert (
        outcome(fails, other.replace("\n  prompt {", "".join(f"\n{line}" for line in missing) + "\n  prompt {", 1))
        is not True
    )


def analyse_shipped(stem: str) -> Any:
    from kvdsl.compiler import find_policy

    return analyse(find_policy(stem))


def outcome(stem: str, test: str) -> bool | None:
    """Whether the policy passes the test; None if it cannot even be asked."""
    Path("found_test.kv").write_text(f"kv 1\nimport {stem}\n\n{test}\n")
    analysis = analyse(Path("found_test.kv"))
    if not analysis.ok:
        return None
    (scenario,) = analysis.scenarios
    return run_scenario(scenario).passed


def test_a_default_that_alone_is_different_is_found(capsys: Capture) -> None:
    a = write("one.kv", "param budget = 64", "param sinks = 8", "score mean(attn)", "keep first sinks")
    b = write("two.kv", "param budget = 64", "param sinks = 9", "score mean(attn)", "keep first sinks")
    assert diff(capsys, a, b)[0]["scenario"] is not None


def test_where_none_is_found_that_is_said(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdsl.scenarios.witness.SIZES", (2, 6))  # larger ones take their time
    a = write("one.kv", "param budget = 6", "score mean(attn)")
    b = write("two.kv", "param budget = 6", "score 2 * mean(attn)")
    found, code = diff(capsys, a, b)
    assert (code, found["scenario"]) == (1, None)
    assert found["texts_tried"] > 0
    assert f"Of {found['texts_tried']} small texts" in run(capsys, "diff", a, b).out


def test_of_tensors_of_files_no_text_is_tried(capsys: Capture) -> None:
    tensor = 'tensor w [layers, heads] from "w.safetensors"'
    a = write("one.kv", "param budget = 64", tensor, "score mean(attn) * w")
    b = write("two.kv", tensor, "budget where(w > 0, 64, 32)", "score mean(attn)")
    assert "No text was tried: tensors of files have a model's sizes" in run(capsys, "diff", a, b).out
    assert diff(capsys, a, b)[0]["texts_tried"] == 0


def test_no_text_of_layers_that_share(capsys: Capture) -> None:
    out = run(capsys, "diff", "cake", "lava").out
    assert "No text was tried: layers that share a budget need several layers, and a test has one." in out


def test_what_is_set_stands_in_the_test(capsys: Capture) -> None:
    a = write("w.kv", "param budget = 64", "param n = 2", "score position", "keep first n")
    b = write("w2.kv", "param budget = 64", "param n = 2", "score position", "keep first n + 1")
    scenario = diff(capsys, a, b, "--set", "budget=7", "--set", "n=3")[0]["scenario"]
    assert {"budget": "7", "n": "3"}.items() <= scenario["settings"].items()
    Path("found_test.kv").write_text(f'kv 1\nimport "w.kv"\n\n{scenario["test"]}\n')
    (one,) = analyse(Path("found_test.kv")).scenarios
    assert scenario["passes"] == "a" and run_scenario(one).passed


@pytest.mark.parametrize("line", ["cap hard", "prefill blocks of 2"])
def test_where_tokens_leave_early_attention_follows_from_vectors(capsys: Capture, line: str) -> None:
    """A row of numbers would give some to tokens that are no longer there."""
    a = write("w.kv", "param budget = 64", "score sum(attn)", line)
    b = write("w2.kv", "param budget = 64", "score max(attn over queries)", line)
    assert " attend " not in diff(capsys, a, b)[0]["scenario"]["test"]


def test_texts_are_as_long_as_a_budget_that_is_set_and_attention_is_1_in_all(capsys: Capture) -> None:
    """A plus before a number, which the language does not know, is none in the test either."""
    a = write("w.kv", "param budget = 64", "param n = 2", "score sum(attn)", "keep first n")
    b = write("w2.kv", "param budget = 64", "param n = 2", "score max(attn over queries)", "keep first n")
    scenario = diff(capsys, a, b, "--set", "budget=64", "--set", "n=+3")[0]["scenario"]
    assert scenario["tokens"] > 64 and "  set n = 3\n" in scenario["test"]
    stem = "w" if scenario["passes"] == "a" else "w2"
    Path("found_test.kv").write_text(f'kv 1\nimport "{stem}.kv"\n\n{scenario["test"]}\n')
    (found,) = analyse(Path("found_test.kv")).scenarios
    assert run_scenario(found).passed
    rows = re.findall(r"attend (.*)", scenario["test"])
    assert len(rows) == scenario["tokens"]
    assert all(abs(sum(map(float, row.split(", "))) - 1) < 1e-9 for row in rows)


def test_what_differs_in_higher_layers_alone_is_found(capsys: Capture) -> None:
    lines = ("param budget = 64", "score position", "when prefill")
    a = write("one.kv", *lines, "prefill blocks of 2 + 4 * layer")
    b = write("two.kv", *lines, "prefill blocks of 2 + 8 * layer")
    assert diff(capsys, a, b)[0]["scenario"]["layer"] > 0
