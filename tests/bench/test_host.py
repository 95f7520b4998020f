"""What a layer and token costs the host: who takes turns, what is counted, and the command."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from kvdsl_lab.bench.contenders import contenders
from kvdsl_lab.bench.host import WARMUP, bench_host, narrow_model
from tests.cli.harness import run


def test_a_narrow_model_has_the_layers_and_heads_of_its_shape() -> None:
    config = narrow_model("smollm2-135m:3", "bf16").config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (
        3,
        9,
        3,
        64,
    )
    assert config.hidden_size == 72 and config.dtype == torch.bfloat16


def test_nanoseconds_become_microseconds_a_layer_and_differences_are_within_a_turn() -> None:
    """The clock goes 6,000 ns a token for whoever is asked, and 3,000 more for the second: 2 layers share them."""
    model = narrow_model("tiny:2", "fp32")
    wanted = contenders(["transformers", "h2o"], {}, [16], model, "torch")
    spent = itertools.cycle([6000, 9000, 9000, 6000])  # the turns begin with another one each time
    now = 0

    def clock() -> int:
        nonlocal now, running
        now += next(spent) if running else 0
        running = not running
        return now

    running = False
    threads, ticks = torch.get_num_threads(), []
    rows = bench_host(model, wanted, prompt_tokens=20, new_tokens=4, clock=clock, tick=lambda: ticks.append(1))
    assert [(row["policy"], row["us"], row["beyond_us"]) for row in rows] == [("transformers", 3.0, 0.0), ("h2o", 4.5, 1.5)]
    assert len(ticks) == WARMUP + 4 and torch.get_num_threads() == threads


def test_command(capsys: Any) -> None:
    words = "bench host --shape tiny:2 --policies transformers,full,h2o --budgets 16 --prompt-tokens 16 --new-tokens 3"
    found = run(capsys, *words.split(), "--json", code=0).json()
    assert [row["policy"] for row in found["rows"]] == ["transformers", "full", "h2o"]
    assert found["threads"] == 1 and all(row["us"] > 0 for row in found["rows"])
    assert "beyond" in run(capsys, *words.split(), code=0).out
