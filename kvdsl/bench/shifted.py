"""Shift and append inside of transformers' `generate`: what in-place updates replace, and what they must say the same as.

The cache is one tensor a layer, in the order of the text, and the model's own eager attention reads it. After every token the victims
are cut out, what is left moves together, and the next token is appended behind it, as the published code of H2O and StreamingLLM
does. Keys are kept as they were before any rotation, and every step rotates all of them for the places 0 to n - 1, by the model's
own function (Xiao et al. 2023, "Efficient Streaming Language Models with Attention Sinks", section 3.2). Nothing is shared with kvdsl's
runtime: neither storage nor rotation, neither statistics nor who leaves.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from kvdsl.runtime.errors import KvdslError
from kvdsl.runtime.hf.versions import token_count


class ShiftAndAppend(Cache):
    """A cache of the newest and of the first, or of the heaviest, tokens; to be used in a `with` block, for the model it was made for.

    Rows are of equal length, without padding.

    Args:
        budget: tokens kept per KV head.
        sinks: how many of the first tokens stay, and of the others the newest (StreamingLLM).
        recent: how many of the newest tokens stay, and of the others those with the largest sum of probabilities (H2O). Either this
            or `sinks` is given.

    Raises:
        KvdslError: if the model is not laid out as Llama is, or both or none of the rules are given.
    """

    def __init__(self, model: PreTrainedModel, *, budget: int, sinks: int | None = None, recent: int | None = None) -> None:
        if (sinks is None) == (recent is None):
            raise KvdslError("give either `sinks`, for StreamingLLM, or `recent`, for H2O")
        self._model, self._rotary = model, Rotary(model)
        self._attention = [layer.self_attn for layer in model.base_model.layers]
        self._hooks: list[Any] = []
        super().__init__(layers=[_Layer(self._rotary, budget, sinks, recent) for _ in self._attention])

    def __enter__(self) -> ShiftAndAppend:
        self._before = self._model.config._attn_implementation
        self._model.set_attn_implementation("eager")
        self._hooks = [self._model.base_model.register_forward_pre_hook(self._place, with_kwargs=True)]
        for layer, module in zip(self.layers, self._attention, strict=True):
            self._hooks.append(module.register_forward_hook(lambda _, args, out, layer=layer: layer.settle(out[1])))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._model.set_attn_implementation(self._before)

    def _place(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """New tokens stand right behind those that are kept."""
        first = self.layers[0].kept
        tokens = kwargs["input_ids"].shape[1]
        return args, {**kwargs, "position_ids": torch.arange(first, first + tokens)[None]}


class Rotary:
    """The model's own rotation, there and back."""

    def __init__(self, model: PreTrainedModel) -> None:
        base = model.base_model
        try:
            self._angles = base.rotary_emb
            self._apply = sys.modules[type(base.layers[0].self_attn).__module__].apply_rotary_pos_emb  # type: ignore[attr-defined]
        except AttributeError as error:
            raise KvdslError(
                f"{type(model).__name__} is not laid out as Llama is: its keys cannot be rotated anew"
            ) from error
        if getattr(self._angles, "attention_scaling", 1.0) != 1.0:
            raise KvdslError(f"{type(model).__name__} scales what it rotates: its keys cannot be rotated back")
        self._known: dict[bool, tuple[tuple[Any, ...], tuple[Tensor, Tensor]]] = {}

    def __call__(self, keys: Tensor, first: int, *, back: bool = False) -> Tensor:
        """Keys [batch, kv_heads, tokens, dim] rotated for the places from `first` on, or back from there."""
        cos, sin = self.tables(keys, first)
        rotated: Tensor = self._apply(keys[:1, :1], keys, cos[None], -sin[None] if back else sin[None])[1]
        return rotated

    def tables(self, keys: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
        """Cosines and sines for as many places as there are keys, [tokens, any]; the last are kept, of those from 0 and others."""
        wanted = (first, keys.shape[2], keys.dtype, keys.device)
        known, tables = self._known.get(first == 0, ((), None))
        if known != wanted or tables is None:
            cos, sin = self._angles(keys, torch.arange(first, first + keys.shape[2], device=keys.device)[None])
            tables = cos[0], sin[0]
            self._known[first == 0] = wanted, tables
        return tables


class _Layer(CacheLayerMixin):
    """One layer.

    Attributes:
        keys, values: [batch, kv_heads, kept, dim], keys before any rotation.
        sums: float32 [batch, kv_heads, kept], of the probabilities that queries gave, the mean of a group's heads.
    """

    def __init__(self, rotary: Rotary, budget: int, sinks: int | None, recent: int | None) -> None:
        super().__init__()
        self._rotary, self._budget, self._sinks, self._recent = rotary, budget, sinks, recent
        self._seen = 0

    @property
    def kept(self) -> int:
        """Tokens that are cached."""
        return self.keys.shape[2] if self.is_initialized else 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        """Nothing is cached yet."""
        batch, heads, _, dim = key_states.shape
        self.keys = key_states.new_empty(batch, heads, 0, dim)
        self.values = self.keys if value_states is None else value_states[:, :, :0]
        self.sums = key_states.new_empty(batch, heads, 0, dtype=torch.float32)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new tokens, of which the first stands at `kept`: all keys, rotated for their places, and all values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        self.keys = torch.cat([self.keys, self._rotary(key_states, self.kept, back=True)], 2)
        self.values = torch.cat([self.values, value_states], 2)
        self.sums = torch.nn.functional.pad(self.sums, (0, key_states.shape[2]))
        self._seen += key_states.shape[2]
        return self._rotary(self.keys, 0), self.values

    def settle(self, attention: Tensor) -> None:
        """What exceeds the budget leaves, once the queries gave probabilities [batch, query_heads, queries, kept]."""
        assert self.keys is not None and self.values is not None
        batch, heads, kept = self.sums.shape
        self.sums += attention.float().view(batch, heads, -1, attention.shape[2], kept).mean(2).sum(2)
        over = kept - self._budget
        if over <= 0:
            return
        stay = self._survivors(over).unsqueeze(-1)
        self.sums = self.sums.gather(2, stay[..., 0])
        self.keys, self.values = (x.gather(2, stay.expand(-1, -1, -1, x.shape[-1])) for x in (self.keys, self.values))

    def _survivors(self, over: int) -> Tensor:
        """The places of what stays, in order: int64 [batch, kv_heads, kept - over]."""
        if self._sinks is not None:
            everywhere = torch.arange(self.kept, device=self.sums.device).expand_as(self.sums)
            return torch.cat([everywhere[..., : self._sinks], everywhere[..., self._sinks + over :]], -1)
        old = self.kept - (self._recent or 0)
        lowest = self.sums[..., :old].argsort(dim=-1, stable=True)[..., :over]  # of equals the older leaves
        leaves = torch.zeros_like(self.sums, dtype=torch.int8).scatter_(-1, lowest, 1)
        return leaves.argsort(dim=-1, stable=True)[..., : self.kept - over]

    def get_seq_length(self, *args: Any) -> int:
        """Tokens of the text so far."""
        return self._seen

    def get_mask_sizes(self, query_length: int | Tensor, *args: Any) -> tuple[int, int]:
        """Keys that the new tokens will find, and no offset."""
        return self.kept + token_count(query_length), 0

    def get_max_length(self) -> int:
        """No limit of the text."""
        return -1

    get_max_cache_shape = get_max_length
