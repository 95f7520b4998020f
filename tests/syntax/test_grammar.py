"""The grammar has the whole language, and every statement a shape of its own."""

import pytest

from kvdsl.diagnostics import Sink
from kvdsl.files import read_resource
from kvdsl.source import SourceFile
from kvdsl.syntax.nodes import Budget, Given, Keep, Layers, Let, Pages, Param, Select, Setting, Sketch, Tensor
from kvdsl.syntax.parser import parse
from kvdsl.syntax.shape import parse_module

POLICIES = """
policy LazyStreaming extends StreamingLLM {
  param R = 32; param sigma = 24; param delta = 8
  trigger  overflow >= R
  slack    sigma
  max_drop delta
  positions compact
}
policy ScissorHandsWindow {
  param budget  = 512
  param history = 400
  score sum(attn over last history queries)
  keep  last 10
}
policy SnapKV {
  param budget = 1024
  when  prefill
  score max_pool(sum(attn over last 32 queries), 7)
  keep  last 32
}
policy PyramidKV extends SnapKV { override budget pyramid(budget, beta = 20) }
policy AdaKV extends SnapKV     { override budget budget across heads floor 0.2 }
policy SparCas {
  param tokens = 2048
  param dims   = 16
  sketch top dims dims by abs(q) every 64 queries
  select top tokens by dot(q, k over sketch) in layers 2..
}
policy Quest {
  param tokens = 2048
  pages  16
  keep   last 16
  select top tokens by sum(max(q * min(k over page), q * max(k over page)) over dims) in layers 2..
}
policy EQUIP_H2O extends H2O {
  positions compact
  rope      cached
}
policy Once = H2O with when prefill, tensor filter [dims] from "filter.safetensors", keep last 64
policy Read = Quest with select top tokens by attn in layers 2, 13 reused above, let f(x, y) = max(x, y), layers 2..
policy Braces = H2O with
{
  'Why.'; when prefill
  keep last 64
}
policy Rest {
  layers 2..30; victims shared by heads; cap hard; storage blocks 16; storage in_place; prefill blocks of 512; prefill whole
  override keep; override keep last 3; group max; budget layer; score ema(attn, 0.9)
}
"""

SHAPES: list[tuple[str, type]] = [
    ("param sigma = 24 in 0..64", Param),
    ("let f(x) = x", Let),
    ("let f(x, y = 3, z = x / y) = x", Let),
    ('tensor filter [layers, heads, dims] from "filter.safetensors"', Tensor),
    ("given importance", Given),
    ("given importance = -1 / 2", Given),
    ("keep top 3 by age", Keep),
    ("score age", Setting),
    ("budget 3", Budget),
    ("budget 0.5 * seen at most 4096", Budget),
    ("budget 3 at most 4 across heads", Budget),
    ("budget 3 across heads", Budget),
    ("budget 3 across heads floor 0.2", Budget),
    ("budget 3 across layers", Budget),
    ("budget 3 across layers by 2 * layer floor 0.2", Budget),
    ("budget 3 across heads floor 0.2 across layers by layer", Budget),
    ("storage in_place", Setting),
    ("storage blocks 16", Setting),
    ("prefill blocks of 16", Setting),
    ("when prefill", Setting),
    ("victims shared by heads", Setting),
    ("cap hard", Setting),
    ("rope cached", Setting),
    ("pages 16", Pages),
    ("pages 16 after 4", Pages),
    ("layers 2..", Layers),
    ("layers ..layers - 3", Layers),
    ("select top 3 by dot(q, k)", Select),
    ("select top 3 by dot(q, k) in layers 2..7", Select),
    ("select top 3 by dot(q, k) in layers 2, again reused above", Select),
    ("select where position < 4 or random() < 0.5", Select),
    ("select where age < 4 weight 1 / norm2(k) in layers 2..", Select),
    ("sketch top 16 dims by abs(q) every 64 queries", Sketch),
]


def test_every_form_of_the_language_is_in_the_grammar() -> None:
    sink = Sink()
    module = parse_module(SourceFile("all.kv", "kv 1\n" + POLICIES), sink)
    assert [found.message for found in sink] == []
    assert [policy.name.text for policy in module.policies] == [
        "LazyStreaming", "ScissorHandsWindow", "SnapKV", "PyramidKV", "AdaKV", "SparCas", "Quest", "EQUIP_H2O", "Once", "Read",
        "Braces", "Rest",
    ]  # fmt: skip
    assert module.policies[0].parent is not None


@pytest.mark.parametrize(("statement", "kind"), SHAPES)
def test_shapes(statement: str, kind: type) -> None:
    text = f"kv 1\npolicy P {{ override {statement} }}"
    sink = Sink()
    (found,) = parse_module(SourceFile("one.kv", text), sink).policies[0].statements
    assert isinstance(found, kind)
    assert found.override
    assert found.span.text == statement


def test_spans_cover_what_they_name() -> None:
    (policy,) = parse_module(SourceFile("x.kv", "kv 1\npolicy P {\n  score mean(attn * (2)) + 1  # c\n}"), Sink()).policies
    (score,) = policy.statements
    assert isinstance(score, Setting)
    assert score.value is not None
    assert score.value.span.text == "mean(attn * (2)) + 1"
    assert policy.span.text.startswith("policy P {")
    assert policy.span.text.endswith("}")


def test_keywords_are_those_of_the_grammar() -> None:
    import re

    from kvdsl.syntax.parser import _grammar

    rules = re.sub(r"//.*", "", read_resource("grammar", "kv.lark"))
    assert set(_grammar()[1].keywords) == {word for word in re.findall(r'"(\w+)"', rules)}


def test_parsing_needs_no_stack() -> None:
    sink = Sink()
    assert parse(SourceFile("x.kv", "kv 1\npolicy P {\nscore " + "(" * 15_000 + "age" + ")" * 15_000 + "\n}"), sink).tree
    assert not sink.failed()
