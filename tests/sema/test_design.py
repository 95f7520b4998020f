"""The policies of the founding design, as they stand there: each checks without errors, and is printed and read again the same."""

from pathlib import Path

import pytest

from kvdsl.compiler import analyse
from kvdsl.ir.printer import print_expression, print_keep, print_policy, print_select, print_sketch
from kvdsl.passes.fold import fold
from kvdsl.source import SourceFile

POLICIES = """
policy Full {}
policy Random  { param budget = 512; score random(); keep last 0 }
policy Window  { param budget = 512; score position }
policy StreamingLLM {                         # sinks + recent, positions counted inside the cache
  param sinks  = 4
  param budget = 512
  score position
  keep  first sinks
  positions compact
}
policy LazyStreaming extends StreamingLLM {   # Lazy Pruning, Slack, Max_Drop
  param R = 32
  param sigma = 24
  param delta = 8
  trigger  overflow >= R                      # 0 never prunes
  slack    sigma
  max_drop delta
}
policy H2O {
  param budget = 512
  param recent = budget / 2
  score sum(attn)
  keep  last recent
}
policy ScissorHands extends H2O { override score sum(attn > mean(attn over slots)) }
policy ScissorHandsWindow {                   # as VATP runs it
  param budget  = 512
  param history = 400
  score sum(attn over last history queries)
  keep  last 10
}
policy TOVA { param budget = 512; score last(attn); keep last 0 }
policy RoCo {
  param budget  = 512
  param protect = budget / 2
  score mean(attn)
  keep  top protect by std(attn)              # evict only where attention has settled
}
policy VATP_H2O extends H2O {
  param sinks = 20
  override score sum(attn) * norm1(v)
  keep first sinks
}
policy SnapKV {
  param budget = 1024
  when  prefill
  score max_pool(sum(attn over last 32 queries), 7)
  keep  last 32
}
policy PyramidKV extends SnapKV { override budget pyramid(budget, beta = 20) }       # per-layer budgets
policy AdaKV extends SnapKV     { override budget budget across heads floor 0.2 }    # a layer's heads share one budget
policy SparCas {                              # keeps everything, attends to little
  param tokens = 2048
  param dims   = 16
  sketch top dims dims by abs(q) every 64 queries
  select top tokens by dot(q, k over sketch) in layers 2..
}
policy Quest {
  param tokens = 2048
  pages  16
  keep   last 16                              # protected slots are always selected, and count
  select top tokens by sum(max(q * min(k over page), q * max(k over page)) over dims) in layers 2..
}
policy EQUIP_H2O extends H2O {
  positions compact
  rope      cached
}
policy RoCoEasyKV extends RoCo {
  override budget prompt + 250
  keep where position < prompt
}
"""

TEXTS = {text.split()[0]: "policy " + text.rstrip() + "\n" for text in POLICIES.split("\npolicy ")[1:]}
WARNINGS = {"ScissorHandsWindow": ["KV0422"]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file for each of them, with a docstring each, importing the one that it extends."""
    for name, text in TEXTS.items():
        parent = text.split(" extends ")[1].split()[0] if " extends " in text else None
        head, rest = text.split("{", 1)
        imports = "" if parent is None else f'import "{parent}.kv"\n'
        (tmp_path / f"{name}.kv").write_text(f'kv 1\n{imports}{head}{{ "From the design."; {rest}')
    return tmp_path


@pytest.mark.parametrize("name", TEXTS)
def test_checks_as_it_stands(folder: Path, name: str) -> None:
    analysis = analyse(folder / f"{name}.kv")
    assert analysis.policy.name == name
    assert [found.code for found in analysis.diagnostics] == WARNINGS.get(name, [])


@pytest.mark.parametrize("name", TEXTS)
def test_is_printed_and_read_again_the_same(folder: Path, name: str) -> None:
    policy = analyse(folder / f"{name}.kv").policy
    for same in (policy, fold(policy)):
        again = analyse(SourceFile(f"{name}.kv", print_policy(same)))
        assert again.policy == same


def test_says_what_it_means(folder: Path) -> None:
    ir = {name: analyse(folder / f"{name}.kv").policy for name in TEXTS}
    lazy = ir["LazyStreaming"]
    assert [print_expression(value) for value in (lazy.trigger, lazy.slack, lazy.max_drop)] == ["R", "sigma", "delta"]
    assert lazy.positions == "compact"
    score = ir["SnapKV"].score
    assert score is not None
    assert print_expression(score) == "max_pool(sum(attn over last 32 queries), 7)"
    assert ir["SnapKV"].when == ir["PyramidKV"].when == ir["AdaKV"].when == "prefill"
    assert ir["AdaKV"].across is not None
    assert print_expression(ir["AdaKV"].across) == "0.2"
    sparcas, quest = ir["SparCas"], ir["Quest"]
    assert sparcas.sketch is not None
    assert sparcas.select is not None
    assert print_sketch(sparcas.sketch) == "sketch top dims dims by abs(q) every 64 queries"
    assert print_select(sparcas.select) == "select top tokens by sum(q * k over sketch) in layers 2.."
    assert [print_keep(keep) for keep in sparcas.keeps] == ["keep last 1"]
    assert quest.pages is not None
    assert (print_expression(quest.pages), [print_keep(keep) for keep in quest.keeps]) == ("16", ["keep last 16"])
    assert (ir["EQUIP_H2O"].rope, ir["EQUIP_H2O"].positions) == ("cached", "compact")
    assert [print_keep(keep) for keep in ir["RoCoEasyKV"].keeps][1:] == ["keep where position < prompt", "keep last 1"]
