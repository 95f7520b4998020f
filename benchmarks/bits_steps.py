#!/usr/bin/env python
"""How long a decode step takes in every `kv_dtype`. The types take turns in one process, on caches with equally many slots.

benchmarks/bits_steps.py --threads 1 --json > results/kv_dtype/steps_1_thread.json
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import Any

import click
import torch

from kvdsl.environment import environment
from kvdsl.memory import KV_DTYPES
from kvdsl_lab.bench import baselines, decode, measure

TYPES = (*KV_DTYPES, "int8/int4")
SHAPES = [
    decode.Shape(batch=8, kv_heads=heads, group=4, head_dim=dims, live=8192, dtype=dtype)
    for heads, dims, dtype in ((8, 128, "bf16"), (2, 64, "bf16"), (8, 128, "fp32"))
]


@click.command(help=__doc__)
@click.option("--policy", default="h2o", show_default=True)
@click.option("--threads", default=1, show_default=True)
@click.option("--rounds", default=21, show_default=True)
@click.option("--starts", default=2, show_default=True, help="Repeats with new caches, elsewhere in memory.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def main(policy: str, threads: int, rounds: int, starts: int, as_json: bool) -> None:
    torch.set_num_threads(threads)
    rows = []
    for shape in [shape for shape in SHAPES for _ in range(starts)]:
        for row in measured(policy, shape, rounds):
            rows.append(asdict(shape) | row)
            speed = f"{row['ms']:.1f} ms, {row['faster']:.2f}x faster, {row['roofline']:.2f} of a read"
            click.echo(f"{shape.kv_heads} x {shape.head_dim}, {shape.dtype}, {row['kv_dtype']}: {speed}", err=as_json)
    if as_json:
        head = {"environment": environment(), "policy": policy, "threads": threads, "rounds": rounds}
        click.echo(json.dumps(head | {"rows": rows}, indent=1))


def measured(policy: str, shape: decode.Shape, rounds: int) -> list[dict[str, Any]]:
    """Return milliseconds of a step, how much faster it is than in the model's dtype, and its share of a plain read's rate.

    Each is a median with quartiles; ratios are of times in one round.
    """
    spec, tokens = decode.load(policy).spec, decode.new_tokens(shape)
    timed = {}
    for kv_dtype in TYPES:
        state = decode.steady_state(spec.with_memory((spec.block, spec.rope_cached, kv_dtype)), shape)
        backend = decode.choose(state.spec, "cpu", torch.device("cpu"), shape.torch_dtype)
        held = baselines.Cache(state.layout.keys(state.slots), state.layout.values(state.slots), shape.group)
        timed[kv_dtype] = measure.calibrated(baselines.repeated(decode.decode_step(backend, state), tokens))
        timed[f"read {kv_dtype}"] = measure.calibrated(partial(baselines.streaming_read, held))
    times = measure.interleaved(timed, rounds, warmup=2)
    return [
        {
            "kv_dtype": name,
            **measure.summary("ms", times[name]),
            **measure.summary("faster", measure.ratios(times["model"], times[name])),
            **measure.summary("roofline", measure.ratios(times[f"read {name}"], times[name])),
        }
        for name in TYPES
    ]


if __name__ == "__main__":
    main()
