"""A model's cache with keys and values in fewer bits: texts, memory, and what is done to a cache between its tokens."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.memory import KV_DTYPES
from kvdsl.runtime.hf.versions import with_cache
from tests.cli.harness import run
from tests.hf import policies, zoo
from tests.hf.test_compile import assert_same_slots, decode, whole
from tests.quick import few

PACKED = (*KV_DTYPES[1:], "int8/int4")
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def text(model: Any, ids: Any, cache: Any, **how: Any) -> Any:
    return model.generate(**zoo.plain(ids), **GREEDY, **how, **with_cache(cache))


@pytest.mark.parametrize("kv_dtype", few(PACKED, "int4"))
@pytest.mark.parametrize("policy", few(["roco", "streaming_llm", "h2o"], "roco"))
def test_backends_say_the_same(policy: str, kv_dtype: str) -> None:
    """In less memory than the model's dtype takes."""
    model, ids = zoo.model("llama"), zoo.prompt(2, 30)
    made = kvdsl.load(policy)
    caches = [made(model, budget=12, backend=backend, kv_dtype=kv_dtype) for backend in ("torch", "cpu")]
    texts = [text(model, ids, cache) for cache in caches]
    assert torch.equal(*texts)
    assert_same_slots(*caches)
    plain = made(model, budget=12, backend="cpu")
    text(model, ids, plain)
    assert caches[0].bytes() == caches[1].bytes() < plain.bytes() / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_16_bits(dtype: torch.dtype) -> None:
    """What is computed with keys and values is float32; what the model gets is its own dtype."""
    model = copy.deepcopy(zoo.untouched("llama")).to(dtype)
    cache = kvdsl.load("roco", kv_dtype="int8")(model, budget=12)
    assert text(model, zoo.prompt(1, 30), cache).shape == (1, 42)
    assert cache.layers[0].state.dtype == torch.float32


def test_rounding_shows() -> None:
    """Eight bits change logits a little, four more: what is kept is really what is read."""
    model, ids = zoo.model("llama"), zoo.prompt(1, 40)
    with torch.no_grad():
        logits = [
            model(ids, **with_cache(kvdsl.load("full")(model, kv_dtype=kv_dtype))).logits for kv_dtype in ("model", *PACKED)
        ]
    apart = {name: float((x - logits[0]).norm() / logits[0].norm()) for name, x in zip(PACKED, logits[1:], strict=True)}
    assert 0 < apart["int8"] < apart["fp8"] < apart["int4"] < 0.5


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_saved_copied_and_taken_back(backend: str) -> None:
    model, ids = zoo.model("llama"), zoo.prompt(1, 30)
    cache = kvdsl.load("roco", kv_dtype="int4")(model, budget=12, backend=backend)
    cache.activate_past_recording()
    said = text(model, ids, cache)
    before = [layer.state.layout.key_pool.clone() for layer in cache.layers]
    twin, left = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    left.attach(model)
    longer = torch.cat([said, said[:, :3]], dim=1)
    texts = [text(model, longer, one) for one in (cache, twin, left)]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])
    for pool, layer in zip(before, copy.deepcopy(left).layers, strict=True):
        assert layer.state.format.packed and layer.state.layout.key_pool.shape == pool.shape
    left.reset()
    assert torch.equal(text(model, ids, left), said)
    left.activate_past_recording()
    with torch.no_grad():
        pools = [layer.state.layout.key_pool.clone() for layer in left.layers]
        for token in range(3):
            model(ids[:, token : token + 1], **with_cache(left))
    left.crop(-3)
    assert all(torch.equal(pool, layer.state.layout.key_pool) for pool, layer in zip(pools, left.layers, strict=True))


def test_beams_and_padding() -> None:
    model = zoo.model("llama")
    padded = zoo.left_padded([zoo.prompt(1, 30)[0], zoo.prompt(1, 19, 2)[0]])
    made = kvdsl.load("h2o", kv_dtype="int8")
    texts = [
        model.generate(**padded, **GREEDY, num_beams=3, **with_cache(made(model, budget=12, backend=backend)))
        for backend in ("torch", "cpu")
    ]
    assert torch.equal(*texts)
    alone = text(model, zoo.prompt(1, 19, 2), made(model, budget=12), num_beams=3)
    assert torch.equal(texts[1][1:, -12:], alone[:, -12:])


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_layers_that_share_a_budget(backend: str) -> None:
    """What a layer gives away depends on what is stored: C++ and torch keep the same tokens."""
    made = kvdsl.compile(
        'kv 1\npolicy Sharing {\n"a test"\nparam budget = 12\nscore sum(attn)\nwhen prefill\nbudget budget across layers\n}\n'
    )
    model, ids = zoo.model("llama"), zoo.prompt(1, 40)
    caches = [made(model, kv_dtype="int4", backend=name) for name in ("torch", backend)]
    assert torch.equal(*(text(model, ids, cache) for cache in caches))
    assert_same_slots(*caches)
    held = [(caches[1].positions(layer) >= 0).sum() for layer in caches[1].managed]
    assert len({int(number) for number in held}) > 1


def test_layers_with_windows_of_their_own_keep_the_models_dtype() -> None:
    model = zoo.model("gemma3")
    cache = kvdsl.load("roco", kv_dtype="int8")(model, budget=12)
    assert text(model, zoo.prompt(1, 30), cache).shape == (1, 42)
    assert cache.layers[1].state.layout.key_pool.dtype == torch.uint8 and cache.managed == [1]


@pytest.mark.parametrize("kv_dtype", few(PACKED, "int4"))
def test_what_selects(kv_dtype: str) -> None:
    """A sketch in C++ is of the keys that are stored, in float32."""
    model, ids = zoo.model("llama"), zoo.prompt(1, 60)
    made = policies.cache_class("sparcas")
    caches = [made(model, tokens=9, dims=4, kv_dtype=kv_dtype, backend=backend) for backend in ("torch", "cpu")]
    assert torch.equal(*(text(model, ids, cache) for cache in caches))
    assert caches[1].layers[1].state.sketch_keys.dtype == torch.float32


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("kv_dtype", PACKED)
def test_a_compiled_step_is_an_eager_one(kv_dtype: str, backend: str) -> None:
    torch._dynamo.reset()
    model = zoo.make("Llama", num_hidden_layers=2)
    ours, theirs = (kvdsl.load("roco")(model, budget=16, backend=backend, kv_dtype=kv_dtype) for _ in range(2))
    assert ours.is_compileable
    assert torch.equal(decode(model, whole(model), ours, 12), decode(model, model, theirs, 12))
    assert_same_slots(ours, theirs)
    torch._dynamo.reset()


def test_what_is_refused_at_once() -> None:
    model = zoo.model("llama")
    with pytest.raises(KvdslError, match="`kv_dtype` is 'int2'; use `model`, `int8`, `int4` or `fp8`"):
        kvdsl.load("roco")(model, kv_dtype="int2")
    with pytest.raises(KvdslError, match="leave out `rope`"):
        kvdsl.load("streaming_llm", rope="cached", kv_dtype="int8")
    with pytest.raises(KvdslError, match=r"vLLM's own blocks, in the model's dtype: leave `kv_dtype` out"):
        from kvdsl.integrations.vllm.settings import parsed

        assert parsed({"policy": "h2o_answer", "kv_dtype": "int8"}).spec


def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("run", "roco", "--set", "budget=40", "--max-new-tokens", "4", "--json")
    plain, told = (run(capsys, *words, *more).json() for more in ((), ("--kv-dtype", "int8")))
    assert told["cache_bytes"] < plain["cache_bytes"] / 2 and told["full_cache_bytes"] == plain["full_cache_bytes"]
    said = run(capsys, "explain", "roco", "--kv-dtype", "int4", "--head-dim", "64", "--json").json()
    assert (said["bytes"]["key_and_value"], said["bytes"]["kv_dtype"]) == (2 * (32 + 4), "int4")
    assert all(one["ok"] for one in said["backends"])
    refused = run(capsys, "run", "roco", "--kv-dtype", "int3")
    assert refused.code == 2 and "`kv_dtype` is 'int3'; use `model`, `int8`, `int4` or `fp8`" in " ".join(
        refused.err.split()
    )
