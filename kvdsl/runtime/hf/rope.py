"""The rotation of a model's keys, found by experiment.

A few tokens run, each alone, at several positions. A token that attends only to itself gets its own value back. So unless positions are
added to the hidden states, these do not depend on the position, and a layer's keys differ only by its rotation. The rotation is found
by trying all frequencies in the model's rotary modules, in every pairing, offset and direction, on the keys of position 0.

At the model's last position, the lengths of queries are compared: a rotation keeps them. If they grow with the position, the query cannot
be moved to its rank.

The rotary modules and `apply_rotary_pos_emb` alone are not enough: model families differ in pairing, rotated dims and layers.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.attention import serve_attention
from kvdsl.runtime.hf.layer import mark
from kvdsl.runtime.hf.mask import SlotLength
from kvdsl.runtime.hf.models import (
    at_rest,
    execution_device,
    managed_windows,
    refuse_unsupported,
    rope_types,
    rotary_scalings,
    text_model,
)
from kvdsl.runtime.hf.versions import is_full, native_layers, sliding_window, text_config, with_cache
from kvdsl.runtime.rope import Pairing, Rope

POSITIONS = (0, 1, 7, 100)
"""Positions of the tokens: the first is the reference, near ones show fast pairs, far ones slow pairs."""

TOKENS = 4

TOLERANCE = {torch.float32: 1e-4}
"""Largest deviation of a dim relative to its size. In 16-bit dtypes, rounded cosines alone cause 0.01."""

_HALF_TOLERANCE = 0.05

_HALF_STRETCH = 0.01
"""Largest change of a query's length in 16-bit dtypes; rounding alone causes up to 0.006."""


class _Found(NamedTuple):
    """Results for a model in one dtype: rotations by layer, and layers whose queries grow with the position."""

    dtype: torch.dtype
    ropes: dict[int, Rope | None]
    growing: list[int]


_found: weakref.WeakKeyDictionary[PreTrainedModel, _Found] = weakref.WeakKeyDictionary()


def ropes(model: PreTrainedModel, *, moves_queries: bool = False) -> dict[int, Rope | None]:
    """Return the rotation of every managed layer, None for a layer without positions.

    The first call runs 20 tokens through the model.

    Args:
        moves_queries: whether queries are moved too, as under compact positions.

    Raises:
        KvdslError: if the model cannot be served, or its keys or queries cannot be moved.
    """
    part = text_model(model)
    known = _found.get(part)
    if known is None or known.dtype != part.dtype:  # another dtype may round the frequencies
        _refuse_by_config(part)
        with torch.inference_mode(False), torch.no_grad():
            seen = _watch(model, part)
            _refuse_unused_positions(part, seen)
            seen = {layer: seen[layer] for layer in managed_windows(model)}
            known = _found[part] = _Found(part.dtype, _fit_all(part, seen), _growing(part, seen))
    if moves_queries:
        _refuse_scaled_queries(part, known.growing)
    return dict(known.ropes)


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refuse_by_config(part: PreTrainedModel) -> None:
    """Raise KvdslError for configs whose effects short texts do not show."""
    config = text_config(part)
    changing = sorted(kind for kind in rope_types(config) if "dynamic" in kind or kind in ("longrope", "su"))
    if changing:
        raise _refusal(
            part,
            f"its `{changing[0]}` scaling changes the frequencies with the length of the text, so keys cached at different "
            f"lengths do not match",
        )
    if getattr(config, "kv_lora_rank", None):
        raise _refusal(part, "it makes its keys from compressed latents (MLA), and rotates only a part of them")
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        raise _refusal(part, "instead of rotating, it adds a bias that grows with the distance (ALiBi)")


def _refuse_scaled_queries(part: PreTrainedModel, growing: list[int]) -> None:
    """Raise KvdslError if queries are scaled by their position, in these layers or by the config.

    The config counts too, because a scale may begin beyond the last position tested or depend on the cache's length.
    """
    config = text_config(part)
    scaled = [scaling for scaling in rotary_scalings(config) if scaling.get("llama_4_scaling_beta")]
    if growing or scaled or getattr(config, "attn_temperature_tuning", None):
        where = f" in layer {growing[0]}" if growing else ""
        raise _refusal(
            part,
            f"it scales queries by their position in the text{where}, so queries cannot be moved",
        )


# -- recording keys ----------------------------------------------------------------------------------------------------


class _Seen(NamedTuple):
    """Keys and values of a layer, float64 [positions, tokens * kv_heads, dim] each, and lengths of queries.

    `length` is float64 [positions + 1, tokens * query_heads]; its last row is of the model's last position.
    """

    key: Tensor
    value: Tensor
    length: Tensor


class _Tap(DynamicLayer):
    """A layer that records its inputs and lets every token attend to itself only.

    The model's own attention would nearly do. But with sinks, rounding of rotated queries and keys reaches the hidden states, and a router
    may then choose another expert.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return mark(key_states, self), value_states

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        return SlotLength(1), 0

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        self.seen = _Seen(_rows(key)[: len(POSITIONS)], _rows(value)[: len(POSITIONS)], _rows(query).norm(dim=-1))
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2)


def _watch(model: PreTrainedModel, part: PreTrainedModel) -> dict[int, _Seen]:
    """Record every layer with an attention cache.

    Raises:
        KvdslError: if the model cannot run this way.
    """
    refuse_unsupported(model)
    device = execution_device(part)
    if device.type == "meta":
        raise _refusal(part, "it has no weights yet, so its keys are unknown")
    serve_attention(model)
    with torch.autocast(device.type, enabled=False):
        layers = _run(at_rest(part), device)
    return {index: layer.seen for index, layer in enumerate(layers) if isinstance(layer, _Tap)}


def _run(part: PreTrainedModel, device: torch.device) -> list[Any]:
    """Run every token at every position and return the layers."""
    if "position_ids" not in inspect.signature(part.forward).parameters:
        raise _refusal(part, "its forward takes no `position_ids`")
    tokens = (torch.arange(TOKENS, device=device) * 7919 + 11) % part.get_input_embeddings().weight.shape[0]
    positions = torch.tensor([*_positions(part), _last(part)], device=device)
    inputs = {
        "input_ids": tokens.repeat(len(positions))[:, None],
        "position_ids": positions.repeat_interleave(TOKENS)[:, None],
        "attention_mask": torch.ones(len(positions) * TOKENS, 1, dtype=torch.long, device=device),
    }
    layers = [_Tap() if is_full(layer) or sliding_window(layer) else layer for layer in native_layers(text_config(part))]
    try:
        part(**inputs, **with_cache(Cache(layers=layers)), use_cache=True)
    except Exception as error:
        raise _refusal(part, f"reading its keys failed with {type(error).__name__}: {error}") from error
    return layers


def _positions(part: PreTrainedModel) -> tuple[int, ...]:
    """Return the positions, limited to those that the model has: beyond a position table, a GPU kernel would crash."""
    return tuple(min(position, _last(part)) for position in POSITIONS)


def _last(part: PreTrainedModel) -> int:
    """Return the model's last position from its config."""
    return int(getattr(text_config(part), "max_position_embeddings", None) or POSITIONS[-1] + 1) - 1


def _rows(stored: Tensor) -> Tensor:
    """Convert [(positions + 1) * tokens, heads, 1, dim] to float64 [positions + 1, tokens * heads, dim] on the CPU."""
    return stored.detach().cpu().double().reshape(len(POSITIONS) + 1, -1, stored.shape[-1])


# -- finding the rotation ----------------------------------------------------------------------------------------------


def _refuse_unused_positions(part: PreTrainedModel, seen: dict[int, _Seen]) -> None:
    """Raise KvdslError if the model holds rotary frequencies but `position_ids` has no effect."""
    if _frequencies(part) and all(torch.equal(key, key[:1].expand_as(key)) for key, *_ in seen.values()):
        raise _refusal(part, "it holds frequencies of a rotation, but no key depends on `position_ids`")


def _growing(part: PreTrainedModel, seen: dict[int, _Seen]) -> list[int]:
    """Return the layers whose queries change their length with the position."""
    allowed = TOLERANCE.get(part.dtype, _HALF_STRETCH)
    found = {layer: float((length / length[:1] - 1).abs().nan_to_num().max()) for layer, (_, _, length) in seen.items()}
    return [layer for layer, stretch in found.items() if stretch > allowed]


def _fit_all(part: PreTrainedModel, cached: dict[int, _Seen]) -> dict[int, Rope | None]:
    """Return the rotation of every layer from its keys and values. Layers with equal rotations share the object.

    Raises:
        KvdslError: if a layer does anything other than rotate by the model's frequencies.
    """
    shift = torch.tensor(_positions(part))[:, None]
    tried: dict[int, list[Rope]] = {}
    found: dict[int, Rope | None] = {}
    allowed = TOLERANCE.get(part.dtype, _HALF_TOLERANCE)
    for layer, (key, value, _) in cached.items():
        if _deviation(value, value[:1]) > allowed:  # values are never rotated
            raise _refusal(part, "it adds positions to the embeddings, so no cached key or value can be moved")
        if _deviation(key, key[:1]) <= allowed:
            found[layer] = None
            continue
        dim = key.shape[-1]
        candidates = tried.setdefault(dim, list(_candidates(part, dim)))
        deviations = [_deviation(key, rope.rotate(key[:1], shift)) for rope in candidates]
        best = min(deviations, default=math.inf)
        if best > allowed:
            raise _refusal(
                part,
                f"what layer {layer} does to a key at another position is no rotation by the model's own frequencies "
                f"(deviation {best:.2g}, allowed {allowed:.2g})",
            )
        found[layer] = candidates[deviations.index(best)]
    return found


def _candidates(part: PreTrainedModel, dim: int) -> Iterator[Rope]:
    """Yield every rotation of vectors [dim] by frequencies of the model."""
    for frequencies in _frequencies(part):
        rest = dim - 2 * len(frequencies)
        if rest < 0:
            continue
        pairings: tuple[Pairing, ...] = ("half", "interleaved")
        for offset, pairing, signed in product({0, rest}, pairings, (frequencies, -frequencies)):
            yield Rope(signed, pairing, offset)


def _frequencies(part: PreTrainedModel) -> list[Tensor]:
    """Return the distinct frequency tables of the model's rotary modules, float64 [pairs] on the CPU."""
    found: list[Tensor] = []
    for module in part.modules():
        held = {**vars(module), **dict(module.named_buffers(recurse=False))}
        for name, table in held.items():
            if name.endswith("inv_freq") and isinstance(table, Tensor) and table.ndim == 1:
                exact = table.detach().cpu().double()
                if not any(torch.equal(exact, other) for other in found):
                    found.append(exact)
    return found


def _deviation(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference of a dim at a position, over all tokens, relative to the dim's largest size.

    Args:
        found: float64 [positions, tokens * kv_heads, dim].
        expected: of the same shape, or with one position for all.
    """
    difference = (found - expected).norm(dim=1)
    size = expected.norm(dim=1).amax(0)
    return float((difference / size.clamp(min=torch.finfo(torch.float32).tiny)).max())


def _refusal(part: PreTrainedModel, reason: str) -> KvdslError:
    return KvdslError(f"{type(part).__name__} cannot be served with compact positions: {reason}; use `positions original`")
