"""Runs the C++ of some policies at odd sizes; what it was built with looks on. `python -m scripts.torture._sanitized roco h2o`."""

from __future__ import annotations

import sys
from itertools import cycle, product

import torch

import kvdsl
from kvdsl.runtime.backends import choose
from kvdsl.runtime.call import AttentionCall
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.state.layouts import slot_state

DTYPES = cycle((torch.float32, torch.bfloat16, torch.float16))
GIVEN = {"budget": 40.0, "dims": 4.0, "tokens": 20.0}
SIZES = cycle(((16, 16), (7, 5), (33, 80), (128, 64)))


def run(policy: str, batch: int, window: int | None, group: int) -> None:
    """A padded prompt in two forwards, tokens one by one, and some at once."""
    spec = kvdsl.load(policy).spec
    dtype, (key_dim, value_dim) = next(DTYPES), next(SIZES)
    if spec.compact:
        key_dim = value_dim = 16
    state = slot_state(spec, {name: value for name, value in GIVEN.items() if name in spec.params})
    server = choose(spec, "cpu", torch.device("cpu"), dtype)
    rope = (
        Rope(100.0 ** -(torch.arange(key_dim // 2, dtype=torch.float64) / (key_dim // 2)), "half") if spec.compact else None
    )
    make = torch.Generator().manual_seed(batch)

    def call(tokens: int, real: torch.Tensor | None = None) -> AttentionCall:
        key, value = (torch.randn(batch, 2, tokens, dim, generator=make).to(dtype) for dim in (key_dim, value_dim))
        query = torch.randn(batch, 2 * group, tokens, key_dim, generator=make).to(dtype)
        return AttentionCall(query, key, value, real, 0.25, window=window, rope=rope)

    server.prefill(state, call(53, torch.arange(53) >= 5 * torch.arange(batch)[:, None]))
    server.prefill(state, call(19))
    state.decoding = True
    for tokens in (1, 1, 1, 3, 1, 1):
        server.decode(state, call(tokens))
    server.decode(state, call(1, torch.arange(batch)[:, None] != 1))


def main(policies: list[str]) -> None:
    """Every policy at every shape, on one thread and on several."""
    for policy in policies:
        runs = 0
        for threads, batch, window, group in product((1, 3), (1, 2, 3), (None, 9), (1, 3)):
            torch.set_num_threads(threads)
            run(policy, batch, window, group)
            runs += 1
        print(f"{policy}: {runs} runs", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
