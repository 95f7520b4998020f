"""`policy A = B with ...`: what a clause takes the place of, and what is said of those that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdsl.compiler import analyse
from kvdsl.ir import nodes as ir
from kvdsl.ir.printer import print_expression, print_keep
from kvdsl.source import SourceFile
from tests.diagnostics.expect import check, expect, only

BASE = """kv 1

policy Base {
  "A base."
  param budget = 64
  param beta steps = 20 in 1..
  let weight = mean(attn)
  score weight * beta
  keep first 2
  keep where age < 3
  keep where position < 5
  keep last 4
}
"""


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "base.kv").write_text(BASE)
    return tmp_path / "mine.kv"


def made(path: Path, clauses: str) -> ir.Policy:
    path.write_text(f'kv 1\nimport "base.kv"\n\npolicy Mine = Base with {clauses}\n')
    return analyse(path).policy


def shipped(clauses: str, stem: str = "h2o", name: str = "H2O") -> str:
    return f"kv 1\nimport {stem}\n\npolicy Mine = {name} with {clauses}\n"


def test_a_clause_takes_the_place_of_what_the_base_has(base: Path) -> None:
    found = made(base, "score position, let weight = age")
    assert print_expression(found.score) == "position"
    assert print_expression(made(base, "let weight = age").score) == "age * beta"
    assert print_expression(made(base, "budget budget / 2").budget) == "budget / 2"


def test_a_keep_clause_takes_the_place_of_its_kind(base: Path) -> None:
    def keeps(clauses: str) -> list[str]:
        return [print_keep(keep) for keep in made(base, clauses).keeps]

    assert keeps("keep last 9") == ["keep first 2", "keep where age < 3", "keep where position < 5", "keep last 9"]
    assert keeps("keep where age < 9") == ["keep first 2", "keep last 4", "keep where age < 9"]
    assert keeps("keep where age < 9, keep where age > 20, keep first 0") == [
        "keep last 4",
        "keep where age < 9",
        "keep where age > 20",
        "keep first 0",
    ]


def test_a_param_clause_changes_the_default(base: Path) -> None:
    """The unit and the range stay, unless the clause says them."""
    (beta,) = (param for param in made(base, "param beta = 3").params if param.name == "beta")
    assert (print_expression(beta.default), beta.unit, beta.low) == ("3", "steps", 1)
    (beta,) = (param for param in made(base, "param beta times = 0 in 0..9").params if param.name == "beta")
    assert (print_expression(beta.default), beta.unit, beta.low, beta.high) == ("0", "times", 0, 9)
    base.write_text('kv 1\nimport "base.kv"\npolicy Mine = Base with param beta = 0\n')
    assert [found.code for found in analyse(base).diagnostics] == ["KV0406"]


def test_no_docstring_is_missed_where_the_line_says_it() -> None:
    assert not check(shipped("when prefill")).diagnostics
    assert [found.code for found in analyse(SourceFile("mine.kv", "kv 1\nimport h2o\npolicy A extends H2O {}")).diagnostics]


@pytest.mark.parametrize("clauses", ["override when prefill", "{ override when prefill }"])
def test_there_is_nothing_to_override(clauses: str) -> None:
    found = only(shipped(clauses), "KV0209" if "{" in clauses else "KV0104")
    assert found.help == "leave out `override`: a clause after `with` replaces what it names"


@pytest.mark.parametrize(
    ("text", "code", "message", "at", "help"),
    [
        (shipped("whne prefill"), "KV0104", "unknown statement `whne`", "whne", "did you mean `when`?"),
        (shipped("when prefill, when decode"), "KV0207", "`when` is given twice", "when decode", "leave out one of them"),
        (shipped("keep last recent, keep"), "KV0101", "expected `first`, `last`, `top` or `where` after `keep`", "keep",
         "for example `keep last 16`"),
        (shipped("when prefill,"), "KV0101", "expected a statement after `,`", "\n", None),
        (shipped("when prefill; keep last 3"), "KV0101", "expected `policy`, `let`, `import` or `test`, not `keep`", "keep",
         "after `with`, commas separate clauses on one line; in braces, lines or `;` do: `policy A = B with { ... }`"),
        ("kv 1\nimport h2o\npolicy Mine = h2o with when prefill\n", "KV0203", "unknown policy `h2o`", "h2o", "did you mean `H2O`?"),
        ("kv 1\npolicy Mine = H2O with when prefill\n", "KV0203", "unknown policy `H2O`", "H2O", "write `import h2o` above"),
        ("kv 1\nimport h2o\npolicy Mine = H2O\n", "KV0101", "expected `with` after `H2O`", "\n", None),
        ("kv 1\npolicy Mine = Mine with when prefill\n", "KV0205", "`Mine` extends itself", "Mine", None),
    ],
)  # fmt: skip
def test_errors_point_at_what_is_wrong(text: str, code: str, message: str, at: str, help: str | None) -> None:
    expect(text, code, message, at, help)


def test_an_error_costs_one_clause(base: Path) -> None:
    """The others are read, and so is what stands behind the line."""
    base.write_text(
        'kv 1\nimport "base.kv"\npolicy Mine = Base with sorce age, keep last bta, when prefil, layers\nlet f(x) = x\n'
    )
    assert [(found.code, found.span.text) for found in analyse(base).diagnostics] == [
        ("KV0104", "sorce"),
        ("KV0201", "bta"),
        ("KV0310", "prefil"),
        ("KV0101", "\n"),
    ]


@pytest.mark.parametrize(
    ("clauses", "mended"),
    [
        ("whne prefill", ["when prefill"]),
        ("when prefill, when decode", ["when prefill", "when decode"]),
        (
            "keep first 2, when prefill, when decode, layers 2..",
            ["keep first 2, when prefill, layers 2..", "keep first 2, when decode, layers 2.."],
        ),
        ("keep last 4, override when prefill", ["keep last 4, when prefill"]),
        ("{ keep last 4; override when prefill }", ["{ keep last 4; when prefill }"]),
        ("keep last 4, keep recent 4, layers 2..", ["keep last 4, keep last 4, layers 2.."]),
    ],
)
def test_what_a_help_offers_mends_the_clause(clauses: str, mended: list[str]) -> None:
    (found,) = check(shipped(clauses)).diagnostics
    assert [fix.applied() for fix in found.fixes] == [shipped(one) for one in mended]


def test_a_header_over_two_lines_ends_with_its_brace() -> None:
    """It is not taken for a line that is over."""
    expect(
        "kv 1\nimport h2o\npolicy Mine = H2O with\n  when prefill\n",
        "KV0101",
        "expected `{`, not `when`",
        "when",
        "after `with`, commas separate clauses on one line; in braces, lines or `;` do: `policy A = B with { ... }`",
    )
