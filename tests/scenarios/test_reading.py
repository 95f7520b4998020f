"""How tests are read, and what is said where they cannot be."""

from __future__ import annotations

import pytest

from kvdsl.diagnostics import Sink
from kvdsl.source import SourceFile
from kvdsl.syntax import nodes as syn
from kvdsl.syntax.shape import parse_module
from tests.scenarios.harness import check, found, text

nan = float("nan")


def read(*steps: str) -> tuple[syn.Step, ...]:
    sink = Sink()
    (test,) = parse_module(SourceFile("a_test.kv", text(*steps)), sink).tests
    assert not list(sink)
    assert not test.broken
    return test.steps


def rows(brought: syn.Brought) -> list[list[tuple[float, ...]]]:
    return [[row.values for row in heads] for heads in brought.heads]


def test_use_and_set() -> None:
    use, setting, plain = read("use RoCo at layer 2 of 8", "set budget = -0.5", "use H2O")
    assert isinstance(use, syn.Use)
    assert isinstance(setting, syn.Set)
    assert isinstance(plain, syn.Use)
    assert (use.policy.text, use.layer and use.layer.value, use.layers and use.layers.value) == ("RoCo", 2, 8)
    assert (setting.name.text, setting.value.value) == ("budget", -0.5)
    assert plain.layer is None


def test_a_token_by_its_attention() -> None:
    (token,) = read("attend 0.4, -1 / nan, inf key 1, 2 value 3 / 4")
    assert isinstance(token, syn.Incoming)
    attend, key, value = token.brought
    assert (attend.kind, key.kind, value.kind) == ("attend", "key", "value")
    assert str(rows(attend)) == str([[(0.4, -1.0)], [(nan, float("inf"))]])
    assert rows(key) == [[(1, 2)]]
    assert rows(value) == [[(3,)], [(4,)]]


def test_a_token_by_its_vectors() -> None:
    (token,) = read("token query 1, 0 and 0, 1 / 2, 0 and 0, 2 value 5")
    assert isinstance(token, syn.Incoming)
    query, value = token.brought
    assert rows(query) == [[(1, 0), (0, 1)], [(2, 0), (0, 2)]]
    assert rows(value) == [[(5,)]]


def test_expectations() -> None:
    kept, evicted, state, error = read(
        "expect kept 0, 4..9 / nothing", "expect evicted 1", "expect state sum_attn nan, 2", 'expect error "no \\"x\\""'
    )
    assert isinstance(kept, syn.Expect)
    assert isinstance(evicted, syn.Expect)
    assert isinstance(state, syn.Expect)
    assert isinstance(error, syn.Expect)
    assert [place.ranges for place in kept.heads if isinstance(place, syn.Places)] == [((0, 0), (4, 9)), ()]
    assert (evicted.what, len(evicted.heads)) == ("evicted", 1)
    assert state.word is not None
    assert error.word is not None
    assert (state.what, state.word.text) == ("state", "sum_attn")
    assert (error.what, error.word.text, error.heads) == ("error", 'no "x"', ())


def test_the_words_of_tests_are_not_reserved() -> None:
    names = ("test", "use", "set", "attend", "expect", "rest", "times", "nothing", "nan", "kept", "prompted", "key")
    params = "\n".join(f"param {name} = 1" for name in names)
    text = f'kv 1\npolicy P {{\n"A."\nparam budget = 9\n{params}\nscore position + {" + ".join(names)}\n}}\n'
    assert check(text).policy.params[-1].name == "key"


@pytest.mark.parametrize(
    ("step", "message", "at", "help"),
    [
        ("set budget 3", "expected `=`, not `3`", "3", None),
        ("attend 1,", "expected a number, `inf`, `nan` or `rest` after `,`", "\n", None),
        ("attend 1 2", "expected `,`, `..`, `key`, `query` or `value`, not `2`", "2", None),
        ("attend", "expected a number, `inf`, `nan` or `rest` after `attend`", "\n", None),
        ("token", "expected `key`, `query` or `value` after `token`", "\n", None),
        ("expect eror 'x'", "expected `error` before a string, not `eror`", "eror", "did you mean `error`?"),
        ("expect kept", "expected a number, a string, `inf`, `nan` or `rest` after `kept`", "\n", None),
        ("expect kept none", "expected a number or `nothing`, not `none`", "none", None),
        ("expect state 3", "expected a name, not `3`", "3", None),
        ("expect error 3", "expected a string after `error`", "3", None),
        ("3 attend 1", "expected `times`, not `attend`", "attend", None),
        ("score position", "expected a step of the test or `}`, not `score`", "score", None),
    ],
)  # fmt: skip
def test_syntax_errors(step: str, message: str, at: str, help: str | None) -> None:
    assert [one for one in found("use H2O", "attend 1", step, "expect live 1") if one[0] != "KV0604"] == [
        ("KV0101", message, at, help)
    ]


def test_unknown_steps() -> None:
    assert found("exspect live 1") == [("KV0104", "unknown statement `exspect`", "exspect", "did you mean `expect`?")]
    assert found("prompt { atend 1 }") == [("KV0104", "unknown statement `atend`", "atend", "did you mean `attend`?")]


def test_a_step_among_the_statements_of_a_policy() -> None:
    (one,) = check('kv 1\npolicy P {\n"A."\nexpect live 1\n}\n').diagnostics
    assert one.message == "expected a statement or `}`, not `expect`"
    assert one.help == '`expect` belongs inside a test: `test "..." { ... }`'


def test_after_an_error_the_rest_is_read() -> None:
    """Errors in a step cost this step, one in a prompt this token; the tests after it are checked."""
    source = text("use H2O", "prompt {", "attend 1", "attend 0.5,", "attend 1, 2 3", "}", "expect evict 1", "expect kept 0")
    source += 'test "the next" {\nuse H3O\nattend 1\nexpect live 1\n}\n'
    assert [one.message for one in check(source).diagnostics] == [
        "expected a number, `inf`, `nan` or `rest` after `,`",
        "expected `,`, `..`, `key`, `query` or `value`, not `3`",
        "unknown policy `H3O`",
    ]


@pytest.mark.parametrize("unclosed", ["use H2O\n", "use H2O\nprompt { attend 1\n"])
def test_a_brace_that_is_not_closed(unclosed: str) -> None:
    source = f'kv 1\nimport h2o\ntest "a" {{\n{unclosed}test "b" {{\nuse H2O\nattend 1\nexpect live 2\n}}\n'
    (one,) = check(source).diagnostics
    assert (one.code, one.message) == ("KV0112", "expected `}` before the next test")


@pytest.mark.parametrize(
    ("step", "message", "at"),
    [
        ("0 times attend rest 0", "a token can be repeated 1 to 4096 times, not 0", "0"),
        ("1.5 times attend rest 0", "a token can be repeated 1 to 4096 times, not 1.5", "1.5"),
        ("5000 times attend rest 0", "a token can be repeated 1 to 4096 times, not 5000", "5000"),
        ("attend rest 1, rest 2", "a row has one `rest`", "rest 2"),
    ],
)
def test_tokens_that_cannot_be(step: str, message: str, at: str) -> None:
    assert [one[1:3] for one in found("use H2O", step, "expect live 1")] == [(message, at)]


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ("1.5", "`1.5` is not a position"),
        ("3..1", "`3..1` has no positions, or too many"),
        ("0..9999", "`0..9999` has no positions, or too many"),
    ],
)
def test_positions_that_cannot_be(places: str, message: str) -> None:
    assert [one[:3] for one in found("use H2O", "attend 1", f"expect kept {places}")] == [("KV0605", message, places)]


def test_a_number_too_large() -> None:
    codes = [one[0] for one in found("use H2O", "attend 1e999", "expect live 1")]
    assert codes == ["KV0108"]
    assert "KV0108" in [one[0] for one in found("use H2O", "attend 1", "expect kept 1e999")]
