"""Runs a policy's C++ at shapes that are drawn at random; what it was built with looks on.

`python -m scripts.torture._sanitized roco --seed 1 --shapes 48`: a file, a shipped policy, or one of `_policies`.
"""

from __future__ import annotations

import argparse
import ctypes
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import kvdsl
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.cpu.backend import STAGES, CpuBackend, _library
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.layers import slot_state
from scripts.torture._policies import POLICIES

SMALL = {"budget": 40.0, "tokens": 20.0, "dims": 4.0, "block": 7.0, "R": 5.0, "sigma": 3.0, "delta": 2.0}
LARGE = SMALL | {"budget": 600.0, "tokens": 300.0}
"""More slots than a chunk has, so that threads share heads."""

ROPES = (("half", 8, 0, 16), ("half", 3, 2, 9), ("interleaved", 5, 1, 17), ("interleaved", 20, 0, 40), None)
"""Pairing, pairs, the first rotated dim and the head's size; None: a model that does not rotate."""

SELECTING = {"layer": 2, "layers": 12}
"""A layer in which policies with `select … in layers 2..` do select."""


@dataclass(frozen=True)
class Shape:
    """One run's numbers, of which every set is drawn as likely as any other."""

    threads: int
    batch: int
    heads: int
    group: int
    large: bool
    window: int | None
    softcap: float | None
    sinks: bool
    dtype: torch.dtype
    dims: tuple[int, int]
    rope: tuple[Any, ...] | None

    @staticmethod
    def drawn(draw: random.Random) -> Shape:
        """Sizes of keys and values that are no multiple of a vector's among them."""
        return Shape(
            threads=draw.choice((1, 2, 3, 5)), batch=draw.choice((1, 2, 3)), heads=draw.choice((1, 2, 3)),
            group=draw.choice((1, 3)), large=draw.random() < 0.4, window=draw.choice((None, None, 9)),
            softcap=draw.choice((None, None, 20.0)), sinks=draw.random() < 0.3,
            dtype=draw.choice((torch.float32, torch.bfloat16, torch.float16)),
            dims=draw.choice(((16, 16), (7, 5), (33, 80), (128, 64))), rope=draw.choice(ROPES),
        )  # fmt: skip


class Run:
    """A policy's state of one layer, and the calls that come to it."""

    def __init__(self, spec: PolicySpec, shape: Shape, seed: int) -> None:
        self.spec, self.shape = spec, shape
        given = LARGE if shape.large else SMALL
        self.state = slot_state(spec, {name: value for name, value in given.items() if name in spec.params}, **SELECTING)
        self.backend = choose(spec, "cpu", torch.device("cpu"), shape.dtype)
        assert isinstance(self.backend, CpuBackend)
        self.backend.seconds = torch.zeros(len(STAGES), dtype=torch.float64)
        self.make = torch.Generator().manual_seed(seed)
        self.key_dim, self.value_dim, self.rope = *shape.dims, None
        if spec.compact and shape.rope is not None:
            pairing, pairs, offset, self.key_dim = shape.rope
            self.rope = Rope(100.0 ** -(torch.arange(pairs, dtype=torch.float64) / pairs), pairing, offset)

    def call(self, tokens: int, real: Tensor | None = None) -> AttentionCall:
        """So many new tokens of every row."""
        shape, queries = self.shape, self.shape.heads * self.shape.group
        query, key, value = (
            torch.randn(shape.batch, heads, tokens, dim, generator=self.make).to(shape.dtype)
            for heads, dim in ((queries, self.key_dim), (shape.heads, self.key_dim), (shape.heads, self.value_dim))
        )
        sinks = torch.randn(queries, generator=self.make) if shape.sinks else None
        return AttentionCall(query, key, value, real, 0.25, shape.softcap, shape.window, sinks, self.rope)

    def go(self) -> None:
        """A padded prompt in two forwards, tokens one by one and several at once, some replaced, given attention, another prompt."""
        batch, first = self.shape.batch, 700 if self.shape.large else 53
        self.backend.prefill(self.state, self.call(first, torch.arange(first) >= 5 * torch.arange(batch)[:, None]))
        self.backend.prefill(self.state, self.call(19))
        self.decode()
        if "page" not in self.spec.numbers:
            self.replace(3)
            self.decode()
        if self.shape.dtype == torch.float32:
            self.settle()
            self.decode()
        self.backend.prefill(self.state, self.call(11))
        self.decode()

    def decode(self) -> None:
        """Tokens; of the last, one row has padding."""
        for tokens in (1, 1, 3, 1):
            self.backend.decode(self.state, self.call(tokens))
        self.backend.decode(self.state, self.call(1, torch.arange(self.shape.batch)[:, None] != 1))

    def replace(self, tokens: int) -> None:
        """Any tokens leave and others take their slots; for a row's padding nobody leaves."""
        live = self.state.position >= 0
        slots = torch.rand(live.shape, generator=self.make).masked_fill(~live, -1.0).topk(tokens).indices
        self.backend.replace(self.state, slots, self.call(tokens))
        real = torch.rand(self.shape.batch, tokens, generator=self.make) < 0.6
        self.backend.replace(self.state, slots, self.call(tokens, real))

    def settle(self) -> None:
        """Settle with given attention, and without any, where C++ finds who leaves."""
        library, position = _library(self.spec.cpu_source, self.spec.stem), self.state.position
        if not hasattr(library, "kvdsl_settle"):
            return
        attn = torch.rand(position.shape, generator=self.make).masked_fill(position < 0, 0)
        kernel, step = library.kvdsl_settle, CpuBackend.step(self.state, self.call(1))
        for given in (attn, None):
            assert step.run(kernel, self.call(1), None, ctypes.c_void_p(None if given is None else given.data_ptr())) == 0


def spec_of(policy: str) -> PolicySpec:
    """Of a policy here, a shipped one or a file."""
    found = kvdsl.compile(POLICIES[policy]) if policy in POLICIES else kvdsl.load(Path(policy) if "/" in policy else policy)
    return found.spec


def main() -> None:
    """Every policy at so many shapes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("policies", nargs="+")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shapes", type=int, default=48)
    told = parser.parse_args()
    torch.set_num_threads(1)  # nobody looks at torch's own threads; kernels are told of others
    for policy in told.policies:
        spec, draw = spec_of(policy), random.Random(f"{told.seed} {policy}")  # other shapes for each
        for number in range(told.shapes):
            shape = Shape.drawn(draw)
            print(f"{policy}, run {number}: {shape}", flush=True)
            torch.get_num_threads = lambda threads=shape.threads: threads
            Run(spec, shape, number).go()
        print(f"{policy}: {told.shapes} runs", flush=True)


if __name__ == "__main__":
    main()
