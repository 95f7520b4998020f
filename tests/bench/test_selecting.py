"""The steady state of a policy that selects, and the figures that it has besides."""

from __future__ import annotations

import pytest
import torch

import kvdsl
from kvdsl.runtime.backends import choose
from kvdsl.runtime.spec import PolicySpec
from kvdsl_lab.bench import decode, selecting
from kvdsl_lab.bench.decode import Shape

SHAPE = Shape(batch=1, kv_heads=2, group=2, head_dim=32, live=200, dtype="fp32")


def spec_of(policy: str, **settings: object) -> PolicySpec:
    return kvdsl.load(policy, **settings).spec


def test_a_layer_that_selects_is_measured():
    state = decode.steady_state(spec_of("sparcas", tokens=20), SHAPE)
    assert (state.layer, state.selects) == (2, True)
    assert decode.steady_state(spec_of("full"), SHAPE).layer == 0


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_the_sketch_is_refreshed_once_a_period(backend):
    state = decode.steady_state(spec_of("sparcas", tokens=20, dims=4), SHAPE)
    server = choose(state.spec, backend, torch.device("cpu"), torch.float32)
    step, tokens = decode.decode_step(server, state), decode.new_tokens(SHAPE)
    assert selecting.period(state) == 64
    refreshed = []
    for index in range(130):
        state.sketch.copy_(torch.arange(4, dtype=torch.int32))  # no token's own sketch
        step(tokens[index % len(tokens)])
        if not torch.equal(state.sketch, torch.arange(4, dtype=torch.int32).expand_as(state.sketch)):
            refreshed.append(index + 1)
        assert bool(((state.position >= 0).sum(-1) == SHAPE.live - 1).all())
    assert refreshed == [64, 128]


def test_a_sample_has_whole_periods():
    state = decode.steady_state(spec_of("sparcas", tokens=20), SHAPE)
    assert decode._in_periods(decode.Candidate(lambda: None, calls=65), state).calls == 128
    other = decode.steady_state(spec_of("quest", tokens=20), SHAPE)
    assert decode._in_periods(decode.Candidate(lambda: None, calls=3), other).calls == 3


def test_figures():
    found = decode.bench_decode(spec_of("sparcas", tokens=20), SHAPE, repeats=3, warmup=1)
    assert found["backend"] == "cpu"
    assert 0 < found["dense_ms_q1"] <= found["dense_ms"] and found["vs_dense"] > 0
    stages = ("place_ms", "sketch_ms", "partial_scores_ms", "top_k_ms", "attention_ms", "finish_ms")
    assert tuple(found["breakdown"]) == stages
    assert (
        min(found["breakdown"].values()) >= 0 < found["breakdown"]["attention_ms"]
    )  # the sketch is found once in 64 tokens


def test_torch_has_no_breakdown():
    found = decode.bench_decode(spec_of("quest", tokens=20), SHAPE, backend="torch", repeats=3, warmup=1)
    assert found["breakdown"] == {} and found["dense_ms"] > 0


def test_what_would_copy_too_much_is_not_run(monkeypatch):
    monkeypatch.setattr(decode, "_COPIED_LIMIT", 0)
    found = decode.bench_decode(spec_of("sparcas", tokens=20), SHAPE, backend="torch", repeats=3, warmup=1)
    assert found["eager_ms"] is None and found["vs_eager_preallocated"] is None and found["grouped_ms"] > 0
    assert found["eager_repeats"] == 0
