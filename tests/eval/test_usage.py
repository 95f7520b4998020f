"""Rows say whether the policy did anything: a full cache's number under a policy's name would mislead."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import pytest

from kvdsl.generation.models import windows
from kvdsl_lab.bench.contenders import contenders
from kvdsl_lab.bench.generate import bench_generate
from kvdsl_lab.bench.names import NATIVE
from kvdsl_lab.cli import measuring
from kvdsl_lab.eval import perplexity
from kvdsl_lab.eval.caches import Policies
from kvdsl_lab.eval.perplexity import perplexities
from kvdsl_lab.eval.usage import KEYS
from kvdsl_lab.reproduce import tables

TEXT = "It was a dark and stormy night; the rain fell in torrents, except at occasional intervals. " * 30
NEVER = "never evicted, 39 tokens held"


@pytest.mark.parametrize(
    ("policy", "budget", "chunk", "evicted", "held", "note"),
    [
        ("full", None, 1, False, 39, None),
        ("window", 8, 1, True, 8, None),
        ("window", 64, 1, False, 39, NEVER),
        ("snapkv", 32, 1, False, 39, NEVER),  # which evicts in prompts only
        ("snapkv", 32, 39, True, 32, None),
        ("roco_easykv", None, 1, False, 39, NEVER),
        ("quest", None, 1, False, 39, "never selected, 39 tokens held"),
    ],
)
def test_perplexities(model, tokenizer, policy, budget, chunk, evicted, held, note):
    ids = windows(tokenizer, TEXT, 40, 2)
    (row,) = perplexities(model, ids, Policies([policy], {}, "torch"), [budget], chunk)
    assert {name: row[name] for name in KEYS} == {"evicted": evicted, "most_held": held, "note": note}


@pytest.mark.parametrize("together", [64, 2])
def test_time_that_is_up_cuts_every_stretch_alike(model, tokenizer, monkeypatch, together):
    """In one forward or in several: what is told is of tokens that all policies have read, and the same as without a bound."""
    monkeypatch.setattr(perplexity, "TOGETHER", together)
    ids = windows(tokenizer, TEXT, 40, 2)
    ask = partial(perplexities, model, ids, Policies(["full", "window"], {}, "torch"), [8])
    whole = ask(by=1)
    seconds = itertools.count()
    monkeypatch.setattr(perplexity, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    cut = ask(by=1, until=30)
    read = len(cut) // 2
    assert 8 < read < 39 and next(seconds) < 36
    for policy in ("full", "window"):
        was, now = ([row["ppl"] for row in rows if row["policy"] == policy] for rows in (whole, cut))
        assert now == pytest.approx(was[:read])


def test_a_selection_that_leaves_something_out_is_one(model, tokenizer, tmp_path):
    file = tmp_path / "few.kv"
    file.write_text('kv 1\n\npolicy Few {\n  "A few."\n  param tokens = 16\n  select top tokens by dot(q, k)\n}\n')
    ids = windows(tokenizer, TEXT, 40, 1)
    for tokens, note in (("16", None), ("40", "never selected, 39 tokens held")):
        (row,) = perplexities(model, ids, Policies([str(file)], {"tokens": tokens}, "torch"), [])
        assert row["evicted"] is False and row["note"] == note


def test_generation(model, tokenizer):
    ids = windows(tokenizer, TEXT, 40, 1)
    rows = bench_generate(model, ids, 3, contenders([NATIVE, "h2o"], {}, [8, 64], model, "torch"), repeats=1)
    assert [row["note"] for row in rows] == [None, None, "never evicted, 42 tokens held"]
    assert [row["evicted"] for row in rows] == [None, True, False]


ROWS = [
    {"policy": "h2o", "budget": 8, "ppl": 9.5, "evicted": True, "most_held": 8, "note": None},
    {"policy": "snapkv", "budget": 1.0, "ppl": 3.0, "evicted": False, "most_held": 39, "note": NEVER},
]


def test_tables(capsys):
    measuring.show(ROWS)
    out = capsys.readouterr().out
    assert NEVER in out and "1.0" in out and "evicted " not in out.replace(NEVER, "")
    measuring.show(ROWS[:1])
    assert "note" not in capsys.readouterr().out
    assert tables._notes(ROWS) == ["Never evicted, 39 tokens held: snapkv."]
