#!/usr/bin/env python
"""Ways to round keys and values to 4 bits, beside what `kvdsl.interp.rounding` does. A model reads stretches of the book that ships with
kvdsl-lab, each at once, and attends to rounded keys and values, but in layers whose keys have a large bias. `kl` is the divergence from
the exact ones' distribution, in nats.

benchmarks/int4_ways.py smollm2 > results/kv_dtype/int4_ways_smollm2.json
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

from kvdsl.environment import environment
from kvdsl.generation.models import load_model, windows
from kvdsl.generation.text import read_text
from kvdsl.memory import GROUP
from kvdsl.runtime.biases import bias_norm, bound
from kvdsl.runtime.state.packed import pack, turned, unpack

TOKENS, STRETCHES = 512, 7
"""The first stretch is left out: a book's title page, where a rounding error of bfloat16 alone moves the distribution."""

Rounding = Callable[[Tensor], Tensor]


class Way(NamedTuple):
    """How keys and values are rounded, and how many of the newest tokens are not; `bits` a number, scales included."""

    key: Rounding
    value: Rounding
    bits: float
    newest: int = 0


def stored(x: Tensor, kv_dtype: str) -> Tensor:
    """What a cache gives back."""
    return unpack(pack(x, kv_dtype), kv_dtype)


def scaled(x: Tensor, *, group: int = GROUP, shares: Sequence[float] = (1.0,)) -> Tensor:
    """`int4` with groups of any size; of scales that are shares of the usual one, that with the least squared error."""
    y = _groups(x, group)
    low, high = y.aminmax(dim=-1, keepdim=True)
    size, sign = torch.maximum(-low, high), torch.where(-low >= high, 1.0, -1.0)
    scales = [(size * share / 8).bfloat16().float().clamp(min=2.0**-126) * sign for share in shares]
    return _best(x, y, [(y / scale).round().clamp(-8, 7) * scale for scale in scales])


def stepped(x: Tensor) -> Tensor:
    """Sixteen steps from each group's smallest number to its largest; two numbers a group."""
    y = _groups(x, GROUP)
    low, high = (bound.bfloat16().float() for bound in y.aminmax(dim=-1, keepdim=True))
    step = ((high - low) / 15).bfloat16().float().clamp(min=2.0**-126)
    return _best(x, y, [((y - low) / step).round().clamp(0, 15) * step + low])


def _groups(x: Tensor, size: int) -> Tensor:
    """Rotated vectors, [..., groups, size]."""
    return (turned(x) / math.sqrt(x.shape[-1] & -x.shape[-1])).unflatten(-1, (-1, size))


def _best(x: Tensor, y: Tensor, found: Sequence[Tensor]) -> Tensor:
    """The nearest of several roundings of each group, rotated back."""
    best = torch.stack([(one - y).square().sum(-1) for one in found]).argmin(0)[None, ..., None]
    chosen = torch.stack(list(found)).take_along_dim(best, 0)[0]
    return turned(chosen.reshape(x.shape)) / math.sqrt(x.shape[-1] & -x.shape[-1])


int8, int4 = partial(stored, kv_dtype="int8"), partial(stored, kv_dtype="int4")
tried = partial(scaled, shares=(1.0, 0.95, 0.9, 0.85, 0.8))
halves = partial(scaled, group=16)
WAYS = {
    "exact": Way(lambda x: x, lambda x: x, 32),
    "int8": Way(int8, int8, 8.25),
    "int4": Way(int4, int4, 4.5),
    "int4, the scale of five with the least squared error": Way(tried, tried, 4.5),
    "int4, a scale for 16 dims": Way(halves, halves, 5),
    "int4, a smallest number and a step": Way(stepped, stepped, 5),
    "keys int8, values int4": Way(int8, int4, 6.375),
    "keys int4, values int8": Way(int4, int8, 6.375),
    "int4, the newest token exact": Way(int4, int4, 4.5, 1),
    "int4, the newest 4 exact": Way(int4, int4, 4.5, 4),
    "int4, the newest 16 exact": Way(int4, int4, 4.5, 16),
}


def attend(way: Way, errors: list[tuple[float, float]]) -> Callable[..., Any]:
    """The eager attention of a model, with keys and values rounded; notes their relative squared errors."""

    def run(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        rounds = (bias_norm(module, key.shape[-1]) or 0) <= bound(key.shape[-1])
        pairs = ((key, way.key(key)), (value, way.value(value))) if rounds else ((key, key), (value, value))
        errors.append(tuple(float((y - x).square().mean() / x.square().mean()) for x, y in pairs))
        group, places = query.shape[1] // key.shape[1], torch.arange(key.shape[2])
        age = places[:, None] - places
        new = age < way.newest
        (keys, near_keys), (values, near_values) = (
            (y.repeat_interleave(group, 1), x.repeat_interleave(group, 1)) for x, y in pairs
        )
        scores = torch.where(new, query @ near_keys.mT, query @ keys.mT) * scaling
        weights = scores.masked_fill(age < 0, -math.inf).softmax(-1)
        return ((weights * ~new) @ values + (weights * new) @ near_values).transpose(1, 2).contiguous(), None

    return run


@click.command(help=__doc__)
@click.argument("name")
@torch.inference_mode()
def main(name: str) -> None:
    torch.set_num_threads(1)
    model, tokenizer = load_model(name, "fp32")
    model.set_attn_implementation("eager")
    attention: Any = sys.modules[type(model.model.layers[0].self_attn).__module__]
    texts = windows(tokenizer, read_text(None), TOKENS, STRETCHES, apart=True)[1:]
    exact: list[Tensor] = []
    rows = []
    for called, way in WAYS.items():
        errors: list[tuple[float, float]] = []
        attention.eager_attention_forward = attend(way, errors)
        losses, apart = [], []
        for number, text in enumerate(texts):
            found = model(text[None, :-1], use_cache=False).logits[0].float().log_softmax(-1)
            if called == "exact":
                exact.append(found)
            losses.append(float(-found.gather(-1, text[1:, None]).mean()))
            apart.append(float((exact[number].exp() * (exact[number] - found)).sum(-1).mean()))
        key, value = (math.sqrt(sum(squares) / len(squares)) for squares in zip(*errors, strict=True))
        rows.append({
            "way": called, "bits": way.bits, "newest": way.newest, "key_error": round(key, 4), "value_error": round(value, 4),
            "ppl": round(math.exp(sum(losses) / len(losses)), 4), "losses": [round(loss, 6) for loss in losses],
            "kl": round(sum(apart) / len(apart), 6), "kl_by_stretch": [round(kl, 6) for kl in apart],
        })  # fmt: skip
    head = {"environment": environment(dtype="float32") | {"threads": 1}, "model": name, "tokens": TOKENS}
    print(json.dumps(head | {"rows": rows}, indent=1))


if __name__ == "__main__":
    main()
