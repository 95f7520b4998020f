"""Syntax errors: what is said, where, and that the rest of the file is still read."""

import pytest

from tests.diagnostics.expect import body, check, expect, expect_in, only

ONE_LINE = "write `;` between statements, or begin a new line"


@pytest.mark.parametrize(
    ("statement", "message", "at", "help"),
    [
        ("score", "expected an expression after `score`", "\n", "its form is `score expr`"),
        ("keep tap 3 by age", "expected `first`, `last`, `top` or `where`, not `tap`", "tap", "did you mean `top`?"),
        ("keep last 1 first 2", "expected a new line or `;` before `first`", "first",
         "its form is `keep first expr`, `keep last expr`, `keep top expr by expr` or `keep where expr`"),
        ("param x = 3 score age", "expected a new line or `;` before `score`", "score", ONE_LINE),
        ("score age keep last 2", "expected a new line or `;` before `keep`", "keep", ONE_LINE),
        ("when prefill cap hard", "expected a new line or `;` before `cap`", "cap", ONE_LINE),
        ("param x 3", "`param` takes `=`", "param x 3", "write `param x = 3`"),
        ("param 3 = 4", "expected a name, not `3`", "3", "its form is `param NAME = expr [in range]`"),
        ("score age = 3", "`=` does not compare", "=", "write `==`"),
        ("score 1 < age < 3", "comparisons do not chain", "1 < age < 3", "write `1 < age and age < 3`"),
        ("score age // 3", "`//` is not an operator", "age // 3", "write `floor(age / 3)`"),
        ("// a comment", "a comment begins with `#`", "//", "write `#`"),
        ("score age if age > 3 else 4", "a choice between two values is written as a function", "age if age > 3 else 4",
         "write `where(age > 3, age, 4)`"),
        ("keep recent 4", "`keep` does not know `recent`", "keep recent 4", "write `keep last 4`"),
        ("keep sinks 4", "`keep` does not know `sinks`", "keep sinks 4", "write `keep first 4`"),
        ("score age +\n mean(attn)", "expected an expression after `+`", "\n",
         "to continue on a new line, put the expression in parentheses"),
        ("keep where age > 3 and\n age < 9", "expected an expression after `and`", "\n",
         "to continue on a new line, put the expression in parentheses"),
        ("trigger over >= 3", "`trigger` compares `overflow`, the number of tokens above the budget", "trigger over >= 3",
         "write `trigger overflow >= 3`"),
        ("score mean(attn over)", "expected a name, `last` or `next`, not `)`", ")", "its form is `score expr`"),
        ("score = age", "`score` takes its expression without `=`", "=", "leave out the `=`"),
        ("trigger overflow > 3", "`trigger` compares `overflow`, the number of tokens above the budget", "trigger overflow > 3",
         "write `trigger overflow >= 4`"),
        ("override", "expected a statement after `override`", "\n", None),
        ("score mean(attn) over slots", "`over` belongs inside the parentheses", "mean(attn) over slots", "write `mean(attn over slots)`"),
        ("score norm1 v", "expected a new line or `;` before `v`", "v", "arguments need parentheses: `norm1(v)`"),
        ("keep first 4, last 3", "each `keep` is a separate statement", "keep first 4, last 3", "write `keep first 4; keep last 3`"),
        ("score age\n + 3", "expected a statement or `}`, not `+`", "+", "to continue on a new line, put the expression in parentheses"),
        ("keep", "expected `first`, `last`, `top` or `where` after `keep`", "keep", "for example `keep last 16`"),
        ("'text'", "a string is not a statement", "'text'", "the docstring is one string, before the first statement"),
    ],
)  # fmt: skip
def test_syntax_errors(statement: str, message: str, at: str, help: str | None) -> None:
    expect_in(statement, "KV0101", message, at, help)


def test_unknown_statements() -> None:
    expect_in("scor age", "KV0104", "unknown statement `scor`", "scor", "did you mean `score`?")
    expect_in(
        "evict", "KV0104", "unknown statement `evict`", "evict", "`score` ranks the tokens: the lowest is evicted first"
    )
    expect_in("override kep last 3", "KV0104", "unknown statement `kep`", "kep", "did you mean `keep`?")


def test_a_statement_behind_an_operator_is_not_taken_for_its_right_side() -> None:
    found = check(body("param budget = 512", "score age *", "keep las 4")).diagnostics
    assert [(one.code, one.span.text) for one in found] == [("KV0101", "\n"), ("KV0101", "las")]


def test_choices_and_brackets_of_other_languages() -> None:
    found = check(body("param budget = 512", "score age > 3 ? 1 : 2")).diagnostics
    assert [(one.span.text, one.help) for one in found] == [("age > 3 ? 1 : 2", "write `where(age > 3, 1, 2)`")]
    found = check(body("param budget = 512", "score attn[0]")).diagnostics
    assert [(one.span.text, one.help) for one in found] == [
        ("attn[0]", "`attn` has a value for every cached token, head and layer")
    ]
    found = check(body("param budget = 512", "score 2 * [age + 1]")).diagnostics
    assert [(one.span.text, one.help) for one in found] == [("[age + 1]", "write `(age + 1)`")]
    found = check(body("param budget = 512", "score [age, 1]")).diagnostics
    assert [one.help for one in found] == ["parentheses are round: write `(`", "parentheses are round: write `)`"]


def test_unknown_items_of_a_file() -> None:
    found = only("kv 1\npolcy P {}\n", "KV0104")
    assert (found.message, found.help) == (
        "expected `policy`, `let`, `import` or `test`, not `polcy`",
        "did you mean `policy`?",
    )


@pytest.mark.parametrize(
    ("statement", "message", "at", "help"),
    [
        ("score sum(attn", "this `(` has no closing `)`", "(", "add `)`"),
        ("score (sum(attn)", "this `(` has no closing `)`", "(", "add `)`"),
        ("score sum(attn))", "this `)` has no opening `(`", ")", "leave it out"),
    ],
)
def test_parentheses(statement: str, message: str, at: str, help: str) -> None:
    expect_in(statement, "KV0112", message, at, help)


def test_an_open_brace() -> None:
    expect(
        'kv 1\npolicy P {\n "doc"\n',
        "KV0112",
        "this `{` has no closing `}`",
        "{",
        "add `}` after the last statement",
    )


def test_a_brace_too_many() -> None:
    expect('kv 1\npolicy P { "doc" }\n}\n', "KV0112", "this `}` has no opening `{`", "}", "leave it out")


def test_a_policy_inside_a_policy() -> None:
    found = check('kv 1\npolicy P {\n "doc"\npolicy Q { "doc" }\n').diagnostics
    assert [(one.code, one.message) for one in found] == [
        ("KV0112", "expected `}` before the next policy"),
        ("KV0211", "a file holds one policy"),
    ]


def test_strings_without_an_end() -> None:
    found = only('kv 1\npolicy P {\n  "doc\n}\n', "KV0103")
    assert (found.message, found.span.text) == ('the string that starts here has no closing `"`', '"doc')
    found = check("kv 1\npolicy P {\n  '''doc\n}\n").diagnostics[0]
    assert (found.code, found.message) == ("KV0103", "the string that starts here has no closing `'''`")


def test_escapes() -> None:
    analysis = check('kv 1\npolicy P { "a\\nb\\t\\\\\\"\\\'\\u{e9}c" }')
    assert analysis.policy.doc == "a\nb\t\\\"'éc"
    assert only('kv 1\npolicy P { "\\x41" }', "KV0113").message == "unknown escape `\\x`"
    for bad in ("\\u{}", "\\u{110000}", "\\u{d800}", "\\u{0}", "\\u41"):
        assert only(f'kv 1\npolicy P {{ "a{bad}" }}', "KV0113")


def test_control_characters_in_strings() -> None:
    found = only('kv 1\npolicy P { "a\x07b" }', "KV0105")
    assert found.message == "a string cannot contain the character `\\x07` directly"
    assert found.help == "write `\\u{7}`"


def test_several_errors_in_one_run_and_no_cascades() -> None:
    found = check(
        body(
            "param budget =", "param recent budget / 2", "scor mean(attn)", "score sum(attn", "keep last recent", "keep top"
        )
    ).diagnostics
    assert [(one.code, one.span.file.location(one.span.start)[0]) for one in found] == [
        ("KV0101", 4), ("KV0101", 5), ("KV0104", 6), ("KV0112", 7), ("KV0101", 9),
    ]  # fmt: skip


def test_semantic_errors_are_found_beside_syntax_errors() -> None:
    found = check(body("param budget = 512", "keep top", "score mean(atn)")).diagnostics
    assert [one.code for one in found] == ["KV0101", "KV0201"]


def test_numbers() -> None:
    expect_in("score age + 1e400", "KV0108", "the number `1e400` is too large", "1e400")


def test_nesting_is_limited() -> None:
    found = only(body("param budget = 512", "score " + "-" * 200 + "age"), "KV0107")
    assert found.message == "the expression has more than 100 operators in a row"
    found = only(body("param budget = 512", "score " + "abs(" * 200 + "age" + ")" * 200), "KV0107")
    assert found.message == "the expression is nested more than 100 deep"
    assert check(body("param budget = 512", "score " + "(" * 5_000 + "age" + ")" * 5_000)).ok


def test_errors_are_limited() -> None:
    assert len(check(body(*["scor x"] * 5_000)).diagnostics) < 60
    assert len(check(body("param budget = 1", *(f"let a{i} = x{i} + y{i}" for i in range(250)))).diagnostics) <= 60


def test_steps_and_clauses_on_one_line() -> None:
    text = 'kv 2\nimport h2o\ntest "a" {\n  use H2O set budget = 3\n}\n'
    (found,) = check(text).diagnostics
    assert (found.message, found.help) == ("expected a new line or `;` before `set`", ONE_LINE)
    found = only("kv 2\nimport h2o\npolicy P = H2O with when prefill keep last 3\n", "KV0101")
    assert (found.message, found.help) == ("expected `,` before `keep`", "write `,` between clauses")
