"""A model's cache with keys and values in fewer bits: texts, memory, and what is done to a cache between its tokens."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from typing import Any

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.interp.rounding import placed
from kvdsl.memory import KV_DTYPES
from kvdsl.runtime.hf.models import large_biases, managed_windows
from kvdsl.runtime.hf.versions import with_cache
from tests.cli.harness import run
from tests.hf import policies, zoo
from tests.hf.test_compile import assert_same_slots, decode, whole
from tests.quick import few

PACKED = (*KV_DTYPES[1:], "int8/int4")
pytestmark = pytest.mark.filterwarnings("ignore:these layers keep the model's dtype")
GREEDY = {"max_new_tokens": 12, "do_sample": False}


def biased(norm: float = 300.0, layer: int = 1) -> Any:
    """Make a model with three layers. One of them adds a bias of this norm to the keys of a KV head."""
    model = zoo.make("Qwen2", num_hidden_layers=3)
    bias = torch.randn(2, 16, generator=torch.Generator().manual_seed(3))
    bias[1] *= norm / bias[1].norm()
    with torch.no_grad():
        model.model.layers[layer].self_attn.k_proj.bias.copy_(bias.flatten())
    return model


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


@pytest.mark.parametrize("family", ["llama", "biased"])
def test_layers_that_share_a_budget(family: str) -> None:
    """What a layer gives away depends on what is stored: C++ and torch keep the same tokens."""
    made = kvdsl.compile(
        'kv 1\npolicy Sharing {\n"a test"\nparam budget = 12\nscore sum(attn)\nwhen prefill\nbudget budget across layers\n}\n'
    )
    model, ids = zoo.model("llama") if family == "llama" else biased(), zoo.prompt(1, 40)
    caches = [made(model, kv_dtype="int4", backend=backend) for backend in ("torch", "cpu")]
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
    model = biased()
    ours, theirs = (kvdsl.load("roco")(model, budget=16, backend=backend, kv_dtype=kv_dtype) for _ in range(2))
    assert ours.is_compileable
    assert torch.equal(decode(model, whole(model), ours, 12), decode(model, model, theirs, 12))
    assert_same_slots(ours, theirs)
    torch._dynamo.reset()


# -- layers whose keys have a large bias ---------------------------------------------------------------------------------


class Rounding(DynamicLayer):
    """A layer of transformers' own whose keys and values the interpreter rounds."""

    kv_dtype = "model"

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        key, value = placed(key_states.double().numpy(), value_states.double().numpy(), self.kv_dtype)
        return super().update(torch.from_numpy(key).float(), torch.from_numpy(value).float(), *args, **kwargs)


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("kv_dtype", few(PACKED, "int4"))
def test_a_layer_with_a_large_bias_is_not_rounded(kv_dtype: str, backend: str) -> None:
    """Its keys are the model's, other layers' are rounded, and logits are those of the interpreter's rounding, step by step."""
    model, ids = biased(), zoo.prompt(1, 24)
    with pytest.warns(UserWarning, match=rf"^these layers keep the model's dtype instead of `{kv_dtype}`: 1 \(300\)\. "):
        cache = kvdsl.load("full")(model, kv_dtype=kv_dtype, backend=backend)
    expected = DynamicCache(config=model.config)
    expected.layers = [Rounding() for _ in range(3)]
    for layer in (0, 2):
        expected.layers[layer].kv_dtype = kv_dtype
    with torch.no_grad():
        for part in (ids[:, :16], *ids[:, 16:].split(1, dim=1)):
            ours, theirs = (model(part, **with_cache(one)).logits for one in (cache, expected))
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for layer, found in zip(cache.layers, expected.layers, strict=True):
        torch.testing.assert_close(layer.state.keys[:, :, :24], found.keys, rtol=1e-4, atol=1e-4)
    assert [layer.state.format.packed for layer in cache.layers] == [True, False, True]
    assert cache.layers[0].bytes() == cache.layers[2].bytes() < cache.layers[1].bytes() < cache.bytes()
    assert f"3 layers, 1 of them not in {kv_dtype}" in repr(cache)


def test_a_small_bias_is_rounded_with_its_key() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache = kvdsl.load("roco")(biased(15.9), budget=12, kv_dtype="int8")  # 4 times the root of 16 dims is 16
    assert [layer.state.format.packed for layer in cache.layers] == [True] * 3


def test_a_saved_cache_keeps_which_layers_it_rounds() -> None:
    """Attached to weights whose bias is just below the bound, as after another rounding, it goes on as it began."""
    model, ids = biased(16.01), zoo.prompt(1, 30)
    cache = kvdsl.load("roco")(model, budget=12, kv_dtype="int4")
    said = text(model, ids, cache)
    twin, left = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[16:] *= 0.999
    left.attach(model)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.bias[16:] /= 0.999
    longer = torch.cat([said, said[:, :3]], dim=1)
    assert len({tuple(text(model, longer, one)[0].tolist()) for one in (cache, twin, left)}) == 1
    assert_same_slots(cache, left)
    left.reset()
    assert torch.equal(text(model, ids, left), said)
    assert [layer.state.format.packed for layer in left.layers] == [True, False, True]


def test_layers_of_two_dtypes() -> None:
    """In a model in 16 bits, under a policy that evicts, with beams, and taken back."""
    model = biased().bfloat16()
    made = kvdsl.load("h2o")
    caches = [made(model, budget=12, kv_dtype="int8", backend=backend) for backend in ("torch", "cpu")]
    texts = [text(model, zoo.prompt(2, 30), cache, num_beams=2) for cache in caches]
    assert texts[0].shape == texts[1].shape
    for cache in caches:
        assert [layer.state.dtype for layer in cache.layers] == [torch.float32, torch.bfloat16, torch.float32]
        cache.activate_past_recording()
        before = [layer.state.layout.key_pool.clone() for layer in cache.layers]
        with torch.no_grad():
            model(zoo.prompt(4, 1), **with_cache(cache))
        cache.crop(-1)
        assert all(torch.equal(pool, one.state.layout.key_pool) for pool, one in zip(before, cache.layers, strict=True))


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_biases_are_found_in_every_family(family: str) -> None:
    """Whatever its projections are called: a bias that adds to keys rules rounding out, and no other does."""
    model = copy.deepcopy(zoo.untouched(family))
    layers = managed_windows(model)
    assert large_biases(model, layers) == {}
    key = re.compile(r"(k_proj|c_attn|query_key_value|qkv_proj)\.bias$")
    biases = [(name, one) for name, one in model.named_parameters() if name.endswith("bias")]
    for name, one in biases:
        with torch.no_grad():
            one.fill_(0.0 if key.search(name) else 5.0)
    assert large_biases(model, layers) == {}
    has_one = [one.detach().fill_(5.0) for name, one in biases if key.search(name)]
    assert set(large_biases(model, layers)) == (set(layers) if has_one else set())


def test_a_normalised_keys_bias_is_the_norms() -> None:
    model = zoo.make("StableLm", qk_layernorm=True, use_qkv_bias=True)
    model.model.layers[0].self_attn.k_proj.bias.detach().fill_(100.0)
    assert large_biases(model, range(2)) == {}


def test_biases_that_lie_elsewhere_or_nowhere() -> None:
    """An offloaded model's are read where they are; of a model without weights nothing is assumed."""
    accelerate = pytest.importorskip("accelerate")
    model = biased()
    assert large_biases(accelerate.cpu_offload(biased(), execution_device=torch.device("cpu")), range(3)) == large_biases(
        model, range(3)
    )
    empty = model.to("meta")
    with pytest.raises(KvdslError, match=r"the bias of `k_proj` is not in memory \(meta"):
        kvdsl.load("roco")(empty, kv_dtype="int8")
    assert kvdsl.load("roco")(empty).managed == [0, 1, 2]
    for layer in model.model.layers:
        layer.self_attn.project_keys = layer.self_attn.__dict__["_modules"].pop("k_proj")
    with pytest.raises(KvdslError, match="keys of layer 0 in a way that kvdsl does not know"):
        large_biases(model, range(3))


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
