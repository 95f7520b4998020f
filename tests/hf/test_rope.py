"""How models rotate their keys: what is found moves a key to wherever the model itself would have put it."""

from __future__ import annotations

import gc
import weakref
from functools import cache
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf import rope as calibration
from kvdsl.runtime.hf.rope import ropes
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.rope import Pairing, Rope
from tests.hf import policies, zoo

pytestmark = pytest.mark.nightly

FURTHEST = 600
"""Tokens are compared at positions below."""

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


def scaled(kind: str, **numbers: float) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, "rope_theta": 1e4, **numbers}}


# How a model is made, and its pairing and rotated pairs of 16 dims (qwen3: 32).
MODELS: dict[str, tuple[str, dict[str, Any], str, int]] = {
    "llama": ("Llama", {}, "half", 8),
    "llama-linear": ("Llama", scaled("linear", factor=4.0), "half", 8),
    "llama-llama3": ("Llama", scaled("llama3", **_LLAMA3), "half", 8),
    "llama-yarn": ("Llama", scaled("yarn", **_YARN), "half", 8),
    "mistral": (*zoo.FAMILIES["mistral"], "half", 8),
    "mistral-windowed": (*zoo.FAMILIES["mistral-windowed"], "half", 8),
    "qwen2": (*zoo.FAMILIES["qwen2"], "half", 8),
    "qwen3": (*zoo.FAMILIES["qwen3"], "half", 16),
    "gemma": ("Gemma", {"head_dim": 16}, "half", 8),
    "gemma3": (*zoo.FAMILIES["gemma3"], "half", 8),
    "phi": (*zoo.FAMILIES["phi"], "half", 4),
    "phi3": (*zoo.FAMILIES["phi3"], "half", 8),
    "gpt_neox": (*zoo.FAMILIES["gpt_neox"], "half", 4),
    "cohere": (*zoo.FAMILIES["cohere"], "interleaved", 8),
    "glm4": (*zoo.FAMILIES["glm4"], "interleaved", 4),
    "helium": ("Helium", {"head_dim": 16}, "interleaved", 8),
    "olmo2": (*zoo.FAMILIES["olmo2"], "half", 8),
    "gpt_oss": (*zoo.FAMILIES["gpt_oss"], "half", 8),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4}, "half", 8),
}

if not zoo.EARLY:  # transformers 4.57 cannot reach the one and does not know the other
    MODELS["stablelm"] = ("StableLm", {"partial_rotary_factor": 0.5}, "half", 4)
    MODELS["nanochat"] = ("NanoChat", {}, "half", 8)

each_model = pytest.mark.parametrize("name", MODELS)


@cache
def model(name: str) -> Any:
    stem, extra, _, _ = MODELS[name]
    return zoo.make(stem, **extra)


def keys_at(model: Any, tokens: Tensor, positions: Tensor) -> list[Tensor]:
    """Every layer's keys of tokens that are each alone at a position, [tokens, kv_heads, 1, dim]; transformers' own."""
    stored = DynamicCache(config=model.config)
    ones = torch.ones(len(tokens), 1, dtype=torch.long)
    with torch.no_grad():
        model(tokens[:, None], position_ids=positions[:, None], attention_mask=ones, **with_cache(stored))
    return [layer.keys for layer in stored.layers]


def furthest_miss(model: Any, found: dict[int, Rope | None]) -> float:
    """The largest error of a key that was moved between two random positions, as a share of its length."""
    tokens = torch.arange(3, 51)
    here, there = torch.randint(FURTHEST, (2, len(tokens)), generator=torch.Generator().manual_seed(5))
    before, after = keys_at(model, tokens, here), keys_at(model, tokens, there)
    misses = [torch.zeros(1)]
    for layer, rope in found.items():
        moved = before[layer] if rope is None else rope.rotate(before[layer], (there - here)[:, None, None])
        misses.append(((moved - after[layer]).norm(dim=-1) / after[layer].float().norm(dim=-1)).flatten())
    return float(torch.cat(misses).max())


# -- what is found -----------------------------------------------------------------------------------------------------


@each_model
def test_a_rotated_key_is_the_key_at_the_other_position(name: str) -> None:
    found = ropes(model(name))
    assert any(rope is not None for rope in found.values())
    assert furthest_miss(model(name), found) < 1e-5


@each_model
def test_layout_pairs_and_the_exact_frequencies(name: str) -> None:
    _, _, pairing, pairs = MODELS[name]
    own = [table.double() for key, table in model(name).named_buffers() if key.endswith("inv_freq")]
    for rope in filter(None, ropes(model(name)).values()):
        assert (rope.pairing, rope.offset, rope.pairs) == (pairing, 0, pairs)
        assert rope.inv_freq.dtype == torch.float64
        assert any(torch.equal(rope.inv_freq.abs(), table) for table in own)


# In gpt_oss the rounding of rotated queries and keys reaches routers, through the sinks: its deeper keys are no measure.
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_finds_the_same(name: str, dtype: torch.dtype) -> None:
    stem, extra, pairing, pairs = MODELS[name]
    half = zoo.make(stem, **extra).to(dtype)
    found = ropes(half)
    assert [rope is None for rope in found.values()] == [rope is None for rope in ropes(model(name)).values()]
    assert {(rope.pairing, rope.offset, rope.pairs) for rope in found.values() if rope} == {(pairing, 0, pairs)}
    assert furthest_miss(half, found) < (0.01 if dtype == torch.bfloat16 else 0.0015)


def test_layers_that_rotate_alike_share_their_rotation() -> None:
    first, second = ropes(model("llama")).values()
    assert first is second


def test_layers_without_positions_beside_others_with() -> None:
    found = ropes(model("smollm3"))
    assert [rope is None for rope in found.values()] == [False, False, False, True]


def test_only_layers_that_are_not_managed_rotate() -> None:
    cohere = zoo.make("Cohere2", sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    assert ropes(cohere) == {1: None}
    assert furthest_miss(cohere, {1: None}) < 1e-5


@pytest.mark.skipif(zoo.EARLY, reason="transformers 4.57 does not let its attention be reached")
def test_a_model_without_any_positions() -> None:
    sizes = {"num_local_experts": 2, "num_experts_per_tok": 1, "shared_intermediate_size": 32, "mamba_n_heads": 8}
    bare = zoo.make("GraniteMoeHybrid", layer_types=["full_attention"] * 2, position_embedding_type="nope", **sizes)
    assert ropes(bare) == {0: None, 1: None}
    assert furthest_miss(bare, ropes(bare)) < 1e-5


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("offset", [0, 4])
def test_every_way_to_rotate_is_told_from_the_others(offset: int, pairing: Pairing, sign: int) -> None:
    """Keys [20] of which 16 dims are rotated, at either end."""
    part = model("llama")
    key, value = torch.randn(2, 1, 8, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    own = Rope(sign * part.model.rotary_emb.inv_freq.double(), pairing, offset)
    moved = own.rotate(key, torch.tensor(calibration.POSITIONS)[:, None]).double()
    (found,) = calibration._fit_all(part, {0: calibration._Seen(moved, value.expand(4, -1, -1), torch.ones(5, 8))}).values()
    assert found is not None
    assert (found.pairing, found.offset) == (pairing, offset)
    assert torch.equal(found.inv_freq, own.inv_freq)


def test_each_kind_of_layer_has_its_own_frequencies() -> None:
    """Gemma 3 turns slower in the layers that see the whole text; those are the managed ones."""
    (rope,) = filter(None, ropes(model("gemma3")).values())
    assert float(rope.inv_freq[1]) == pytest.approx(1e6 ** (-1 / 8), rel=1e-6)


@pytest.mark.skipif(zoo.EARLY, reason="transformers 4.57 does not know the model")
def test_a_model_that_turns_backwards() -> None:
    (rope, _) = ropes(model("nanochat")).values()
    assert rope is not None and (rope.inv_freq < 0).all()


def test_rounding_does_not_spread_from_layer_to_layer() -> None:
    """With sinks and routers, the last keys of a deep model in bfloat16 differ by a third even without rotation."""
    kinds = ["sliding_attention", "full_attention"] * 4
    deep = zoo.make("GptOss", head_dim=16, num_hidden_layers=8, num_local_experts=8, sliding_window=8, layer_types=kinds)
    found = ropes(deep.bfloat16())
    assert {(rope.pairing, rope.pairs) if rope else None for rope in found.values()} == {("half", 8)}


def test_the_text_part_of_a_multimodal_model() -> None:
    whole = zoo.multimodal("Gemma3")
    (rope,) = ropes(whole).values()
    assert rope is not None and (rope.pairing, rope.pairs) == ("half", 8)
    assert float(rope.inv_freq[1]) == pytest.approx(1e6 ** (-1 / 8), rel=1e-6)


def test_fewer_positions_than_are_tried() -> None:
    short = zoo.make("Llama", max_position_embeddings=16)
    assert furthest_miss(short, ropes(short)) < 1e-5


# -- what it leaves alone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_model_stays_as_it_was(attention: str) -> None:
    fresh = zoo.make("Llama")
    fresh.set_attn_implementation(attention)
    fresh.model.layers[0].train()
    modes = [module.training for module in fresh.modules()]
    random, weights = torch.get_rng_state(), {name: tensor.clone() for name, tensor in fresh.state_dict().items()}
    ropes(fresh)
    assert fresh.config._attn_implementation == attention
    assert [module.training for module in fresh.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in fresh.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in fresh.parameters())


def test_any_mode_around_it_gives_the_same() -> None:
    fresh = zoo.make("Llama")
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        (rope, _) = ropes(fresh).values()
    (expected, _) = ropes(model("llama")).values()
    assert rope is not None and expected is not None
    assert not rope.inv_freq.is_inference()
    assert torch.equal(rope.inv_freq, expected.inv_freq)


def test_a_model_is_looked_at_once_until_it_is_converted() -> None:
    fresh, forwards = zoo.make("Llama"), []
    ropes(fresh)
    fresh.register_forward_pre_hook(lambda *_: forwards.append(1))
    ropes(fresh)
    assert not forwards
    (rope, _) = ropes(fresh.bfloat16()).values()
    assert len(forwards) == 1
    assert rope is not None and torch.equal(rope.inv_freq, fresh.model.rotary_emb.inv_freq.double())


def test_a_model_is_not_kept_alive() -> None:
    fresh = zoo.make("Llama")
    ropes(fresh)
    gone = weakref.ref(fresh)
    del fresh
    gc.collect()
    assert gone() is None


# -- refusals ----------------------------------------------------------------------------------------------------------

_LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32,
}  # fmt: skip

_DECODER = {
    "d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "is_decoder": True, "is_encoder_decoder": False,
}  # fmt: skip

REFUSED = {
    "learned": ("GPT2", zoo.FAMILIES["gpt2"][1], "it adds positions to the embeddings"),
    "dynamic": ("Llama", scaled("dynamic", factor=2.0), "`dynamic` scaling changes the frequencies with the length"),
    "longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 2048,
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
        },
        "`longrope` scaling changes the frequencies",
    ),
    "latents": ("DeepseekV3", _LATENT, "compressed latents"),
    "alibi": ("Falcon", {"alibi": True, "num_kv_heads": 4, "multi_query": False}, "a bias that grows with the distance"),
    "out of reach": ("Bloom", {"n_layer": 2, "n_head": 4}, "cannot be reached"),
}
if not zoo.EARLY:
    REFUSED["no positions asked for"] = ("Bart", _DECODER, "its forward takes no `position_ids`")
    REFUSED["learned, with an offset"] = ("OPT", zoo.FAMILIES["opt"][1], "it adds positions to the embeddings")


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_reason(case: str) -> None:
    stem, extra, reason = REFUSED[case]
    refused = zoo.make(stem, **extra)
    own = refused.config._attn_implementation
    with pytest.raises(KvdslError, match=reason):
        ropes(refused)
    assert refused.config._attn_implementation == own


def test_keys_that_are_scaled_after_the_rotation_are_refused() -> None:
    """HunYuan's norms have a weight for each dim, behind the rotation: harmless while all are one, as in a fresh model."""
    mixed = zoo.make("HunYuanDenseV1", head_dim=16)
    assert furthest_miss(mixed, ropes(mixed)) < 1e-5
    trained = zoo.make("HunYuanDenseV1", head_dim=16)
    with torch.no_grad():
        trained.model.layers[1].self_attn.key_layernorm.weight.uniform_(0.5, 1.5)
    with pytest.raises(KvdslError, match="what layer 1 does to a key at another position is no rotation"):
        ropes(trained)


def angles(module: Any, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """What a rotary module gives, but with one frequency for all pairs, which it does not hold."""
    angle = (position_ids[..., None] * 0.3).expand(-1, -1, 16)
    return angle.cos(), angle.sin()


def test_a_rotation_by_frequencies_that_the_model_does_not_hold_is_refused() -> None:
    other = zoo.make("Llama")
    other.model.rotary_emb.forward = MethodType(angles, other.model.rotary_emb)
    with pytest.raises(KvdslError, match="no rotation by the model's own frequencies"):
        ropes(other)


def test_positions_that_go_unused_are_refused() -> None:
    """Such a model counts tokens by itself, so that at which positions it rotated them is unknown."""
    deaf = zoo.make("Llama")

    def nowhere(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args[:1], {"position_ids": torch.zeros_like(kwargs.get("position_ids", args[-1]))}

    deaf.model.rotary_emb.register_forward_pre_hook(nowhere, with_kwargs=True)
    with pytest.raises(KvdslError, match="no key depends on `position_ids`"):
        ropes(deaf)


def test_a_forward_that_fails_is_a_reason() -> None:
    broken = zoo.make("Llama")

    def fail(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if len(kwargs["input_ids"]) == (len(calibration.POSITIONS) + 1) * calibration.TOKENS:
            raise RuntimeError("out of order")

    broken.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(KvdslError, match="reading its keys failed with RuntimeError: out of order"):
        ropes(broken)


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        empty = zoo.make("Llama")
    with pytest.raises(KvdslError, match="it has no weights yet"):
        ropes(empty)


# -- queries -----------------------------------------------------------------------------------------------------------


def scaling(per_position: float, part: Any) -> Any:
    """The model with queries of its second layer that are longer the further they stand in the text."""
    places: list[Tensor] = []

    def note(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        places[:] = [kwargs.get("position_ids", args[-1])]

    def stretch(module: Any, args: Any, out: Tensor) -> Tensor:
        return out * (1 + per_position * places[0][..., None])

    part.model.rotary_emb.register_forward_pre_hook(note, with_kwargs=True)
    part.model.layers[1].self_attn.q_proj.register_forward_hook(stretch)
    return part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_that_are_scaled_by_their_position(dtype: torch.dtype) -> None:
    """Seen at the last position; keys can be turned all the same."""
    scaled = scaling(1e-4, zoo.make("Llama")).to(dtype)
    assert None not in ropes(scaled).values()
    with pytest.raises(
        KvdslError, match=r"it scales queries by their position in the text in layer 1.*use `positions original`"
    ):
        ropes(scaled, moves_queries=True)


@each_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_that_are_only_rotated(name: str, dtype: torch.dtype) -> None:
    stem, extra, _, _ = MODELS[name]
    ropes(zoo.make(stem, **extra).to(dtype), moves_queries=True)


@pytest.mark.skipif(zoo.EARLY, reason="transformers 4.57 does not know the model")
@pytest.mark.parametrize("begins", [16, 4096])
def test_a_model_that_scales_its_queries(begins: int) -> None:
    """Also where the scale begins behind the last position that the model has."""
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": begins}
    scaled = zoo.make("Ministral3", sliding_window=None, rope_parameters={**rope, "llama_4_scaling_beta": 0.5})
    with pytest.raises(KvdslError, match="it scales queries by their position in the text"):
        policies.cache_class("streaming_llm")(scaled, budget=12)
    policies.cache_class("window")(scaled, budget=12)
    plain = zoo.make("Ministral3", sliding_window=None, rope_parameters={**rope, "llama_4_scaling_beta": 0.0})
    policies.cache_class("streaming_llm")(plain, budget=12)
