"""Statistics of a prompt: update the state columns by its queries, for any policy and device.

Probabilities are recomputed from attention's log-sum-exps, in blocks, in memory independent of the prompt's length, and only for queries
that the policy still needs at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvdsl.runtime.torch import columns
from kvdsl.runtime.torch.attention import scores, softmax
from kvdsl.runtime.torch.prompt import FAR, Prompt
from kvdsl.runtime.torch.tokens import text_of

_BLOCK_BYTES = {"cpu": 8 << 20}
"""Size of a block of probabilities. On a CPU it should fit the cache."""

_DEFAULT_BLOCK_BYTES = 64 << 20


def observe(prompt: Prompt, lse: Tensor) -> None:
    """Update the columns by every query that the policy still needs.

    Args:
        lse: float32 [batch, kv_heads, group, tokens], from `kvdsl.runtime.torch.dense.attend`.
    """
    device = prompt.position.device.type
    entries = _BLOCK_BYTES.get(device, _DEFAULT_BLOCK_BYTES) // 4
    if prompt.state.spec.vectors:
        entries //= max(prompt.call.key.shape[-1], prompt.call.value.shape[-1])
    sinks = None if prompt.call.sinks is None else prompt.call.sinks.float().view(prompt.heads, prompt.group, 1)
    coarse = prompt.call.query.dtype != torch.float32 and not prompt.turns
    normalises = coarse or is_far(prompt, lse)
    for row, head, tokens in prompt.tiles(first_query(prompt), entries):
        slots = prompt.reach(row, head, tokens)
        view = prompt.view(row, head, tokens, slots)
        query, key = prompt.queries(row, head, tokens), prompt.keys[row, head, slots]
        head_sinks, bias = None if sinks is None else sinks[head], prompt.bias(row, head, tokens, slots)
        base = None if normalises else lse[row, head, :, tokens]
        view.weights = Recomputed(prompt, query, key, base, view.visible.mask, head_sinks, bias)
        columns.observe(view, prompt.state.spec)


def is_far(prompt: Prompt, lse: Tensor) -> bool:
    """Whether a query's log-sum-exp is NaN or too far from 0 to recompute probabilities; see `Prompt.far`.

    Args:
        lse: as in `observe`.
    """
    if prompt.far is None:
        furthest = lse.masked_fill(prompt.position[:, None, None] < 0, 0.0).abs().amax()
        if prompt.later is not None:
            prompt.later.doubts.append((furthest, FAR))
        prompt.far = prompt.later is None and not float(furthest) <= FAR
    return prompt.far


def first_query(prompt: Prompt) -> int:
    """Return the first new token whose query the policy still needs after the last one.

    A ring needs the newest queries. `last` needs the newest query only, which sees all slots unless the model has a window.
    """
    spec, settings = prompt.state.spec, prompt.state.settings
    rules = set(spec.column_rules) - {"token", "prune"}
    if rules - {"last"} or (rules and prompt.call.window is not None):
        return 0
    real, numbers = text_of(prompt.state, prompt.call).real_here, settings.table(prompt.numbers).numbers
    wanted = torch.ones(len(numbers), dtype=torch.float64)
    for _, size in spec.rings:
        wanted = torch.maximum(wanted, settings.of_rows(numbers, size))
    place = real.cumsum(1)
    known = (place > place[:, -1:] - wanted[:, None]) & real
    return int(known.any(0).int().argmax())


@dataclass(frozen=True)
class Recomputed:
    """Probabilities and logits of a block of queries, computed when read.

    Attributes:
        query: [batch, kv_heads, group, queries, dim], as attention uses it.
        key: [batch, kv_heads, slots, dim].
        lse: [batch, kv_heads, group, queries]; None to normalize probabilities again, because log-sum-exps are coarse or far from 0.
        visible: bool [batch, kv_heads, queries, slots].
        sinks: [kv_heads, group, 1], or None.
        bias: [batch, kv_heads, group, queries, slots], or None.
    """

    prompt: Prompt
    query: Tensor
    key: Tensor
    lse: Tensor | None
    visible: Tensor
    sinks: Tensor | None
    bias: Tensor | None

    def attn(self) -> Tensor:
        """Return probabilities, [batch, kv_heads, group, queries, slots]; arbitrary where not visible."""
        if self.lse is None:
            return softmax(self.logit().masked_fill_(~self.visible.unsqueeze(2), -torch.inf), self.sinks)
        if self.prompt.call.softcap is not None or self.bias is not None:
            return (self.logit() - self.lse.unsqueeze(-1)).exp_()
        query = (self.query * self.prompt.call.scaling).flatten(0, 1).flatten(1, 2)
        shift = -self.lse.flatten(0, 1).flatten(1).unsqueeze(-1)
        weight = torch.baddbmm(shift, query, self.key.float().flatten(0, 1).transpose(1, 2)).exp_()
        return weight.view(*self.lse.shape, self.key.shape[2])

    def logit(self) -> Tensor:
        """Return logits with their bias, [batch, kv_heads, group, queries, slots]."""
        return scores(self.prompt.call, self.query, self.key, self.bias)
