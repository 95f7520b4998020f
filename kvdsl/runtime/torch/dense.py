"""Dense attention of a prompt: the output, and each query's log-sum-exp, from which its probabilities can be recomputed.

Torch's fused kernels are used where possible; their memory is linear in the prompt. They do not support softcaps or ALiBi, and they let
infinite keys or values of masked slots turn the output into NaN (0 * inf). These cases are computed in float32, in blocks of queries.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from math import isfinite

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvdsl.runtime.forward import read
from kvdsl.runtime.torch.attention import scores, softmax
from kvdsl.runtime.torch.prompt import FAR, Prompt
from kvdsl.runtime.torch.tokens import text_of

_BLOCK_BYTES = 32 << 20
"""Size of the probabilities of a block of queries."""

_MASK_BYTES = 8 << 20
"""Size of the mask of a block of queries, where a kernel needs one."""

_ROWS_BYTES = 32 << 20
"""Size of the queries of the rows in one call. They may have to be copied to be contiguous; a long row fills a GPU alone."""

_LEAST_BLOCK = 64
"""The fewest queries worth a kernel call."""

_CPU_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"


def attend(prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Attend causally over cached and new tokens.

    Returns:
        The output, [batch, tokens, query_heads, value_dim], 0 for padding; and the log-sum-exp of each query's logits, sink included:
        float32 [batch, kv_heads, group, tokens], NaN if a logit is +inf, arbitrary for padding. In 16-bit dtypes it may be off by 1e-4
        (`is_coarse`).
    """
    found = _fused(prompt)
    out, lse = _exact(prompt) if found is None else found
    return out.to(prompt.call.query.dtype), lse  # rotated keys and queries are float32


def is_coarse(x: Tensor) -> bool:
    """Whether log-sum-exps for this dtype are coarse: torch's fused CPU kernel approximates exponentials in 16-bit dtypes."""
    return x.device.type == "cpu" and x.dtype != torch.float32


# -- by torch's fused kernels ------------------------------------------------------------------------------------------


def _fused(prompt: Prompt) -> tuple[Tensor, Tensor] | None:
    """Attend by fused kernels; None if there is none, or if a number is not finite (unless that check is deferred)."""
    if prompt.call.softcap is not None or prompt.call.slopes is not None:
        return None
    parts = []
    for rows, text in _alike(prompt):
        found = _fused_rows(prompt, rows, text)
        if found is None:
            return None
        parts.append(found)
    outs, lses = zip(*parts, strict=True)
    out, lse = (outs[0], lses[0]) if len(parts) == 1 else (torch.cat(outs), torch.cat(lses))
    seen = [x for x in (prompt.call.query, prompt.kept["keys"], prompt.kept["values"]) if x.numel()]
    # An infinite square only costs the slower way. In float16 squares are added in float32.
    norms = torch._foreach_norm(seen, 2, dtype=torch.float32 if seen[0].dtype == torch.float16 else None)
    ends = lse.aminmax()
    if prompt.later is None:
        numbers = read([*norms, *ends])
        prompt.far = not all(abs(number) <= FAR for number in numbers[-2:])
        return (out, lse) if all(map(isfinite, numbers)) else None
    prompt.far, most = False, sys.float_info.max
    limit = FAR if prompt.state.spec.reads_attention else most
    prompt.later.doubts += [*((x, most) for x in norms), *((x, limit) for x in ends)]
    return out, lse


def _alike(prompt: Prompt) -> Iterator[tuple[slice, slice | None]]:
    """Yield rows that one call can serve, and where their tokens lie among the new ones; None if padding interrupts them."""
    batch, begin = prompt.position.shape[0], 0
    texts = text_of(prompt.state, prompt.call).spans
    most = max(1, _ROWS_BYTES * batch // max(1, prompt.call.query.nbytes))
    for end in range(1, batch + 1):
        if end == batch or texts[end] is None or texts[end] != texts[begin] or end - begin == most:
            yield slice(begin, end), texts[begin]
            begin = end


def _fused_rows(prompt: Prompt, rows: slice, text: slice | None) -> tuple[Tensor, Tensor] | None:
    """Attend for rows whose tokens lie in the same place."""
    window = prompt.call.window
    if text is None or prompt.cached or (window is not None and window < text.stop - text.start):
        parts = [_masked(prompt, slice(row, row + 1)) for row in range(rows.start, rows.stop)]
        found = [part for part in parts if part is not None]
        if len(found) < len(parts):
            return None
        out, lse = (torch.stack(x) for x in zip(*found, strict=True))
    else:
        causal = _causal(prompt, rows, text)
        if causal is None:
            return None
        out, lse = (x.unflatten(0, (-1, prompt.heads)) for x in causal)
    if prompt.call.sinks is not None:
        out, lse = _with_sinks(out, lse, prompt.call.sinks)
    return out.flatten(1, 2).transpose(1, 2), lse


def _causal(prompt: Prompt, rows: slice, text: slice) -> tuple[Tensor, Tensor] | None:
    """Attend for whole texts without a window: [rows * kv_heads, group, tokens, value_dim], and log-sum-exps."""
    behind = prompt.tokens - text.stop
    query = prompt.queries(rows, slice(0, prompt.heads), text).flatten(0, 1)
    if text.start == text.stop:  # kernels fail on empty inputs
        nothing = query.new_zeros(len(query), prompt.group, prompt.tokens, prompt.kept["values"].shape[-1])
        return nothing, nothing[..., 0].float()
    key, value = (x[rows, :, text].flatten(0, 1) for x in (prompt.keys, prompt.kept["values"]))
    found = _kernel(query, key, value, None, prompt.call.scaling)
    if found is None or (text.start == 0 and behind == 0):
        return found
    return pad(found[0], (0, 0, text.start, behind)), pad(found[1], (text.start, behind))


def _masked(prompt: Prompt, row: slice) -> tuple[Tensor, Tensor] | None:
    """Attend for one row block by block with a mask: [kv_heads, group, tokens, value_dim], and log-sum-exps."""
    heads, parts = slice(0, prompt.heads), []
    for tokens in _blocks(prompt):
        slots = prompt.reach(row, heads, tokens)
        seen = prompt.visible(row, heads if prompt.cached else slice(0, 1), tokens, slots)[0]
        padding = prompt.position[row, tokens, None] < 0
        found = _kernel(
            prompt.queries(row, heads, tokens)[0],
            prompt.keys[row, :, slots][0],
            prompt.kept["values"][row, :, slots][0],
            seen | padding,  # kernels need a visible slot per query
            prompt.call.scaling,
        )
        if found is None:
            return None
        parts.append((found[0].masked_fill(padding, 0), found[1]))
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _blocks(prompt: Prompt) -> list[slice]:
    """Split the queries into blocks that see nearly the same slots and whose masks are small."""
    masks = prompt.heads if prompt.cached else 1  # without evictions, all heads see the same slots
    window = prompt.call.window or prompt.slots
    size = max(1, _MASK_BYTES // (4 * masks * min(prompt.slots, 2 * window)))
    size = min(size, max(_LEAST_BLOCK, window // 4))
    return [slice(begin, min(begin + size, prompt.tokens)) for begin in range(0, prompt.tokens, size)]


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Add a learned logit [query_heads] to every denominator."""
    joined = torch.logaddexp(lse, sinks.float().view(*lse.shape[1:3], 1))
    return (out * (lse - joined).exp().unsqueeze(-1)).to(out.dtype), joined


def _kernel(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor] | None:
    """Call a fused kernel. KV heads take the place of batch rows, so that keys need not be repeated for the group.

    Args:
        query: [kv_heads, group, queries, key_dim].
        key, value: [kv_heads, slots, key_dim or value_dim].
        mask: bool [kv_heads or 1, queries, slots]; None if query i sees slots 0 to i.

    Returns:
        [kv_heads, group, queries, value_dim] and the log-sum-exp, float32 [kv_heads, group, queries]; None if no kernel returns it.
    """
    value_dim, size = value.shape[-1], max(key.shape[-1], value.shape[-1])
    if query.is_cuda:
        size = -(-size // 8) * 8
    query, key, value = (_widened(x.to(query.dtype), size) for x in (query, key, value))
    key, value = (x[:, None].expand(*query.shape[:2], *x.shape[1:]) for x in (key, value))
    if query.is_cuda:
        found = _cuda_kernel(query, key, value, mask, scaling)
    elif query.device.type == "cpu" and hasattr(torch.ops.aten, _CPU_KERNEL):
        bias = None if mask is None else torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)[:, None]
        found = getattr(torch.ops.aten, _CPU_KERNEL)(query, key, value, 0.0, mask is None, attn_mask=bias, scale=scaling)
    else:
        found = None
    return None if found is None else (found[0][..., :value_dim], found[1][..., : query.shape[2]])


def _widened(x: Tensor, size: int) -> Tensor:
    """Pad the last dim with zeros to `size`."""
    return x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1]))


def _cuda_kernel(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, Tensor] | None:
    """Call a CUDA kernel: without a mask cuDNN's if torch prefers it (2× faster than FlashAttention on Hopper), in 16-bit dtypes
    FlashAttention, else the memory-efficient one.
    """
    from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
    from torch.nn.attention import SDPBackend

    bias = None
    if mask is not None:  # rows of the bias must be aligned
        rows = mask.new_zeros(*mask.shape[:2], -(-mask.shape[2] // 8) * 8, dtype=query.dtype)[..., : mask.shape[2]]
        bias = rows.masked_fill_(~mask, -torch.inf)[:, None].expand(query.shape[0], query.shape[1], -1, -1)
    params = SDPAParams(query, key, value, bias, 0.0, mask is None, False)
    choice = torch._fused_sdp_choice(query, key, value, bias, 0.0, mask is None, scale=scaling)
    if mask is None and choice == SDPBackend.CUDNN_ATTENTION.value:
        cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, True, False, scale=scaling
        )
        return cudnn[0], cudnn[1].squeeze(-1)
    if can_use_flash_attention(params):
        flash = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, mask is None, False, scale=scaling
        )
        return flash[0], flash[1]
    if can_use_efficient_attention(params):
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, mask is None, scale=scaling
        )
        return efficient[0], efficient[1]
    return None


# -- exactly -----------------------------------------------------------------------------------------------------------


def _exact(prompt: Prompt) -> tuple[Tensor, Tensor]:
    """Attend in float32 in blocks of queries."""
    entries = _BLOCK_BYTES // 4
    if not bool(prompt.kept["values"].isfinite().all()):
        entries = 0  # query by query: 0 * inf is NaN
    batch, heads, everything = prompt.position.shape[0], prompt.heads, slice(None)
    out = prompt.call.query.new_zeros(batch, heads, prompt.group, prompt.tokens, prompt.kept["values"].shape[-1])
    lse = out.new_zeros(out.shape[:-1], dtype=torch.float32)
    for row, head, tokens in prompt.tiles(0, entries):
        slots = prompt.reach(row, head, tokens)
        seen, logit = _logits(prompt, row, head, tokens, slots)
        lse[row, head, everything, tokens] = _log_sum_exp(logit, prompt, head)
        prob = softmax(logit, _sinks_of(prompt, head)).masked_fill(~seen.unsqueeze(2), 0.0)
        # Unattended slots may hold infinities, and 0 * inf is NaN.
        value = prompt.kept["values"][row, head, slots].float().masked_fill(~seen.any(2)[..., None], 0.0)
        out[row, head, everything, tokens] = torch.einsum("bhgqs,bhsd->bhgqd", prob, value).to(out.dtype)
    return out.flatten(1, 2).transpose(1, 2), lse


def exact_lse(prompt: Prompt, first: int) -> Tensor:
    """Return the log-sum-exps of `attend` in float32 for any dtype, from query `first` on; 0 before it."""
    lse = prompt.call.query.new_zeros(len(prompt.position), prompt.heads, prompt.group, prompt.tokens, dtype=torch.float32)
    for row, head, tokens in prompt.tiles(first, _BLOCK_BYTES // 4):
        _, logit = _logits(prompt, row, head, tokens, prompt.reach(row, head, tokens))
        lse[row, head, :, tokens] = _log_sum_exp(logit, prompt, head)
    return lse


def _logits(prompt: Prompt, row: slice, head: slice, tokens: slice, slots: slice) -> tuple[Tensor, Tensor]:
    """Return what each query sees, bool [rows, heads, queries, slots], and logits, [rows, heads, group, queries, slots]."""
    seen = prompt.visible(row, head, tokens, slots) & (prompt.position[row, None, tokens, None] >= 0)
    bias = prompt.bias(row, head, tokens, slots)
    logit = scores(prompt.call, prompt.queries(row, head, tokens), prompt.keys[row, head, slots], bias)
    return seen, logit.masked_fill(~seen.unsqueeze(2), -torch.inf)


def _log_sum_exp(logit: Tensor, prompt: Prompt, head: slice) -> Tensor:
    """Return the log-sum-exp over slots and sink: [batch, kv_heads, group, queries]."""
    total, sinks = logit.logsumexp(-1), _sinks_of(prompt, head)
    if sinks is not None:
        total = torch.logaddexp(total, sinks)
    return total.masked_fill(total == torch.inf, torch.nan)


def _sinks_of(prompt: Prompt, head: slice) -> Tensor | None:
    """Return the sinks of some KV heads, float32 [kv_heads, group, 1], or None."""
    sinks = prompt.call.sinks
    return None if sinks is None else sinks.float().view(prompt.heads, prompt.group, 1)[head]
