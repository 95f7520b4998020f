#!/usr/bin/env python
"""What rounding keys and values alone costs: perplexity, and how far the distributions of a policy move from those without rounding.

All caches read the same text side by side, `--chunk` tokens at a time, and are compared token by token. `kl` is the divergence, in
nats, of the model's distribution under a policy in a `kv_dtype` from that under the same policy in the model's dtype.

benchmarks/bits.py --model smollm2 --out results/kv_dtype/kl_smollm2.json
benchmarks/bits.py --model qwen2.5-coder-0.5b --dtype fp32 --tokens 257 --stretches 3 --chunk 64 --out results/kv_dtype/kl_qwen.json

With `--largest-bias inf` layers are rounded whatever the bias of their keys:

benchmarks/bits.py --model qwen2.5-coder-0.5b --dtype fp32 --tokens 257 --stretches 2 --chunk 64 --policies full --largest-bias inf \\
  --out results/kv_dtype/kl_qwen_all.json
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from kvdsl.cli.progress import progress
from kvdsl.environment import environment
from kvdsl.generation.models import load_model, windows
from kvdsl.generation.text import read_text
from kvdsl.loading import load
from kvdsl.runtime import biases
from kvdsl.runtime.hf.versions import with_cache

KV_DTYPES = ("model", "int8", "int8/int4", "int4")


@click.command(help=__doc__)
@click.option("--model", required=True, help="A name of `kvdsl models`, or a folder.")
@click.option("--dtype", help="Of the model: fp32 or bf16.")
@click.option("--policies", default="full,h2o,roco", show_default=True)
@click.option("--budget", default=64, show_default=True, help="Tokens, of all policies but `full`.")
@click.option("--tokens", default=512, show_default=True, help="Length of a stretch of the book that ships with kvdsl-lab.")
@click.option("--stretches", default=6, show_default=True)
@click.option("--chunk", default=32, show_default=True, help="Tokens that are read at a time.")
@click.option(
    "--largest-bias",
    type=float,
    default=biases.LARGE,
    show_default=True,
    help="In keys that are rounded: a norm / √head_dim.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(
    model: str,
    dtype: str | None,
    policies: str,
    budget: int,
    tokens: int,
    stretches: int,
    chunk: int,
    largest_bias: float,
    out: Path,
) -> None:
    biases.LARGE = largest_bias
    torch.set_num_threads(1)
    lm, tokenizer = load_model(model, dtype)
    ids = windows(tokenizer, read_text(None), tokens, stretches, apart=True)
    names = policies.split(",")
    caches = {(name, kv_dtype): _cache(lm, name, budget, kv_dtype) for name in names for kv_dtype in KV_DTYPES}
    losses: dict[tuple[str, str], list[Tensor]] = {pair: [] for pair in caches}
    apart: dict[tuple[str, str], list[Tensor]] = {pair: [] for pair in caches}
    with torch.inference_mode(), progress("rounding", -(-(tokens - 1) // chunk)) as tick:
        for start in range(0, tokens - 1, chunk):
            part = ids[:, start : min(start + chunk, tokens - 1)]
            target = ids[:, start + 1 : start + 1 + part.shape[1], None]
            plain: dict[str, Tensor] = {}
            for (name, kv_dtype), cache in caches.items():
                found = lm(part, **with_cache(cache), use_cache=True).logits.float().log_softmax(-1)
                exact = plain.setdefault(name, found)  # the first is in the model's dtype
                losses[name, kv_dtype].append(-found.gather(-1, target)[..., 0])
                apart[name, kv_dtype].append((exact.exp() * (exact - found)).sum(-1))
            tick()
    rows = []
    for pair in caches:
        by_stretch, kl = torch.cat(losses[pair], 1).double().mean(1), torch.cat(apart[pair], 1).double()
        rows.append({
            "policy": pair[0], "budget": None if pair[0] == "full" else budget, "kv_dtype": pair[1],
            "ppl": round(math.exp(by_stretch.mean()), 4), "losses": [round(float(x), 6) for x in by_stretch],
            "kl": round(float(kl.mean()), 6), "kl_by_stretch": [round(float(x), 6) for x in kl.mean(1)],
        })  # fmt: skip
        click.echo(json.dumps(rows[-1]))
    head = {"environment": environment(dtype=str(lm.dtype).removeprefix("torch.")) | {"threads": 1}, "model": model,
            "tokens": tokens, "stretches": stretches, "chunk": chunk,
            "largest_bias": largest_bias if math.isfinite(largest_bias) else None}  # fmt: skip
    out.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


def _cache(model: Any, name: str, budget: int, kv_dtype: str) -> Any:
    made: Any = load(name, kv_dtype=kv_dtype)
    return made(model) if name == "full" else made(model, budget=budget)


if __name__ == "__main__":
    main()
