"""What `kvdsl check` says of tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdsl.compiler import analyse
from kvdsl.diagnostics import DiagnosticError
from tests.scenarios.harness import check, found, scenario, text

LIVE = "expect live 1"


def test_a_test_without_mistakes() -> None:
    one = scenario("use RoCo at layer 2 of 8", "set budget = 3", "attend 1 / 1 value 1, 2", "attend rest 0", LIVE)
    assert (one.title, one.layer, one.layers, one.heads, one.group, one.value_dim) == ("it works", 2, 8, 2, 1, 2)
    assert one.policy is not None
    assert one.policy.name == "RoCo"
    assert [column.name for column in one.policy.columns] == ["sum_attn", "sum_attn_squared"]


@pytest.mark.parametrize("word", ["everything", "true"])
def test_a_layer_is_a_number(word: str) -> None:
    source = text("use H2O", f"set layers = {word}", "attend 1", LIVE).replace("kv 1", "kv 2")
    codes = [(one.code, one.message) for one in check(source).diagnostics]
    assert ("KV0101", f"expected a number, `inf` or `nan`, not `{word}`") in codes


def test_query_heads() -> None:
    assert scenario("use H2O", "token query 1 and 2 and 3", "token key 1", LIVE).group == 3


@pytest.mark.parametrize(
    ("steps", "code", "message", "at", "help"),
    [
        (("attend 1", LIVE), "KV0602", "the test does not name its policy", '"it works"', "begin it with `use NAME`"),
        (("use H2O", "use RoCo", "attend 1", LIVE), "KV0602", "a test is about one policy", "use RoCo", "write two tests"),
        (("use RoCO", "attend 1", LIVE), "KV0203", "unknown policy `RoCO`", "RoCO", "did you mean `RoCo`?"),
        (("use RoCo at layer 8 of 8", "attend 1", LIVE), "KV0606", "there is no layer 8 of 8", "8",
         "layers count from 0: `set layer = 2` and `set layers = 8`"),
        (("use H2O", "set buget = 3", "attend 1", LIVE), "KV0603", "`H2O` has no param `buget`", "buget", "did you mean `budget`?"),
        (("use H2O", "set budget = 3; set budget = 4", "attend 1", LIVE), "KV0603", "`budget` is set twice", "set budget = 4", None),
        (("use H2O", "set budget = nan", "attend 1", LIVE), "KV0603", "`budget` needs a number", "nan", None),
        (("use H2O", LIVE, "attend 1"), "KV0604", "no token has arrived yet", LIVE, None),
        (("use H2O", "attend 1", "set budget = 3", LIVE), "KV0604", "`set` comes after a token", "set budget = 3", None),
        (("use H2O", "attend 1", "prompt { attend 1 }", LIVE), "KV0604", "after other tokens, a single token is not a prompt",
         "prompt { attend 1 }", "write the token alone, without `prompt { }`"),
        (("use H2O", "prompt { }", "attend 1", LIVE), "KV0604", "the prompt has no tokens", "prompt { }", "leave it out"),
        (("use H2O", "prompt { attend 1; token key 1 }", LIVE), "KV0604", "a prompt's tokens are all `attend`, or all `token`",
         "prompt { attend 1; token key 1 }", None),
        (("use H2O", "prompt { attend 1; attend 0.5 }", LIVE), "KV0605", "expected 2 numbers, not 1", "0.5",
         "the prompt has 2 tokens up to this one"),
        (("use H2O", "prompt { 3 times attend 1 }", LIVE), "KV0605", "expected 3 numbers, not 1", "1",
         "the prompt has 3 tokens up to this one"),
        (("use H2O", "prompt { attend 1, rest 0, 1 }", LIVE), "KV0605", "expected one number, not 2", "1, rest 0, 1", None),
        (("use H2O", "attend 1 key 1, 2", "attend 1, 1 key 3", LIVE), "KV0605", "expected 2 numbers, as before, not 1", "3", None),
        (("use H2O", "attend 1 value rest 1", LIVE), "KV0605", "a vector has no `rest`", "rest 1", "write all of its numbers"),
        (("use H2O", "attend 1 key 1 key 2", LIVE), "KV0605", "`key` is given twice", "key 2", None),
        (("use H2O", "attend 1 / 1", "expect live 1 / 1 / 1"), "KV0605", "expected 2 KV heads, as before, not 3", "expect live 1 / 1 / 1",
         None),
        (("use H2O", "token query 1 and 2", "token query 1", LIVE), "KV0605", "expected 2 query heads, as before, not 1", "query 1", None),
        (("use H2O", "attend 1", "expect selected 0"), "KV0606", "`H2O` selects nothing", "expect selected 0", None),
        (("use H2O", "attend 1", "expect sketch 0"), "KV0606", "`H2O` has no sketch", "expect sketch 0", None),
        (("use Full", "attend 1", "expect score 0"), "KV0606", "`Full` has no score", "expect score 0", None),
        (("use H2O", "attend 1", "expect state sum_atn 0"), "KV0606", "`H2O` has no state `sum_atn`", "sum_atn",
         "did you mean `sum_attn`?"),
        (("use SparCas", "prompt { token key 1 }", "expect selected 0"), "KV0606", "a prompt's queries attend to everything",
         "expect selected 0", None),
        (("use SparCas", "attend 1", LIVE), "KV0606", "`SparCas` selects what a query attends to, which `attend` does not provide",
         "attend 1", "write `token query 1, 0 key 0, 1`, say"),
        (("use H2O", "attend 1 query 1, 0", LIVE), "KV0606", "`attend` replaces the query, so the query would have no effect",
         "query 1, 0", "write one of them"),
        (("use H2O", "attend 1"), "KV0607", "the test expects nothing", '"it works"',
         "a test checks something after its last token, such as `expect kept 0, 2`"),
        (("use H2O", "set recent = 5; set budget = 4", 'expect error "5 tokens"', "attend 1", LIVE), "KV0604",
         "a refused policy does nothing", LIVE, None),
    ],
)  # fmt: skip
def test_mistakes(steps: tuple[str, ...], code: str, message: str, at: str, help: str | None) -> None:
    assert found(*steps) == [(code, message, at, help)]


def test_a_state_of_many_numbers_cannot_be_expected() -> None:
    """A history has several numbers for a token."""
    (one,) = found("use ScissorHandsWindow", "attend 1", "expect state ring_attn 0")
    assert (one[0], str(one[3])[:18]) == ("KV0606", "a test can expect ")


def test_a_policy_that_reads_queries_needs_them(tmp_path: Path) -> None:
    policy = 'kv 1\npolicy P {\n"A."\nparam budget = 9\nscore sum(dot(q, k))\n}\n'
    (tmp_path / "p.kv").write_text(policy)
    tests = tmp_path / "p_test.kv"
    tests.write_text('kv 1\nimport "p.kv"\ntest "a" {\nuse P\nattend 1\nexpect live 1\n}\n')
    (one,) = analyse(tests).diagnostics
    assert one.message == "`P` reads `q`, which `attend` does not provide"


def test_layers_that_share_a_budget_are_several() -> None:
    source = (
        'kv 1\nimport cake\ntest "a" {\nuse CAKE at layer 0 of 2\nprompt { 2 times attend rest 0.5 }\nexpect live 2\n}\n'
    )
    (one,) = check(source).diagnostics
    assert (one.code, one.span.text) == ("KV0606", "use CAKE at layer 0 of 2")
    assert one.message == "the layers of `CAKE` share a budget, but a test has one layer"
    assert not check(source.replace(" at layer 0 of 2", "")).diagnostics


# -- settings that the policy refuses ----------------------------------------------------------------------------------

TOO_MANY = ("use H2O", "set budget = 4", "set recent = 5")


def test_a_refused_setting_is_told_in_the_test() -> None:
    (one,) = check(text(*TOO_MANY, "attend 1", LIVE)).diagnostics
    assert (one.code, one.span.text) == ("KV0603", "use H2O")
    assert "protects 5 tokens" in one.message
    assert [label.span.file.name.endswith("h2o.kv") for label in one.labels[:1]] == [True]


def test_a_setting_out_of_its_range_is_told_at_the_setting() -> None:
    (one,) = check(text("use H2O", "set budget = 0", "attend 1", LIVE)).diagnostics
    assert (one.code, one.span.text) == ("KV0603", "0")


def test_a_refusal_can_be_expected() -> None:
    assert scenario(*TOO_MANY, 'expect error "protects 5 tokens"').policy is None


def test_another_refusal_than_the_expected_one_is_told() -> None:
    (one,) = check(text(*TOO_MANY, 'expect error "6 tokens"')).diagnostics
    assert one.code == "KV0603"


# -- files -------------------------------------------------------------------------------------------------------------


def test_tests_stand_apart() -> None:
    source = text("use H2O", "attend 1", LIVE) + 'let a = 1\npolicy P { "A." }\n'
    assert [(one.code, one.span.text) for one in check(source).diagnostics] == [("KV0601", "a"), ("KV0601", "P")]


def test_titles_differ() -> None:
    test = 'test "it works" {\nuse H2O\nattend 1\nexpect live 1\n}\n'
    (one,) = check(text("use H2O", "attend 1", LIVE) + test).diagnostics
    assert (one.code, one.message) == ("KV0206", 'two tests are called "it works"')


def test_a_missing_import_is_told_alone() -> None:
    source = 'kv 1\nimport "nowhere.kv"\ntest "a" {\nuse P\nattend 1\nexpect live 1\n}\n'
    assert [one.code for one in check(source).diagnostics] == ["KV0114"]


def test_too_many_tests_and_steps() -> None:
    tests = "".join(f'test "{n}" {{ use H2O; attend 1; expect live 1 }}\n' for n in range(101))
    assert [one.message for one in check(f"kv 1\nimport h2o\n{tests}").diagnostics] == ["a file holds at most 100 tests"]
    assert [one[1] for one in found("use H2O", *["attend 1"] * 500)] == ["the test has more than 500 steps"]


def test_a_file_of_tests_has_no_policy() -> None:
    analysis = check(text("use H2O", "attend 1", LIVE))
    assert analysis.ok
    with pytest.raises(DiagnosticError, match="there are tests in this file, but no policy"):
        _ = analysis.policy


def test_a_policy_that_reads_the_prompts_queries_needs_them(tmp_path: Path) -> None:
    (tmp_path / "p.kv").write_text(
        'kv 1\npolicy P {\n"A."\nparam budget = 9\nscore mean(query_position - position over text)\nwhen prefill\n}\n'
    )
    tests = tmp_path / "p_test.kv"
    tests.write_text('kv 1\nimport "p.kv"\ntest "a" {\nuse P\nprompt { attend 1 }\nexpect live 1\n}\n')
    (one,) = analyse(tests).diagnostics
    assert one.message == "`P` reads the prompt's queries, which `attend` does not provide"
