"""A .kv policy as a press of kvpress (https://github.com/NVIDIA/kvpress), for its pipeline and its evaluation.

    from kvpress import KVPressTextGenerationPipeline
    from kvdsl.integrations.kvpress import PolicyPress

    pipe = KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    pipe(context, question=question, press=PolicyPress("roco", compression_ratio=0.5))

A press works on a prompt, once: so does the policy here. What evicts while decoding needs statistics of every query, which a press
is not given; there kvdsl's own cache serves, `model.generate(..., cache=RoCoCache(model))`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from kvpress.presses.base_press import BasePress
from kvpress.utils import get_prerope_query_states
from torch import Tensor, nn

from kvdsl.budget import with_ratio
from kvdsl.errors import KvdslError
from kvdsl.integrations import prompts
from kvdsl.loading import load
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import check_name
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.supplied import in_rows, refuse_unknown


@dataclass
class PolicyPress(BasePress):
    """Keeps what a policy keeps of the prompt.

    Heads that keep fewer tokens than others (`budget ... across heads`) are filled up with keys that kvpress masks, as its AdaKVPress
    does. Under compact positions keys are turned: see `kvdsl.integrations.prompts.survivors`.

    Args:
        policy: a shipped policy's name, or a .kv file.
        compression_ratio: the share of tokens that leave, as kvpress counts; 0 leaves the policy's own budget if `settings` has one, or
            if it is none that could be set, and otherwise means that nothing is pressed.
        settings: the policy's params by name, as its cache's constructor takes them.
        backend: `auto`, or one of `kvdsl.runtime.backends.NAMES`.
        supplied: functions `f(module, hidden_states)` for what the policy asks its caller for, by name.

    Raises:
        DiagnosticError: if there is no such policy.
        KvdslError: if a press cannot be this policy; later, if params do not fit a prompt, or if the prompt is padded.
    """

    policy: str | Path
    compression_ratio: float = 0.0
    settings: dict[str, float] = field(default_factory=dict)
    backend: str = "auto"
    supplied: dict[str, Callable[[nn.Module, Tensor], Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 <= self.compression_ratio < 1:
            raise KvdslError(
                f"`compression_ratio` is the share of tokens that leave, from 0 up to 1, not {self.compression_ratio}"
            )
        check_name(self.backend)
        self._spec = load(self.policy).spec
        prompts.refuse(self._spec)
        if self._spec.reads_chats:
            raise KvdslError(
                f"{self._spec.name} reads spans or turns of the text, which a press does not receive: use its cache"
            )
        for name in self.supplied:
            refuse_unknown(self._spec, name)
        for name, default in self._spec.supplied:
            if default is None and name not in self.supplied:
                raise KvdslError(
                    f"{self._spec.name} needs `{name}` from its caller: give a function, `supplied={{'{name}': f}}`, where "
                    f"`f(module, hidden_states)` returns a tensor [batch, KV heads or 1, tokens]"
                )
        self.settings = with_ratio(self.settings, self._spec.params, self._spec.name)
        unknown = sorted(set(self.settings) - set(self._spec.params))
        if unknown:
            known = ", ".join(self._spec.params) or "no params"
            raise KvdslError(f"{self._spec.name} has no `{unknown[0]}`; it has {known}")
        self._layers = 1
        self._ropes: dict[int, Rope | None] = {}

    def post_init_from_model(self, model: Any) -> None:
        """Count the layers; find how they rotate, where the policy must know."""
        self._layers = model.config.get_text_config().num_hidden_layers
        if self._spec.compact or self._spec.rotates:
            from kvdsl.runtime.hf.rope import ropes

            self._ropes = ropes(model)

    def compress(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, kv_heads, kept, dim] of what the policy keeps."""
        if not self.compression_ratio and "budget" in self._spec.params and "budget" not in self.settings:
            return keys, values
        _refuse_parts(hidden_states, keys)
        if getattr(module, "sinks", None) is not None:
            raise KvdslError(
                "this model's attention has sinks of its own, and rotates otherwise than the models that kvpress serves"
            )
        window = getattr(module, "sliding_window", getattr(module.config, "sliding_window", None))
        _refuse_padding(kwargs.get("attention_mask"), window)
        call = AttentionCall(
            _queries(module, hidden_states, *kwargs["position_embeddings"]), keys, values, None, float(module.scaling),
            softcap=getattr(module, "attn_logit_softcapping", None), window=window, rope=self._ropes.get(module.layer_idx),
        )  # fmt: skip
        with torch.no_grad():
            if self._spec.supplied:
                given = {name: function(module, hidden_states) for name, function in self.supplied.items()}
                call = call._replace(supplied=in_rows(self._spec, given, keys, layer=module.layer_idx))
            found = prompts.survivors(
                self._spec,
                self._params(keys.shape[2]),
                call,
                layer=module.layer_idx,
                layers=self._layers,
                backend=self.backend,
            )
        if bool(found.free.any()):
            module.masked_key_indices = found.free.nonzero(as_tuple=True)
        return found.keys, found.values

    def _params(self, tokens: int) -> dict[str, float]:
        """The policy's params for a prompt of so many tokens; as many are kept as kvpress would keep."""
        if not self.compression_ratio:
            return self.settings
        if "budget" in self.settings or "budget" not in self._spec.params:
            raise KvdslError(
                f"the budget of {self._spec.name} is given twice: set `compression_ratio` to 0, or leave `budget` out"
                if "budget" in self.settings
                else f"{self._spec.name} has no `budget` that a `compression_ratio` could set; give its params as `settings`"
            )
        return {**self.settings, "budget": max(1, int(tokens * (1 - self.compression_ratio)))}


def _queries(module: nn.Module, hidden_states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The layer's queries as attention saw them, [batch, query_heads, tokens, dim].

    Args:
        cos, sin: [batch, tokens, rotated dims], of pairs (i, i + half), as all models that kvpress supports rotate.
    """
    query = get_prerope_query_states(module, hidden_states)
    cos, sin = cos[:, None], sin[:, None]
    rotated, rest = query[..., : cos.shape[-1]], query[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, -1)
    return torch.cat([rotated * cos + torch.cat([-second, first], -1) * sin, rest], -1)


def _refuse_parts(hidden_states: Tensor, keys: Tensor) -> None:
    """Raise KvdslError where keys are not the whole prompt's: behind another press, in a part of a prompt, or while decoding."""
    if hidden_states.shape[1] != keys.shape[2]:
        raise KvdslError(
            f"the layer holds {keys.shape[2]} keys of a forward of {hidden_states.shape[1]} tokens: a policy is pressed once, by itself, "
            f"on a prompt that comes in one forward"
        )


def _refuse_padding(mask: Tensor | None, window: int | None) -> None:
    """Raise KvdslError where a token is hidden from itself, or from the last one: kvpress does not tell padding from text.

    Args:
        mask: [batch, tokens] as flash attention has it, or [batch, 1, tokens, tokens] of booleans or of numbers that are added.
        window: tokens that a query sees, if not all: the last one sees no more of the text then.
    """
    if mask is None:
        return
    if mask.ndim == 2:
        hidden = mask == 0
    else:
        shown = mask if mask.dtype == torch.bool else mask == 0
        hidden = ~shown.diagonal(dim1=-2, dim2=-1)
        if window is None:
            hidden = hidden | ~shown[:, :, -1]
    if bool(hidden.any()):
        raise KvdslError("the prompts are padded, and a press does not see the padding: pass them one by one")
