"""Compact positions in models: what a decode step says is what the kept tokens say by themselves, at positions 0 to n - 1."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.state.order import ranks
from kvdsl.runtime.state.slots import SlotState
from tests.hf import policies, zoo
from tests.quick import few

ONE_LAYER = {"num_hidden_layers": 1, "num_key_value_heads": 1}

_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 1024}


def _scaled(kind: str, **numbers: float) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, "rope_theta": 1e4, **numbers}}


# In a model of one layer, a cached key and value know their token and its position only.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    name: (zoo.FAMILIES[name][0], {**zoo.FAMILIES[name][1], **ONE_LAYER})
    for name in ("llama", "qwen2", "qwen3", "mistral", "phi3", "phi", "olmo2", "cohere", "granite", "glm4", "smollm3")
} | {
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5, "num_hidden_layers": 1, "num_attention_heads": 1}),
    "llama-llama3": ("Llama", {**ONE_LAYER, **_scaled("llama3", **_LLAMA3)}),
    "llama-yarn": ("Llama", {**ONE_LAYER, **_scaled("yarn", **_YARN)}),
    "helium": ("Helium", {"head_dim": 16, **ONE_LAYER}),
    "gemma2": ("Gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16, "layer_types": ["full_attention"], **ONE_LAYER}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "query_pre_attn_scalar": 16, "layer_types": ["full_attention"], **ONE_LAYER}),
}

POLICIES = {
    "streaming_llm": {"budget": 12},
    "lazy_streaming": {"budget": 12, "R": 5, "sigma": 4, "delta": 2},
    "halves": {"budget": 12, "recent": 4},
}


@cache
def models(family: str) -> tuple[Any, Any]:
    """The same model twice: one for a cache, one that no cache changes; its attention is the plainest there is."""
    stem, extra = FAMILIES[family]
    one, other = zoo.make(stem, **extra), zoo.make(stem, **extra)
    other.set_attn_implementation("eager")
    return one, other


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize(("family", "policy"), [
    pytest.param(family, policy, marks=[] if family == "llama" else pytest.mark.nightly)
    for family in FAMILIES for policy in POLICIES
])  # fmt: skip
def test_logits_are_those_of_the_kept_tokens_alone(family: str, policy: str, backend: str) -> None:
    one, other = models(family)
    cache = policies.cache_class(policy)(one, **POLICIES[policy], backend=backend)
    ids, lengths = zoo.prompt(2, 50), set()
    with torch.no_grad():
        one(ids[:, :30], **with_cache(cache))
        for at in range(30, 50):
            kept = cache.positions(0)[:, 0]
            ours = one(ids[:, at : at + 1], **with_cache(cache)).logits[:, -1]
            for row in range(2):
                places = [*sorted(place for place in kept[row].tolist() if place >= 0), at]
                lengths.add(len(places))
                alone = other(ids[row : row + 1, places]).logits[0, -1]
                assert (ours[row] - alone).abs().max() < 1e-4, f"row {row}, token {at}, of {places}"
    assert max(places) - min(places) > 30, "the survivors should be far apart in the text"
    assert max(lengths) <= 12 + POLICIES[policy].get("R", 1)
    assert (len(lengths) > 1) == (policy == "lazy_streaming")


# Rounding differs with the size of a batch, so that in half precision only positions may decide who leaves.
PRECISIONS = {
    "h2o": ("halves", {"budget": 12, "recent": 4}, torch.float32, 1e-4),
    "bfloat16": ("streaming_llm", {"budget": 12}, torch.bfloat16, 0.3),
    "float16": ("streaming_llm", {"budget": 12}, torch.float16, 0.04),
}


@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("precision", few(PRECISIONS, "h2o"))
def test_a_padded_row_says_what_it_says_alone(precision: str, backend: str) -> None:
    policy, params, dtype, bound = PRECISIONS[precision]
    model = zoo.make("Llama").to(dtype)
    rows = [zoo.prompt(1, length, seed)[0] for seed, length in enumerate((40, 23, 31))]
    caches = [policies.cache_class(policy)(model, **params, backend=backend) for _ in range(2)]
    with torch.no_grad():
        together = _logits(model, caches[0], zoo.left_padded(rows))
        for index, row in enumerate(rows):
            caches[1].reset()
            alone = _logits(model, caches[1], zoo.plain(row[None]))
            assert (together[index] - alone[0]).abs().max() < bound


def _logits(model: Any, cache: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Logits of 12 tokens that are given, [batch, 12, vocabulary]."""
    mask, given, found = inputs["attention_mask"], zoo.prompt(1, 12, seed=9), []
    model(**inputs, position_ids=(mask.cumsum(1) - 1).clamp(min=0), **with_cache(cache))
    for at in range(12):
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        token = given[:, at : at + 1].expand(len(mask), 1)
        positions = mask.sum(1, keepdim=True) - 1
        found.append(model(token, attention_mask=mask, position_ids=positions, **with_cache(cache)).logits[:, -1].float())
    for layer in cache.managed:
        state: SlotState = cache.layers[layer].state
        assert torch.equal(state.rank, ranks(state.position))
    return torch.stack(found, 1)


def test_beams_take_their_ranks_along() -> None:
    model, ids = zoo.make("Llama"), zoo.prompt(2, 30)
    texts = []
    for backend in ("torch", "cpu"):
        cache = policies.cache_class("halves")(model, budget=12, recent=4, backend=backend)
        texts.append(model.generate(ids, max_new_tokens=12, num_beams=3, do_sample=False, **with_cache(cache)).tolist())
        for layer in cache.managed:
            assert torch.equal(cache.layers[layer].state.rank, ranks(cache.layers[layer].state.position))
    assert texts[0] == texts[1]


# -- positions that do not count tokens --------------------------------------------------------------------------------


def _streaming(model: Any) -> Any:
    return policies.cache_class("streaming_llm")(model, budget=12)


def _run(model: Any, cache: Any, positions: Tensor, *cuts: int, mask: Tensor | None = None) -> None:
    """Run random tokens at these positions, [..., batch, tokens], cut into forwards behind so many tokens."""
    ids, ends = zoo.prompt(positions.shape[-2], positions.shape[-1]), [*cuts, positions.shape[-1]]
    with torch.no_grad():
        for begin, end in zip([0, *ends], ends, strict=False):
            given = {} if mask is None else {"attention_mask": mask[:, :end]}
            model(ids[:, begin:end], position_ids=positions[..., begin:end], **with_cache(cache), **given)


GAP = torch.cat([torch.arange(20), torch.arange(520, 540)])[None]


@pytest.mark.parametrize("cuts", [(), (20,), (7,), (39,), range(20, 40)])
def test_positions_with_a_gap_are_refused(cuts: Any) -> None:
    """Wherever the text is cut; the message says where."""
    model = zoo.model("llama")
    with pytest.raises(KvdslError, match=r"in row 0 token 20 has position 520.*use `positions original`") as error:
        _run(model, _streaming(model), GAP, *cuts)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400
    _run(model, policies.cache_class("window")(model, budget=12), GAP, *cuts)


@pytest.mark.parametrize("cuts", [(), (10, 13), (30, *range(31, 40))])
def test_positions_that_differ_from_the_count_by_a_constant(cuts: Any) -> None:
    """One for each row; padding may stand anywhere, and padding in the middle may go uncounted."""
    model, mask = zoo.model("llama"), torch.ones(3, 40, dtype=torch.long)
    mask[1, :9] = mask[2, 12:15] = 0
    counted = (mask.cumsum(1) - 1).clamp(min=0) + torch.tensor([[100], [0], [5]])
    for padding in (0, 1, 4000):
        _run(model, _streaming(model), counted.masked_fill(mask == 0, padding), *cuts, mask=mask)
    _run(model, _streaming(model), torch.arange(40)[None].repeat(3, 1), *cuts)
    with pytest.raises(KvdslError, match="in row 2 token 12 has position 15"):
        _run(model, _streaming(model), torch.arange(40)[None].repeat(3, 1), *cuts, mask=mask)


def test_rows_take_their_constants_along() -> None:
    model = zoo.model("llama")
    cache, positions = _streaming(model), torch.arange(30)[None] + torch.tensor([[0], [50]])
    _run(model, cache, positions)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.batch_repeat_interleave(2)
    _run(model, cache, torch.tensor([[80], [80], [30], [30]]))
    with pytest.raises(KvdslError, match="in row 2 token 31 has position 81"):
        _run(model, cache, torch.tensor([[81]] * 4))
    cache.reset()
    _run(model, cache, positions.flip(0))


def test_positions_with_axes() -> None:
    """As those of M-RoPE around an image, which no attention is told; each axis may have a constant of its own."""
    model, text = zoo.multimodal("Qwen2VL"), torch.arange(40)
    axes = torch.stack([text, text + 3, text + 9])[:, None]
    _run(model, _streaming(model), axes, 30, 31)
    assert not any(part._forward_pre_hooks for part in model.modules()), "what listened is gone with the cache"
    axes[1:, :, 10:20] = axes[1:, :, 10:11]
    with pytest.raises(KvdslError, match="in row 0 token 11 has position 13"):
        _run(model, _streaming(model), axes)
    _run(model, policies.cache_class("window")(model, budget=12), axes)


@pytest.mark.skipif(zoo.EARLY, reason="transformers 4.57 is given images otherwise")
def test_an_image_is_refused() -> None:
    model, text = zoo.multimodal("Qwen2VL"), zoo.prompt(1, 20) % 90 + 3
    ids = torch.cat([text[:, :6], torch.tensor([[98, *[100] * 16, 97]]), text[:, 6:]], 1)
    image = {"pixel_values": torch.randn(64, 96), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    inputs = {**zoo.plain(ids), **image, "mm_token_type_ids": (ids == 100).int()}
    with pytest.raises(KvdslError, match="in row 0 token 8 has position 7: behind an image"):
        model.generate(**inputs, **with_cache(_streaming(model)), max_new_tokens=2)
    model.generate(**zoo.plain(text), **with_cache(_streaming(model)), max_new_tokens=2)
