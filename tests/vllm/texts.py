"""Texts for comparisons of two orders of summation: random tokens, drawn so that no rounding decides who stays.

Sums in float32 differ in their last places from processor to processor and from engine to engine. In a few random texts two tokens are
alike important to seven digits, or a log-probability hangs on such digits: there two right engines disagree. Which texts these are is seen
in transformers alone, where noise in the last places of the embeddings moves what is said or kept.

python -m tests.vllm.texts    finds the seeds anew, which takes ten minutes
"""

from __future__ import annotations

import copy
import sys
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import torch

import kvdsl
from kvdsl.runtime.hf.versions import with_cache
from tests.vllm.alone import NEAR, NEW, alone, params, reference

LENGTHS = (1, 9, 47, 130, 301, 700)
AT_A_TIME = (3, 60, 64, 100, 128, 250)
"""Of texts of which several are read in one pass."""

IN_ROWS = (120, 7, 190, 45)
"""Of texts that are served as on a GPU."""

SEEDS = {1: 0, 3: 0, 7: 0, 9: 0, 45: 0, 47: 0, 60: 3, 64: 1, 100: 3, 120: 0, 128: 2, 130: 0, 190: 1, 250: 0, 301: 0, 700: 1}
"""By the text's length: the first seed whose text is steady."""

POLICIES = ("h2o", "roco", "tova", "streaming_llm", "full", "quest", "sparcas", "roco_sparcas", "snapkv")
"""What the texts are read with, in the order in which they are likely to find an edge."""

NOISE, DRAWS = 2.0**-22, 3
"""Of every number of the embeddings, relative: two units in its last place, which move more than an order of summation does."""


def drawn(length: int, seed: int | None = None) -> list[int]:
    """Random tokens; no two texts share a prefix."""
    rng = np.random.default_rng([length, SEEDS[length] if seed is None else seed])
    return rng.integers(10, 4000, size=length).tolist()


def prompts() -> list[list[int]]:
    """Six texts, shorter and longer than the budget."""
    return [drawn(length) for length in LENGTHS]


@cache
def noisy(draw: int) -> Any:
    """The model with noise in its embeddings."""
    model = copy.deepcopy(reference()[0])
    embeddings = model.get_input_embeddings().weight
    with torch.no_grad():
        noise = torch.randn(embeddings.shape, generator=torch.Generator().manual_seed(draw))
        model.get_input_embeddings().weight = torch.nn.Parameter(embeddings * (1 + NOISE * noise))
    return model


def steady(tokens: list[int], policy: str) -> bool:
    """Whether noise changes nobody's place in the cache, and log-probabilities by less than half of what may differ."""
    answer = said(tokens, policy)
    expected, held = alone(policy, tokens, answer)
    for draw in range(DRAWS):
        found, kept = alone(policy, tokens, answer, noisy(draw))
        if np.abs(np.array(found) - expected).max() > NEAR / 2 or any(not torch.equal(held[at], kept[at]) for at in held):
            return False
    return True


def said(tokens: list[int], policy: str) -> list[int]:
    """What the model goes on with."""
    model = reference()[0]
    made = kvdsl.load(policy)(model, **params(policy))
    found = model.generate(
        torch.tensor([tokens]), **with_cache(made), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    return found[0, len(tokens) :].tolist()


def main() -> None:
    for length in sorted({*LENGTHS, *AT_A_TIME, *IN_ROWS}):
        for seed in count():
            edges = next((policy for policy in POLICIES if not steady(drawn(length, seed), policy)), None)
            if edges is None:
                print(f"{length}: {seed},", flush=True)
                break
            print(f"{length} tokens, seed {seed}: at an edge under {edges}", file=sys.stderr)


if __name__ == "__main__":
    main()
