"""Policies written in Python: what they print as, and that it is what one would write by hand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

import kvdsl
from kvdsl import lang
from kvdsl.compiler import analyse
from kvdsl.diagnostics import Sink
from kvdsl.files import read_resource
from kvdsl.ir import ops
from kvdsl.ir.printer import print_policy
from kvdsl.lang import MisusedError, age, attn, dot, k, mean, name, position, q, v
from kvdsl.lang.policies import Draft
from kvdsl.lang.statements import NAMED, Group, Parts, Slot, forms
from kvdsl.sema.editions import FUNCTIONS, GONE
from kvdsl.sema.upgrade import upgraded
from kvdsl.shipped import all_policies
from kvdsl.source import SourceFile
from kvdsl.syntax.formatter import format_source
from kvdsl.syntax.parser import parse
from kvdsl.syntax.reader import read
from kvdsl.syntax.shape import parse_module
from tests.differential.random_policies import policy_of
from tests.lower.test_spellings import APART, PAIRS
from tests.quick import thinned

from .calm import calm, several
from .rewriting import rewritten

CALM = """\
kv 2

policy Calm {
  \"""
  Evicts the token that attention has lost interest in.

  paper: none, "a" test
  \"""
  param budget = 256
  param sinks  = 4
  score mean(attn) * norm1(v)
  keep  first sinks
  keep  last budget / 4
  when  prefill
}
"""

SEVERAL = """\
kv 2

policy Everything {
  "Has a bit of all."
  param budget = 256
  param share  = 0.5 in 0..1
  let unit = k / norm2(k)
  let lost(x, far = 64) = where(age > far and not position < 4, -x, x)
  let recent(x) = sum(x over last 32 queries)
  budget budget across heads floor 0.2
  score  lost(recent(attn)) + norm1(unit) - 2 ** -(1 + mean(attn)) / live
  when   prefill
  keep   top budget * 0.25 by std(attn)
}
"""


def same(text: str, written: lang.policies.Policy, path: Path | None = None) -> None:
    """Both mean the same, and what is written is laid out as it should be."""
    ours = analyse(SourceFile("<p>", written.kv, path))
    assert ours.policy == analyse(SourceFile("<p>", text, path)).policy
    assert format_source(SourceFile("<p>", written.kv), Sink()) == written.kv


def test_what_is_printed() -> None:
    assert calm.kv == CALM
    assert several.kv == SEVERAL
    assert (calm.name, calm.stem, several.stem) == ("Calm", "calm", "everything")
    assert {one.code for one in several.check()} == {"KV0212"}  # `share` is never read
    assert calm.check() == ()
    assert [one.code for one in calm.check(budget=0)] != []


@pytest.mark.parametrize("path", thinned(all_policies(), 3), ids=lambda path: path.stem)
def test_every_policy_can_be_written_in_python(path: Path) -> None:
    source = read(path, Sink())
    assert source is not None
    same(source.text, rewritten(parse_module(source, Sink())), path)


@pytest.mark.parametrize("body", sorted({body for pair in (*PAIRS.values(), *APART.values()) for body in pair}))
def test_every_spelling_can_be_written_in_python(body: str) -> None:
    in_newest_edition(f'kv 1\npolicy P {{\n"A test."\n{body}\n}}\n')


def in_newest_edition(text: str) -> None:
    """A policy of edition 1, if edition 2 has words for it, can be written in Python."""
    newest = upgraded(SourceFile("<p>", text, Path("p.kv")), Sink())
    if newest is None:
        pytest.skip("edition 2 has no words for it")
    same(newest, rewritten(parse_module(SourceFile("<p>", newest), Sink())), Path("p.kv"))


@pytest.mark.parametrize("seed", range(30))
def test_random_policies_can_be_written_in_python(seed: int) -> None:
    in_newest_edition(print_policy(policy_of(f"python {seed}")))


def test_kvdsl_load_takes_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "calm.kv").write_text(CALM)
    assert kvdsl.load(calm, budget=64) is kvdsl.load(tmp_path / "calm.kv", budget=64)
    assert kvdsl.load(f"{Path(__file__).with_name('calm.py')}:calm") is kvdsl.load(calm)


def test_a_policy_may_change_another() -> None:
    @kvdsl.policy(imports="h2o", changes="H2O")
    def once(p: Draft) -> None:
        """As H2O, after prompts."""
        p.when("prefill")

    same('kv 2\nimport h2o\npolicy Once = H2O with { "As H2O, after prompts."; when prefill }', once)

    @kvdsl.policy(imports="h2o", changes="H2O")
    def mine(p: Draft) -> None:
        """As H2O."""
        p.score(mean(attn))
        p.keep(first=name("recent") / 2)
        p.param("budget", 64)

    same(
        'kv 2\nimport h2o\npolicy Mine = H2O with { "As H2O."; score mean(attn); keep first recent / 2; param budget = 64 }',
        mine,
    )


def test_clauses_make_another_policy() -> None:
    once = calm.with_("when decode, keep first 2")
    assert (once.name, once.stem) == (kvdsl.load(once).spec.name, kvdsl.load(once).spec.stem)
    assert kvdsl.load(once) is kvdsl.load(calm).with_("when decode, keep first 2")
    assert once.kv == print_policy(analyse(once.source).policy)
    assert {"  when decode", "  keep first 2", "  keep last budget / 4"} <= {*once.kv.splitlines()}
    again = analyse(SourceFile(f"<{once.stem}>", once.kv))
    assert again.policy == analyse(once.source).policy
    (found,) = calm.with_("when somewhen").check()
    assert (found.code, found.file, found.span.text) == ("KV0310", "<policy>", "somewhen")


# -- everything is reachable -------------------------------------------------------------------------------------------


def test_every_name_is_there() -> None:
    prelude = {let.name.text for let in kvdsl.sema.files.prelude_syntax().lets}
    assert {*ops.NAMED_INPUTS, *ops.NAMED_FUNCTIONS, *prelude, "prev"} - FUNCTIONS.keys() <= {*lang.__all__}
    assert FUNCTIONS.keys().isdisjoint(lang.__all__), "edition 2 has them no more"
    assert all(repr(getattr(lang, one)) == one for one in lang.__all__ if one.islower() and one != "name")


def test_every_range_is_there() -> None:
    calls = {
        "history": mean(attn, last=32),
        "next": mean(attn, over="next page"),
        **{one: mean(attn, over=one) for one in ops.RANGES if one not in ("history", "next")},
    }
    told = {one.removeprefix("over ").replace("the last N", "last 32") for one in ops.RANGES.values()}
    assert {repr(call) for call in calls.values()} == {f"mean(attn over {one})" for one in told}
    assert repr(mean(attn, where=age > 8, by=position % 4)) == "mean(attn where age > 8 by position % 4)"
    others = lang.max(lambda j: dot(k, j.k), over="slots", where=lambda j: (j.position != position) & (j(age % 3) == 0))
    assert repr(others) == "max(dot(k, j.k) over slots as j where j.position != position and j.(age % 3) == 0)"
    assert repr(dot(q, k, over="sketch")) == "dot(q, k over sketch)"


def test_every_statement_is_there_and_every_clause() -> None:
    p = Draft()
    for word, ways in forms().items():
        for form in ways:
            for values, named in _filled(form):
                getattr(p, word)(*values, **named)
    p.param("a", 3, in_=(1, ...))
    p.let("b", lambda x: x)
    p.input("c", "layers", "heads", from_="c.safetensors")
    p.input("d", 0)
    lines = "".join(f"{statement.text}\n" for statement in p._statements)
    sink = Sink()
    tree = parse(SourceFile("<p>", f"kv 2\npolicy P {{\n{lines}}}\n"), sink).tree
    assert not [*sink] and tree is not None
    made = {node.data for node in tree.iter_subtrees()}
    plain = re.search(r"\?plain:(.*?)\n\n", read_resource("grammar", "kv.lark"), re.DOTALL)
    assert plain is not None
    assert {*re.findall(r"\w+", plain[1])} - {*GONE, "keep"} <= made
    assert {
        "input_file",
        *(f"keep_{form}" for form in ops.KEEPS),
        "choosing",
        "range",
        "across",
    } <= made
    assert all(f"across {axis}" in lines for axis in ("heads", "layers"))


def _filled(parts: Parts) -> list[tuple[list[object], dict[str, object]]]:
    """Values for all slots: with each of several choices once."""
    return [_values(parts, choice) for choice in range(_most_choices(parts))]


def _most_choices(parts: Parts) -> int:
    groups = [part for part in parts if isinstance(part, Group)]
    return max((count for one in groups for count in (len(one.choices), *map(_most_choices, one.choices))), default=1)


def _values(parts: Parts, choice: int) -> tuple[list[object], dict[str, object]]:
    values: list[object] = []
    named: dict[str, object] = {}
    for part in parts:
        if isinstance(part, Slot):
            value = {"expr": age, "NAME": "word", "range": (2, ...), "list": [1, age]}[part.kind]
            values += [] if part.name else [value]
            named |= {part.name: value} if part.name else {}
        elif isinstance(part, Group):
            inner = _values(part.choices[min(choice, len(part.choices) - 1)], choice)
            values += inner[0]
            named |= inner[1] | ({part.flag: True} if part.flag else {})
    return values, named


def test_statements_say_what_they_are() -> None:
    p = Draft()
    assert {*forms(), *NAMED} <= {*dir(p)}
    assert "p.keep(top=x, by=x)" in p.keep.__doc__
    with pytest.raises(AttributeError, match="did you mean `keep`"):
        p.keeps(first=3)
    with pytest.raises(AttributeError, match=r"no `pages`: .*by page\(16\)"):
        p.pages(16)


# -- operators ---------------------------------------------------------------------------------------------------------


def test_operators_print_what_they_mean() -> None:
    a, b, c = (name(one) for one in "abc")
    for expression, text in (
        (a - (b - c), "a - (b - c)"), ((a - b) - c, "a - b - c"), (a / (b * c), "a / (b * c)"), (-a**2, "-a ** 2"),
        ((-a) ** 2, "(-a) ** 2"), ((a**b) ** c, "(a ** b) ** c"), (a**b**c, "a ** b ** c"), (2**-a, "2 ** -a"),
        ((-2) ** a, "(-2) ** a"), (a - -1, "a - -1"), (-(0 - a), "-(0 - a)"), (-(a + b), "-(a + b)"), (a % 4 == 1, "a % 4 == 1"),
        ((a < b) == (b < c), "(a < b) == (b < c)"), (~(a < b) & (b > c) | (a != c), "not a < b and b > c or a != c"),
        (~((a < b) & (b > c)), "not (a < b and b > c)"), ((a > 1) & ((b > 1) | (c > 1)), "a > 1 and (b > 1 or c > 1)"),
        (1 - a, "1 - a"), (a > 3, "a > 3"), (0.1 * a, "0.1 * a"), (1e-30 + a, "1e-30 + a"), (1 / a, "1 / a"), (abs(a), "abs(a)"),
        (+a, "a"), (5 % a, "5 % a"), (np.float32(0.5) * a, "0.5 * a"), (np.int64(3) + a, "3 + a"),
        (a((b + 1) * 2, d=-c), "a((b + 1) * 2, d = -c)"),
    ):  # fmt: skip
        assert repr(expression) == text


@pytest.mark.parametrize(
    "written",
    ["bool(age)", "3 < age < 10", "1 if age > 3 else 2", "age > 3 and age < 10", "not age", "max(age, 3)", "age in (1, 2)"],
)
def test_an_expression_is_never_silently_true(written: str) -> None:
    with pytest.raises(TypeError, match=r"neither true nor false in Python.*`\(a > 0\) & \(b > 0\)`.*`where\(c, a, b\)`"):
        eval(written, {"age": age})


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("sum(attn)", "import `sum`"),
        ("attn[-32:]", "last=32"),
        ("attn * 'x'", "`'x'` cannot be part of an expression"),
        ("attn == None", "`None` cannot be part of an expression"),
        ("True * attn", "`True` cannot be part of an expression"),
        ("attn * float('inf')", "use `everything` for an unlimited number"),
        ("(attn + 1)(3)", "not a function"),
        ("mean(attn, over='slots', last=3)", "leave out the other"),
        ("mean(attn, over='a) b')", "is a word"),
        ("mean(lambda j: j.k)", 'over="slots"'),
        ("mean(attn, by=3, where='x')", "cannot be part of an expression"),
        ("mean(over='slots')", "write `mean"),
        ("p.keep(frist=4)", r"`keep` has no such form; write `p.keep\(first=x\)`"),
        ("p.keep(top=4)", "has no such form"),
        ("p.score()", "has no such form"),
        ("p.score(attn, attn)", "has no such form"),
        ("p.score('attn')", "cannot be part of an expression"),
        ("p.when(3)", "not a word"),
        ("p.when('a b')", "not a word"),
        ("p.select(top=4, by=attn, in_layers=2)", "not a range"),
        ("p.select(top=4, by=attn, from_layers=3)", "not a list"),
        ("p.let('a b', 3)", "not a name"),
        ("p.let('f', lambda *x: 3)", r"cannot have `\*x`"),
    ],
)
def test_what_the_language_has_no_words_for(written: str, said: str) -> None:
    with pytest.raises(MisusedError, match=said) as raised:
        eval(written, {"attn": attn, "mean": mean, "p": Draft()})
    assert isinstance(raised.value, kvdsl.KvdslError)


def test_what_grows_without_bound_is_refused() -> None:
    x = attn
    with pytest.raises(MisusedError, match="larger than 32 KiB"):
        for _ in range(40):
            x = x * x
    deep = position
    for _ in range(3_000):
        deep = -deep

    @kvdsl.policy
    def nested(p: Draft, budget: int = 8) -> None:
        p.score(deep)

    assert "KV0107" in {one.code for one in nested.check()}


def test_a_function_that_cannot_be_a_policy() -> None:
    with pytest.raises(MisusedError, match="`sinks` of `mine` has no default"):

        @kvdsl.policy
        def mine(p: Draft, sinks: int) -> None:
            p.score(v)
