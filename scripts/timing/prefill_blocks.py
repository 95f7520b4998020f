#!/usr/bin/env python
"""Prompts that stream through a budget, on the reference model: `book` and `table`.

scripts/timing/prefill_blocks.py book --tokens 100000 --out results/cpu/prefill_book.json --plot docs/assets/prefill_book.svg
scripts/timing/prefill_blocks.py table --out results/cpu/prefill_blocks.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click
import psutil
import torch
from rich.progress import track

import kvdsl
from kvdsl.environment import environment
from kvdsl.generation.models import encode, first_token, load_model
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.assets import book_index, book_text
from kvdsl_lab.eval.perplexity import token_losses

POLICY = Path(__file__).resolve().parents[2] / "benchmarks" / "policies" / "roco_blocks.kv"


def shipped_text(tokenizer: Any, count: int) -> torch.Tensor:
    """The shipped books, the longest first, one after the other: int64 [1, count] with a BOS."""
    ids = [encode(tokenizer, book_text(name)) for name in book_index()]
    whole = first_token(tokenizer) + [token for book in sorted(ids, key=len, reverse=True) for token in book]
    if len(whole) < count:
        raise click.BadParameter(f"the shipped books have {len(whole)} tokens", param_hint="--tokens")
    return torch.tensor([whole[:count]])


def written(out: Path | None, content: dict[str, Any]) -> None:
    text = json.dumps({"environment": environment(dtype="fp32", seed=None), **content}, indent=1)
    if out is None:
        print(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")


@click.group()
def main() -> None:
    """Prompts that stream through a budget."""


@main.command()
@click.option("--tokens", default=100_000, show_default=True, help="How much of the books.")
@click.option("--budget", default=512, show_default=True)
@click.option("--block", default=64, show_default=True, help="Tokens between two evictions.")
@click.option("--forward", "size", default=1024, show_default=True, help="Tokens that the model is given at once.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON; standard output if not given.")
@click.option("--plot", type=click.Path(path_type=Path), help="A picture of memory over the text.")
def book(tokens: int, budget: int, block: int, size: int, out: Path | None, plot: Path | None) -> None:
    """A book that is longer than the budget by far: what the cache, and the whole process, hold after every forward."""
    model, tokenizer = load_model(None)
    ids = shipped_text(tokenizer, tokens)
    cache = kvdsl.load(POLICY)(model, budget=budget, block=block)
    process, rows = psutil.Process(), []
    begun = time.perf_counter()
    with torch.inference_mode():
        for start in track(range(0, tokens, size), "reading", disable=not sys.stderr.isatty()):
            model(input_ids=ids[:, start : start + size], **with_cache(cache), use_cache=True, logits_to_keep=1)
            live = max(int((cache.positions(layer) >= 0).sum(-1).max()) for layer in cache.managed)
            rows.append(
                {
                    "tokens": min(start + size, tokens),
                    "live": live,
                    "cache_bytes": cache.bytes(),
                    "resident_bytes": process.memory_info().rss,
                    "seconds": round(time.perf_counter() - begun, 2),
                }
            )
    per_token = full_bytes_per_token(model)
    written(
        out,
        {
            "policy": "roco_blocks", "tokens": tokens, "budget": budget, "block": block, "forward": size,
            "full_cache_bytes": per_token * tokens, "rows": rows,
        },
    )  # fmt: skip
    if plot is not None:
        draw(rows, per_token, plot)


def full_bytes_per_token(model: Any) -> int:
    """What a cache that evicts nothing holds of a token, in float32."""
    config = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * 4 * config.num_hidden_layers * config.num_key_value_heads * dim)


def draw(rows: list[dict[str, Any]], per_token: int, plot: Path) -> None:
    """The cache of slots, the process, and what a full cache would hold."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    read = [row["tokens"] / 1000 for row in rows]
    first = rows[0]["resident_bytes"]
    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(read, [per_token * row["tokens"] / 1e6 for row in rows], "--", color="gray", label="a full cache would hold")
    axes.plot(read, [(row["resident_bytes"] - first) / 1e6 for row in rows], label="the process, since the first forward")
    axes.plot(read, [row["cache_bytes"] / 1e6 for row in rows], label=f"the cache of {rows[-1]['live']} tokens a head")
    axes.set_xlabel("thousand tokens read")
    axes.set_ylabel("MB")
    axes.legend(frameon=False)
    figure.tight_layout()
    plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(plot)


@main.command()
@click.option("--tokens", default=2048, show_default=True, help="Of the text.")
@click.option("--budget", default=128, show_default=True)
@click.option("--blocks", default="1,2,4,8,16", show_default=True)
@click.option("--rounds", default=3, show_default=True, help="Of timing; the quickest counts.")
@click.option("--out", type=click.Path(path_type=Path), help="JSON; standard output if not given.")
def table(tokens: int, budget: int, blocks: str, rounds: int, out: Path | None) -> None:
    """RoCo's Table 6 on the reference model: larger blocks are faster, and cost how much quality?

    Perplexity is that of every token of the text, read block by block; the speed-up is over blocks of one token.
    """
    model, tokenizer = load_model(None)
    ids, rows = shipped_text(tokenizer, tokens), []
    sizes = [int(size) for size in blocks.split(",")]
    for size in track(sizes, "blocks", disable=not sys.stderr.isatty()):
        taken, losses = [], torch.empty(0)
        for _ in range(rounds):
            cache = kvdsl.load(POLICY)(model, budget=budget, block=size)
            begun = time.perf_counter()
            losses = token_losses(model, ids, cache, tokens)
            taken.append(time.perf_counter() - begun)
        rows.append({"block": size, "ppl": round(float(losses.double().mean().exp()), 4), "seconds": round(min(taken), 3)})
    for row in rows:
        row["speedup"] = round(rows[0]["seconds"] / row["seconds"], 2)
    written(out, {"policy": "roco_blocks", "tokens": tokens, "budget": budget, "rounds": rounds, "rows": rows})


if __name__ == "__main__":
    main()
