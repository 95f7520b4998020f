"""What the host spends on a token: whole models of a known depth and heads, so narrow that their matrices take no time.

What is left is Python and torch's dispatch, once a layer, and a kernel over few tokens. CPU time of one thread is counted, which other
processes disturb less than the clock; what is compared takes turns, token by token, and differences are taken within a turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvdsl.generation.models import DTYPES, quiet
from kvdsl_lab.bench import measure
from kvdsl_lab.bench.contenders import Contender
from kvdsl_lab.bench.generate import Row
from kvdsl_lab.bench.shapes import SHAPES, parse_shape
from kvdsl_lab.bench.texts import Text

WARMUP = 10
"""Tokens that are not recorded."""

_VOCABULARY = 64


def narrow_model(shape: str, dtype: str, seed: int = 0) -> Any:
    """A model with the layers and heads of `NAME[:LAYERS]`, and with no width to speak of."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, layers = parse_shape(shape)
    config = dict(SHAPES[name])
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    config |= {"num_hidden_layers": layers, "head_dim": hidden // heads, "intermediate_size": 8, "vocab_size": _VOCABULARY}
    if config["model_type"] != "gpt_neox":  # its heads are as wide as the hidden size says
        config["hidden_size"] = 8 * heads
    torch.manual_seed(seed)
    with quiet():
        made = AutoConfig.for_model(config.pop("model_type"), **config)
        return AutoModelForCausalLM.from_config(made, dtype=DTYPES[dtype]).eval()


def bench_host(
    model: Any,
    wanted: Sequence[Contender],
    *,
    prompt_tokens: int = 128,
    new_tokens: int = 100,
    seed: int = 0,
    clock: Callable[[], int] = time.thread_time_ns,
    tick: Callable[[], None] = lambda: None,
) -> list[Row]:
    """One row for each contender: `policy, budget, us` a layer and token, and `beyond_us`, by how much that is above the first's.

    Runs on one thread, whatever torch's setting.

    Args:
        clock: the thread's CPU time in nanoseconds.
        tick: called `WARMUP + new_tokens` times, for a progress bar.
    """
    threads, layers = torch.get_num_threads(), model.config.num_hidden_layers
    ids = torch.randint(_VOCABULARY, (1, prompt_tokens), generator=torch.Generator().manual_seed(seed))
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            turns = list(_turns(model, ids, wanted, WARMUP + new_tokens, clock, tick))[WARMUP:]
    finally:
        torch.set_num_threads(threads)
    rows = []
    for place, one in enumerate(wanted):
        spent = [turn[place] / layers / 1e3 for turn in turns]
        beyond = [(turn[place] - turn[0]) / layers / 1e3 for turn in turns]
        rows.append({"policy": one.policy, "budget": one.budget, **measure.summary("us", spent, 1),
                     **measure.summary("beyond_us", beyond, 1)})  # fmt: skip
    return rows


def _turns(
    model: Any, ids: Tensor, wanted: Sequence[Contender], count: int, clock: Callable[[], int], tick: Callable[[], None]
) -> Iterator[list[int]]:
    """Of every turn the nanoseconds of each contender's token."""
    texts: list[Text] = [one.begin(model) for one in wanted]
    for text in texts:
        text.read(ids)
    for index in range(count):
        spent = [0] * len(texts)
        for place in range(len(texts)):
            chosen = (place + index) % len(texts)
            begun = clock()
            texts[chosen].go_on()
            spent[chosen] = clock() - begun
        tick()
        yield spent
