"""The baselines compute what they claim to: attention over the whole cache, and the named victims."""

from __future__ import annotations

import pytest
import torch

from kvdsl.build.cxx import compiler
from kvdsl.errors import KvdslError
from kvdsl_lab.bench import baselines
from kvdsl_lab.bench.baselines import Cache, Evicting

BATCH, HEADS, GROUP, SLOTS, DIM = 2, 3, 4, 24, 16


def make_cache(dtype: torch.dtype = torch.float32) -> Cache:
    torch.manual_seed(0)
    shape = (BATCH, HEADS, SLOTS, DIM)
    return Cache(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), GROUP)


def make_token(dtype: torch.dtype = torch.float32) -> baselines.Token:
    torch.manual_seed(1)
    query, cached = torch.randn(BATCH, HEADS * GROUP, 1, DIM), torch.randn(2, BATCH, HEADS, 1, DIM)
    return query.to(dtype), cached[0].to(dtype), cached[1].to(dtype)


def expected(cache: Cache, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and probabilities in float64, [batch, kv_heads, group, dim or slots]."""
    folded = query.double().view(BATCH, HEADS, GROUP, DIM)
    weights = torch.einsum("bhgd,bhsd->bhgs", folded, cache.keys.double()).mul(DIM**-0.5).softmax(-1)
    return weights @ cache.values.double(), weights


@pytest.mark.parametrize("way", [baselines.sdpa_grouped, baselines.sdpa_expanded, baselines.sdpa_folded])
def test_sdpa(way):
    cache, token = make_cache(), make_token()
    out = way(cache)(token).reshape(BATCH, HEADS, GROUP, DIM)
    torch.testing.assert_close(out.double(), expected(cache, token[0])[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", [baselines.attend_eager, baselines.attend_eager_preallocated, baselines.attend_grouped])
def test_eager(way, dtype):
    cache, token = make_cache(dtype), make_token(dtype)
    out, weights = way(cache)(token[0])
    close = 1e-5 if dtype == torch.float32 else 3e-2
    wanted = expected(cache, token[0])
    torch.testing.assert_close(out.reshape(BATCH, HEADS, GROUP, DIM).double(), wanted[0], rtol=0, atol=close)
    torch.testing.assert_close(weights.double(), wanted[1], rtol=0, atol=close)


def test_repeat_kv_is_transformers_own():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    keys = make_cache().keys
    assert torch.equal(baselines.repeat_kv(keys, GROUP), llama.repeat_kv(keys, GROUP))


@pytest.mark.parametrize("by_std", [False, True])
def test_the_victim_is_who_the_statistics_say(by_std):
    cache, token = make_cache(), make_token()
    evicting = Evicting(cache, baselines.attend_grouped(cache), by_std=by_std)
    evicting.step(token)
    for tensor, new in ((cache.keys, token[1]), (cache.values, token[2])):
        assert torch.equal(tensor[:, :, :1], new), "the first token goes into the first slot"
    attn = expected(cache, token[0])[1].mean(2)
    count = torch.arange(SLOTS, 0, -1).double() + 1
    count[0] = 1
    for row in range(BATCH):
        for head in range(HEADS):
            assert int(evicting._slot[row, head]) == _victim(attn[row, head], count, by_std)


def _victim(attn: torch.Tensor, count: torch.Tensor, by_std: bool) -> int:
    mean = attn / count
    if by_std:
        std = (attn**2 / count - mean**2).sqrt()
        candidates = std.argsort()[: SLOTS - SLOTS // 2].tolist()
        return min(candidates, key=lambda slot: float(mean[slot]))
    older = range(1, SLOTS - SLOTS // 2 + 1)  # slot 0 holds the newest, then come the oldest
    return min(older, key=lambda slot: float(attn[slot]))


def test_tokens_are_taken_in_turn():
    seen = []
    step = baselines.repeated(seen.append, ["a", "b"])  # type: ignore[list-item]
    for _ in range(5):
        step()
    assert seen == list("ababa")


def test_streaming_read_reads_everything():
    try:
        compiler()
    except KvdslError as error:
        pytest.skip(str(error))
    cache = Cache(torch.ones(2, 2, 64, 64, dtype=torch.float32), torch.zeros(2, 2, 64, 64), 1)
    some = baselines.streaming_read(cache)
    cache.values[-1, -1, -1, -1] = 1.0
    assert some != 0
    assert baselines.streaming_read(cache) != some
