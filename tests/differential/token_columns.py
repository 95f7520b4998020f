"""What a token has by itself: traces in which the same few words come again and again, and what the interpreter makes of them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import kvdsl
from kvdsl.compiler import analyse, find_policy
from kvdsl.interp.evaluate import Scope, evaluate_slots
from kvdsl.ir.nodes import Policy
from kvdsl.passes.columns import add_columns
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.slots import SlotState

EVERYTHING = """kv 1

policy Everything {
  "All that a token can have by itself, but for functions of a library."
  param budget = 64
  score (std(v over dims) - 0.1 * mean(k over dims) + var(0.3 * v - abs(v) over dims) + max(k over dims) * min(v over dims)
    + sqrt(sum(abs(k) over dims)) + sum(where(v > 0, sqrt(abs(v)), v / 3) over dims) + mean(v * v * v over dims))
}
"""

ALONE = ("knorm", "everything")
"""Policies that score by nothing else, so that all backends keep the same tokens."""

TOGETHER = ("vatp_h2o", "vatp_scissorhands", "vatp_code", "vatp_roco")
"""Policies that multiply it with attention."""

SIZES = ((torch.float32, 7, 5), (torch.float32, 80, 128), (torch.bfloat16, 128, 80), (torch.float16, 33, 300))
"""Dtypes, and sizes of keys and values."""

BATCH, HEADS, GROUP, WORDS = 2, 3, 2, 11


@lru_cache
def spec_of(name: str, folder: Path) -> PolicySpec:
    """The compiled policy; what is not shipped is written into the folder."""
    if name == "everything":
        (folder / "everything.kv").write_text(EVERYTHING, encoding="utf-8")
    spec: PolicySpec = kvdsl.load(folder / "everything.kv" if name == "everything" else name).spec
    return spec


def policy_of(name: str, folder: Path) -> Policy:
    """The same as the interpreter has it, with its columns."""
    analysis = analyse(folder / "everything.kv" if name == "everything" else find_policy(name))
    assert analysis.ok
    return add_columns(analysis.policy)


def repeated(spec: PolicySpec, backend: str, dtype: torch.dtype, key_dim: int, value_dim: int, steps: int = 40) -> SlotState:
    """The cache after a padded prompt in two forwards and some tokens, one by one: all of them some of a few words."""
    random = np.random.default_rng(key_dim)
    words = [torch.from_numpy(random.standard_normal((HEADS, WORDS, dim))).to(dtype) for dim in (key_dim, value_dim)]
    state = slot_state(spec, {"budget": 64.0})
    server = choose(spec, backend, torch.device("cpu"), dtype)

    def call(tokens: int, real: Tensor | None = None) -> AttentionCall:
        said = torch.from_numpy(random.integers(0, WORDS, (BATCH, tokens)))
        key, value = (vectors[:, said].transpose(0, 1) for vectors in words)
        query = torch.from_numpy(random.standard_normal((BATCH, HEADS * GROUP, tokens, key_dim))).to(dtype)
        return AttentionCall(query, key, value, real, key_dim**-0.5)

    server.prefill(state, call(30, torch.arange(30) >= torch.tensor([[0], [9]])))
    server.prefill(state, call(60))
    state.decoding = True
    for _ in range(steps):
        server.decode(state, call(1))
    return state


def columns_of(state: SlotState) -> dict[str, Tensor]:
    """The columns that tokens have by themselves."""
    rules = dict(zip(state.spec.columns, state.spec.column_rules, strict=True))
    return {name: x for name, x in state.column_index.single(state.columns).items() if rules[name] == "token"}


def expected(policy: Policy, state: SlotState) -> dict[str, Tensor]:
    """The same by the interpreter, from the keys and values that are cached, rounded once."""
    found = {}
    for column in policy.columns:
        if column.rule == "token":
            values = [
                evaluate_slots(column.body, Scope(len(k), k.shape[1], {"k": k, "v": v}, {}))
                for k, v in zip(*(x.double().flatten(0, 1).numpy() for x in (state.keys, state.values)), strict=True)
            ]
            found[column.name] = torch.from_numpy(np.stack(values)).float().view(state.position.shape)
    return found


def check(policy: Policy, state: SlotState) -> None:
    """Whether every live slot's columns are the interpreter's, to the bit."""
    live, wanted = state.position >= 0, expected(policy, state)
    assert wanted and live.any()
    for name, got in columns_of(state).items():
        assert torch.equal(got[live].view(torch.int32), wanted[name][live].view(torch.int32)), name
