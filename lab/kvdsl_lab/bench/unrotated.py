"""Llama without rotation: with no positions at all, or with a bias that grows with the distance (ALiBi).

EQUIP's appendix D.4 switches the rotation of Llama off, and B.3 is about biases. No model of transformers with such a bias calls its
attention by the interface that a cache can serve, so this one does: `alibi_slopes` is the name that flash attention has for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvdsl.runtime.hf.versions import cache_of
from kvdsl_lab.bench.baselines import repeat_kv


def without_rotation(model: Any, *, biased: bool = False) -> Any:
    """The same Llama, changed in place: its weights stay, its keys and queries are no longer turned.

    Args:
        biased: whether each query head's logits fall with the distance, by `slopes`.
    """
    heads = model.config.num_attention_heads
    for layer in model.model.layers:
        layer.self_attn = UnrotatedAttention(layer.self_attn, slopes(heads) if biased else None)
    model.model.rotary_emb = NoRotation()
    if biased:
        model.set_attn_implementation("eager")  # torch's own attention knows no slopes
    return model


def slopes(heads: int) -> Tensor:
    """Press et al. 2022, "Train Short, Test Long", section 3: a geometric series from 2**(-8 / heads) on, float32 [heads]."""
    return torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)])


def is_rotated(model: Any) -> bool:
    """Whether the model turns keys and queries at all."""
    return not isinstance(getattr(model.base_model, "rotary_emb", None), NoRotation)


class NoRotation(nn.Module):
    """In place of the tables of cosines and sines."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> None:
        """Nothing: nobody turns."""


class UnrotatedAttention(nn.Module):
    """The attention of a Llama layer, on its projections."""

    is_causal = True

    def __init__(self, own: Any, slopes: Tensor | None) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim, self.scaling = own.config, own.layer_idx, own.head_dim, own.scaling
        self.num_key_value_groups = own.num_key_value_groups
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = own.q_proj, own.k_proj, own.v_proj, own.o_proj
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(
        self, hidden_states: Tensor, position_embeddings: None = None, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As in Llama, without the rotation: [batch, tokens, hidden]."""
        shape = *hidden_states.shape[:-1], -1, self.head_dim
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        cache = cache_of({name: kwargs.pop(name, None) for name in ("cache", "past_key_values")})
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = eager_attention_forward
        if self.config._attn_implementation != "eager":
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        if self.slopes is not None:
            kwargs["alibi_slopes"] = self.slopes
        out, weights = attend(self, query, key, value, attention_mask, scaling=self.scaling, **kwargs)
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), weights


def eager_attention_forward(
    module: UnrotatedAttention, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float,
    alibi_slopes: Tensor | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Plain attention over keys in the order of the text; the last query is the last key's."""
    keys, values = (repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    weights = torch.matmul(query, keys.transpose(2, 3)) * scaling
    if alibi_slopes is not None:
        weights = weights + bias(alibi_slopes, query.shape[2], key.shape[2]).to(weights.dtype)
    if attention_mask is not None:
        weights = weights + attention_mask[..., : key.shape[2]]
    weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, values).transpose(1, 2).contiguous(), weights


def bias(slopes: Tensor, queries: int, keys: int) -> Tensor:
    """What is added to the logits of the last queries, float32 [heads, queries, keys]; of keys that come later, nothing of meaning."""
    place = torch.arange(keys, device=slopes.device)
    distance = place[keys - queries :, None] - place
    return -slopes.float()[:, None, None] * distance
