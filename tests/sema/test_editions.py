"""What edition 2 has no more, and how `kvdsl fmt --upgrade` rewrites it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdsl.compiler import analyse
from kvdsl.diagnostics import Sink
from kvdsl.sema.upgrade import upgraded
from kvdsl.source import SourceFile
from tests.diagnostics.expect import only

BASE = """kv 2

policy Base {
  "A base."
  param budget = 64
  score mean(attn)
  keep first 2
  keep last 4
}
"""


@pytest.fixture
def upgrade(tmp_path: Path):
    (tmp_path / "base.kv").write_text(BASE)

    def upgrade(text: str) -> tuple[str | None, list[str]]:
        sink = Sink()
        made = upgraded(SourceFile("mine.kv", text, tmp_path / "mine.kv"), sink)
        return made, [one.message for one in sink.sorted()]

    return upgrade


def child(body: str) -> str:
    return f'kv 1\nimport "base.kv"\n\npolicy Mine extends Base {{\n  "Mine."\n  {body}\n}}\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("override score age", "score age"),
        ("keep where age < 3", "keep where age < 3"),
        ("override param budget = 32", "param budget = 32"),
        ("override keep first 3\n  keep last 8", "keep first 3\n  keep last 8"),
    ],
)
def test_extends_becomes_with(upgrade, before: str, after: str) -> None:
    made, said = upgrade(child(before))
    assert not said
    assert made == child(after).replace("kv 1", "kv 2").replace("extends Base", "= Base with")


def alone(line: str) -> str:
    return f'kv 1\n\npolicy Mine {{\n  "Mine."\n  when prefill\n  param budget = 64\n  {line}\n  keep  last 4\n}}\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("score sum(dot(q, k) over text after 4)", "score sum(dot(q, k) over text where query_position >= 4)"),
        ("score mean(attn)", "score mean(attn)"),
    ],
)
def test_words_of_policies(upgrade, before: str, after: str) -> None:
    assert upgrade(alone(before)) == (alone(after).replace("kv 1", "kv 2"), [])


def test_layers_that_choose(upgrade) -> None:
    text = 'kv {}\n\npolicy Mine {{\n  "Mine."\n  select top 4 by dot(q, k) {}\n  keep   last 4\n}}\n'
    assert upgrade(text.format(1, "in layers 2, 13 reused above")) == (text.format(2, "from layers (2, 13)"), [])


def test_budgets_at_most(upgrade) -> None:
    text = 'kv {}\n\npolicy Mine {{\n  "Mine."\n  param budget = 64\n  score  age\n  keep   last 1\n  budget {}\n}}\n'
    assert upgrade(text.format(1, "0.5 * seen at most budget")) == (text.format(2, "min(0.5 * seen, budget)"), [])


def test_words_of_tests(upgrade) -> None:
    tests = (
        'import quest\nimport kvzip\n\ntest "a" {{\n  use Quest{}\n  prompt {{ token key 1 query 2 }}\n  expect kept 0\n}}\n\n'
        'test "b" {{\n  use KVzip\n  attend 1 {}importance 3\n  expect {}given_importance 3\n}}\n'
    )
    old = "kv 1\n" + tests.format(" at layer 2 of 3", "given ", "state ")
    new = "kv 2\n" + tests.format("\n  set layer = 2\n  set layers = 3", "", "")
    assert upgrade(old) == (new, [])
    said = analyse(SourceFile("mine_test.kv", old.replace("kv 1", "kv 2"))).diagnostics
    assert [(one.code, one.message) for one in said] == [
        ("KV0117", "edition 2 has no `at layer`"),
        ("KV0117", "edition 2 has no `given` in tests"),
        ("KV0117", "edition 2 has no `expect state`"),
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("keep first 8", "`keep first 8` adds to the inherited `keep first 2`, but would replace it after `with`"),
        ("override keep first 8", "`override keep` drops the inherited `keep last 4`, which `with` would keep"),
    ],
)
def test_what_with_would_change_stays_as_it_is(upgrade, body: str, message: str) -> None:
    assert upgrade(child(body)) == (None, [message])


@pytest.mark.parametrize(
    ("text", "at", "help"),
    [
        ('policy Mine extends H2O { "Mine."; score age }', "extends H2O",
         "write `policy Mine = H2O with`: each line replaces what it names, and a `keep` replaces those of its kind"),
        ('policy Mine = H2O with { "Mine."; override score age }', "override ",
         "leave it out, and write `policy A = B with`, where a line replaces what it names"),
    ],
)  # fmt: skip
def test_the_newest_edition_has_one_way_to_change_a_policy(text: str, at: str, help: str) -> None:
    found = only(f"kv 2\nimport h2o\n\n{text}\n", "KV0117")
    assert (found.span.text, found.help) == (at, help)
    (fix,) = found.fixes
    assert not analyse(SourceFile("mine.kv", fix.applied())).diagnostics
