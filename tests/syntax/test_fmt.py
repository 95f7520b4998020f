"""The canonical layout: it changes no meaning and no comment, formatting twice is formatting once, and it looks as intended."""

from __future__ import annotations

import random
import re
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdsl.codes import CODES, Code
from kvdsl.diagnostics import Sink
from kvdsl.files import resource
from kvdsl.source import SourceFile
from kvdsl.syntax.formatter import format_source
from kvdsl.syntax.parser import parse
from kvdsl.syntax.wrapping import WIDTH
from scripts.fuzz import check as fuzz
from tests.quick import few

POLICIES = sorted(resource("policies").glob("*.kv"))


def formatted(text: str) -> str:
    """The canonical layout of a text without syntax errors."""
    sink = Sink()
    found = format_source(SourceFile("example.kv", text), sink)
    assert found is not None, [one.message for one in sink]
    return found


def laid_out(text: str) -> str:
    """The layout of a policy's statements."""
    found = formatted(f"policy P {{\n{dedent(text)}\n}}\n")
    assert found.startswith("policy P {\n")
    assert found.endswith("}\n")
    return dedent(found.removeprefix("policy P {\n").removesuffix("}\n"))


def means_the_same(before: str, after: str) -> None:
    """Same tree, same comments in the same order, and no token ever lost."""
    old, new = (parse(SourceFile("example.kv", text), Sink()) for text in (before, after))
    assert new.tree == old.tree
    assert [str(comment).rstrip() for comment in new.comments] == [str(comment).rstrip() for comment in old.comments]
    assert [str(t) for t in new.tokens if t.type != "_SEP"] == [str(t) for t in old.tokens if t.type != "_SEP"]


def well_laid_out(text: str) -> None:
    """What holds of every formatted text."""
    lines = re.sub(r'"""(\\.|[^\\])*?"""', '"""', text, flags=re.DOTALL).split("\n")
    assert all(line == line.rstrip() for line in lines)
    assert "\n\n\n" not in "\n".join(lines)
    assert text == "" or (text.endswith("\n") and not text.startswith("\n"))
    assert formatted(text) == text


# -- for every text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [*POLICIES, resource("grammar") / "prelude.kv"], ids=lambda path: path.stem)
def test_what_is_shipped_is_formatted(path: Path) -> None:
    text = path.read_text()
    assert formatted(text) == text


@pytest.mark.parametrize("seed", few(range(10), 0))
def test_derivations_of_the_grammar(seed: int) -> None:
    """Random files that the grammar accepts, with comments in odd places."""
    rng = random.Random(seed)
    done = 0
    while done < 30:
        text = rng.choice([fuzz.derived_file, fuzz.derived_policy])(rng).decode()
        sink = Sink()
        found = format_source(SourceFile("example.kv", text), sink)
        if found is None:
            assert list(sink)
            continue
        means_the_same(text, found)
        well_laid_out(found)
        done += 1


SPACES = st.sampled_from(["", " ", "   ", "\t"])
LINE_ENDS = {"\n": st.sampled_from(["\n", "\n\n", "\n \t\n  \n"])}


@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(POLICIES), st.data())
def test_the_layout_does_not_depend_on_spaces(path: Path, data: st.DataObject) -> None:
    """A shipped policy with other spaces and more empty lines where there are some is laid out as it is."""
    text = path.read_text()
    parsed = parse(SourceFile("example.kv", text), Sink())
    items = sorted([*parsed.tokens, *parsed.comments], key=lambda token: token.start_pos or 0)
    sparse = ""
    for before, item in zip([None, *items], items, strict=False):
        spaces = (
            data.draw(SPACES) if item.type == "_SEP" or before is None or before.type == "_SEP" else data.draw(SPACES) + " "
        )
        more = data.draw(LINE_ENDS["\n"]) if item == before == "\n" else str(item)
        sparse += spaces + more
    assert formatted(sparse) == text


# -- examples ----------------------------------------------------------------------------------------------------------


def test_spaces() -> None:
    assert laid_out("let f( x,y )=x**-y-  -2.50*(x+1)") == "let f(x, y) = x ** -y - -2.50 * (x + 1)\n"
    assert laid_out("keep   where not(age<3)and position>=-live%2") == "keep where not (age < 3) and position >= -live % 2\n"
    assert laid_out("override   budget pyramid( budget,beta=20 )") == "override budget pyramid(budget, beta = 20)\n"
    assert laid_out("score sum( attn over   last 3 queries )") == "score sum(attn over last 3 queries)\n"


@pytest.mark.parametrize("range", ["2..4", "..4", "2..", "..", "-1..n", "n.. .5", "2. ..4", "f(x)..4"])
def test_ranges(range: str) -> None:
    """Nothing that touches the dots may become a part of a number, or the dots of one of it."""
    text = f"policy P {{\n  param a = 1 in {range}\n}}\n"
    assert formatted(text.replace(" = ", "=")) == text


def test_neighbours_stand_below_each_other() -> None:
    text = """\
      param a = 1 in 0..2
      param longer = 2
      param small = 3
      let f(x) = x
      let norm(x) = x

      score position
      keep first longer
      positions compact
      override keep
      keep last 1
      slack 3
      override param a = 1
      override param abc = 2
    """
    assert laid_out(text) == dedent("""\
      param a = 1 in 0..2
      param longer = 2
      param small  = 3
      let f(x)    = x
      let norm(x) = x

      score position
      keep  first longer
      positions compact
      override keep
      keep  last 1
      slack 3
      override param a   = 1
      override param abc = 2
    """)


def test_what_would_not_fit_is_not_aligned() -> None:
    sums = " + ".join(["1"] * 29)
    text = formatted(f'kv 1\n\npolicy P {{\n  "d"\n  param a = {sums} + 1\n  param abcd = 2\n  score age\n}}\n')
    assert f"  param a = {sums} + 1\n  param abcd = 2\n" in text


def test_default_arguments_are_not_what_is_aligned() -> None:
    text = """\
      let f(x = 1) = x
      let foo(x = 2) = x
      score f(foo(position))
    """
    assert laid_out(text) == dedent("""\
      let f(x = 1)   = x
      let foo(x = 2) = x
      score f(foo(position))
    """)


def test_comments_stay_with_what_they_are_about() -> None:
    text = """\
    # the file


    kv 1 ; import h2o # imported
    # of P
    policy P   # behind the name
      # below the name
    { # behind the brace
      "d" ; param a = 1#a
      param longer = 2   # longer

      # alone


      score max( # first
        a, # second

        # above
        longer # third
        # last
      ) # behind
    } # closed
    # the end
    """
    assert formatted(dedent(text)) == dedent("""\
    # the file

    kv 1
    import h2o  # imported

    # of P
    policy P {  # behind the name
      # below the name
      # behind the brace
      "d"
      param a = 1       #a
      param longer = 2  # longer

      # alone

      score max(  # first
        a,  # second
        # above
        longer  # third
        # last
      )  # behind
    }  # closed

    # the end
    """)


def test_blocks_on_one_line_stay_on_one() -> None:
    assert formatted("policy P{score 1;keep last 0}") == "policy P { score 1; keep last 0 }\n"
    assert formatted("policy P { }") == "policy P {}\n"
    assert formatted("policy P {\n}") == "policy P {}\n"
    assert formatted("policy P {score 1\n}") == "policy P {\n  score 1\n}\n"
    long = "policy P { score " + " + ".join(["position"] * 12) + " }"
    assert formatted(long) == long.replace("{ ", "{\n  ").replace(" }", "\n}\n")


def test_tests_of_policies() -> None:
    text = 'test "a"{use P at layer 1 of 2;set budget=3\nprompt{attend 1;attend .5,-0.5/1,nan}\nexpect evicted 0}'
    assert formatted(text) == dedent("""\
    test "a" {
      use P at layer 1 of 2
      set budget = 3
      prompt { attend 1; attend .5, -0.5 / 1, nan }
      expect evicted 0
    }
    """)


def test_long_statements_break_inside_of_parentheses() -> None:
    long = "a_rather_long_name * another_long_name"
    text = f"score where({long} > 3, ({long} + {long} - -3 * f({long}) - {long}), sum({long} over slots))"
    assert laid_out(text) == dedent(f"""\
      score where(
        {long} > 3,
        (
          {long}
          + {long}
          - -3 * f({long})
          - {long}
        ),
        sum({long} over slots)
      )
    """)


def test_lines_are_as_long_as_they_may_be() -> None:
    fits = "score (" + "+".join(["b"] * 30) + ")"
    room = WIDTH - len("  " + laid_out(fits).rstrip("\n"))
    assert laid_out(fits.replace("(b", "(" + "b" * (room + 1))).count("\n") == 1
    assert laid_out(fits.replace("(b", "(" + "b" * (room + 2))).count("\n") > 1


def test_line_ends_and_empty_files() -> None:
    assert formatted("kv 1\n\n \t\n\n# a") == "kv 1\n\n# a\n"
    assert formatted("") == formatted("\n\n;") == ""
    assert formatted("\n\n# a  \n\n") == "# a\n"


# -- what is not formatted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", [code for code in CODES.values() if code.id in ("KV0101", "KV0102", "KV0103", "KV0112", "KV0113")]
)
def test_syntax_errors_are_reported(code: Code) -> None:
    sink = Sink()
    assert format_source(SourceFile("example.kv", code.example), sink) is None
    assert code.id in {one.code for one in sink}


def test_what_would_become_too_large() -> None:
    text = "policy P {" + "slack 1;" * 4_000 + "}"
    sink = Sink()
    assert format_source(SourceFile("example.kv", text), sink) is None
    assert [one.code for one in sink] == ["KV0106"]


@pytest.mark.parametrize(
    "inner", ["(" * 2_000 + "1" + ")" * 2_000, "(# c\n" * 200 + "1" + ")" * 200, "f(" * 90 + "1" + ", 2)" * 90]
)
def test_many_parentheses(inner: str) -> None:
    text = f"policy P {{\n  score {inner}\n}}\n"
    once = formatted(text)
    means_the_same(text, once)
    well_laid_out(once)
