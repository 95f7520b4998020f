"""One process of a tensor-parallel run: generates under every policy and writes what it kept. See test_tensor_parallel."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.hf import policies, zoo

LEARNED = "kvzap_once"
NAMES = (*policies.EVICTING, LEARNED)


def importance(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Of all four KV heads, wherever they are."""
    return torch.stack([(factor * hidden).sin().sum(-1) for factor in (1, 2, 3, 4)], 1)


def results(model: Any) -> dict[str, Any]:
    """Per policy: the tokens, and the kept positions per layer, row and local KV head."""
    found = {}
    rows = zoo.prompt(2, 30, seed=4)
    inputs = zoo.left_padded([rows[0], rows[1, :17]])
    for name in NAMES:
        more = {"importance": importance} if name == LEARNED else {}
        cache = policies.make(name, model, budget=12, seed=11, **more)
        tokens, _ = zoo.greedy(model, inputs, 16, cache=cache)
        kept = [cache.positions(layer).sort(-1).values.tolist() for layer in cache.managed]
        found[name] = {"tokens": tokens.tolist(), "kept": kept}
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    rank = torch.distributed.get_rank()

    (folder / f"rank{rank}.json").write_text(json.dumps(results(model)))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
