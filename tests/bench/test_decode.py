"""The steady state that is timed, and the figures that come out."""

from __future__ import annotations

import math

import pytest
import torch

import kvdsl
from kvdsl.cli import main
from kvdsl.errors import KvdslError
from kvdsl.runtime.backends import choose
from kvdsl.runtime.spec import PolicySpec
from kvdsl_lab.bench import decode
from kvdsl_lab.bench.decode import Shape
from tests.cli.harness import run

SHAPE = Shape(batch=2, kv_heads=2, group=2, head_dim=32, live=48, dtype="fp32")
KEYS = ("ms", "gbps", "read_gbps", "roofline", "sdpa_ms", "eager_ms", "grouped_ms", "vs_sdpa", "vs_eager", "vs_grouped")


def spec_of(policy: str) -> PolicySpec:
    return kvdsl.load(policy).spec


@pytest.mark.parametrize("policy", ["roco", "h2o", "vatp_h2o", "streaming_llm", "morphkv", "full"])
def test_steps_keep_the_cache_as_full_as_it_is(policy):
    spec = spec_of(policy)
    state = decode.steady_state(spec, SHAPE)
    backend = choose(spec, "torch", torch.device("cpu"), torch.float32)
    step, tokens = decode.decode_step(backend, state), decode.new_tokens(SHAPE)
    keys = state.keys.data_ptr()
    for index in range(5):
        out = step(tokens[index])
        assert out.shape == (SHAPE.batch, 1, SHAPE.kv_heads * SHAPE.group, SHAPE.head_dim)
        assert bool(((state.position >= 0).sum(-1) == SHAPE.live - 1).all())
    assert state.keys.data_ptr() == keys
    assert decode.live_bytes(state) == 2 * SHAPE.batch * SHAPE.kv_heads * SHAPE.live * SHAPE.head_dim * 4


def test_a_step_attends_to_every_live_slot():
    spec = spec_of("roco")
    state = decode.steady_state(spec, SHAPE)
    query, key, value = decode.new_tokens(SHAPE)[0]
    held = SHAPE.live - 1
    keys = torch.cat([state.keys[:, :, :held], key], 2).clone()
    values = torch.cat([state.values[:, :, :held], value], 2).clone()
    wanted = torch.nn.functional.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    step = decode.decode_step(choose(spec, "torch", torch.device("cpu"), torch.float32), state)
    torch.testing.assert_close(step((query, key, value)).transpose(1, 2), wanted, rtol=0, atol=1e-5)


def test_the_same_seed_gives_the_same_tokens():
    for one, other in zip(decode.new_tokens(SHAPE, 3), decode.new_tokens(SHAPE, 3), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not torch.equal(decode.new_tokens(SHAPE, 3)[0][0], decode.new_tokens(SHAPE, 4)[0][0])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_figures(dtype):
    shape = Shape(1, 2, 2, 32, 40, dtype)
    found = decode.bench_decode(spec_of("roco"), shape, backend="torch", repeats=5, warmup=1)
    for key in KEYS:
        low, middle, high = found[f"{key}_q1"], found[key], found[f"{key}_q3"]
        assert 0 < low <= middle <= high and math.isfinite(high)
    assert found["bytes"] == 2 * 2 * 40 * 32 * (4 if dtype == "fp32" else 2)
    assert found["repeats"] == 5 and found["eager_repeats"] >= 3
    assert found["sdpa_call"] in ("enable_gqa", "expanded")


def test_figures_follow_from_the_rounds():
    times = {name: [2.0, 4.0, 3.0] for name in ("ours", "read", "sdpa", "grouped", "folded", "preallocated")}
    times["read"] = [1.0, 2.0, 1.5]
    times["eager"] = [20.0, math.nan, math.nan]
    found = decode.figures(times, size=6 * 10**6)
    assert found["ms"] == 3 and found["gbps"] == 2 and found["read_gbps"] == 4
    assert found["roofline"] == 0.5 and found["vs_sdpa"] == 1 and found["vs_eager"] == 10


def test_a_policy_that_does_not_evict_one_token_a_step_is_refused():
    state = decode.steady_state(spec_of("roco"), SHAPE)
    state.position[0, 0, 0] = -1
    with pytest.raises(KvdslError, match="evict one token a step"):
        decode._check_steady(state, SHAPE)


def test_command(capsys):
    words = "bench decode --policy h2o --batch 1 --kv-heads 2 --group 2 --head-dim 32 --live 64 --backend torch --repeats 3 --json"
    found = run(capsys, *words.split(), code=0).json()
    assert found["format_version"] == "1.0" and found["environment"]["dtype"] == "fp32"
    for key in KEYS:
        assert {key, f"{key}_q1", f"{key}_q3"} <= set(found)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("bench decode --set budget=3", "--live"),
        ("bench decode --backend triton", "needs a GPU"),
        ("bench decode --policy rocko", "roco"),
        ("bench decode --set bugdet=3", "bugdet"),
    ],
)
def test_mistakes(words, message, capsys):
    assert main(words.split()) in (1, 2)
    shown = capsys.readouterr()
    assert not shown.out
    assert message in shown.err and "Traceback" not in shown.err
