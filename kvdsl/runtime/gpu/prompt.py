"""Statistics and evictions of a prompt: launches of the kernels `over_slots`, `observe` and `settle_prompt`.

Each program of `observe` owns some slots and accumulates over all queries in registers. So no tensor has queries x slots elements, and
there are no atomics: the same prompt always yields the same columns, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.gpu.launch import is_hopper, launch, signed
from kvdsl.runtime.gpu.sizes import ALONE_OPTIONS, COMPARED, EVERYTHING, OBSERVE_OPTIONS, SETTLED_AT_ONCE, Sizes
from kvdsl.runtime.torch import dense, statistics
from kvdsl.runtime.torch.attention import in_rows
from kvdsl.runtime.torch.eviction import Held
from kvdsl.runtime.torch.prompt import Prompt


def observe(kernels: Any, dot: Any, prompt: Prompt, lse: Tensor) -> None:
    """Fold every query that matters into the columns of the slots; see `kvdsl.runtime.torch.statistics.observe`.

    Args:
        kernels: the policy's generated kernels. dot: the dtype of their matrix products.
        lse: float32 [batch, kv_heads, group, tokens], from `kvdsl.runtime.torch.dense.attend`.

    Raises:
        KvdslError: if offsets between the query heads of a KV head exceed 32 bits.
    """
    query, keys = (in_rows(x) for x in (_queries(prompt), prompt.keys))
    refuse_far(query, prompt.group)
    sizes = Sizes(prompt.group, keys.shape[-1], keys.shape[-1], keys.element_size(), is_hopper(keys.device))
    batch, heads, first = len(keys), prompt.heads, statistics.first_query(prompt)
    arguments = {
        "query": query, "keys": keys, "position": prompt.kept["position"], "columns": prompt.kept["columns"],
        "lse": dense.exact_lse(prompt, first) if dense.is_coarse(query) else lse.contiguous(),
        "numbers": prompt.numbers.contiguous(), "ring_rows": prompt.state.column_index.ring_rows(query.device),
        "constants": prompt.state.constants if prompt.state.spec.tensors is not None else None,
        "live_slots": prompt.live.int() if kernels.CONSTANTS["COUNTS"] else None, "reduced": None,
        "tokens": prompt.tokens, "slots": prompt.slots,
        "scaling": prompt.call.scaling, "softcap": prompt.call.softcap or 0.0, "window": prompt.call.window or EVERYTHING,
        "seed": signed(prompt.state.seed), "layer": prompt.state.layer, "first_head": prompt.state.head_offset,
        "CAPPED": prompt.call.softcap is not None, "DOT": tl.float32 if prompt.turns else dot,
        **kernels.CONSTANTS, **_of_texts(prompt, first), **_strides("query", query, "token"), **_strides("key", keys, "slot"),
    }  # fmt: skip
    reductions = kernels.CONSTANTS["REDUCTIONS"]
    if reductions:
        arguments["reduced"] = lse.new_empty(reductions, batch, heads, prompt.tokens)
        tile = sizes.over_slots()
        launch(
            kernels.over_slots,
            (heads, batch, -(-(prompt.tokens - first) // tile["QUERIES"])),
            arguments | tile,
            OBSERVE_OPTIONS,
        )
    tile = sizes.observe()
    grid = (heads, batch, -(-prompt.slots // tile["SLOTS"]))
    launch(kernels.observe, grid, arguments | tile, sizes.observe_options(reduced=reductions > 0))


def refuse_far(query: Tensor, group: int) -> None:
    """Raise KvdslError if offsets between the query heads of a KV head, [batch, query_heads, tokens, dim], exceed 32 bits.

    Offsets in the loop over them have 32 bits: 64 would take registers that `observe` does not have.
    """
    if (group - 1) * query.stride(1) >= 2**31:
        raise KvdslError(
            f"{query.shape[2]:,} tokens at once are too long a prompt for the Triton kernels, which count the numbers of {group} query "
            f"heads in 32 bits: pass it in forwards of fewer tokens (`prefill_chunk_size`)"
        )


def settle(kernels: Any, held: Held) -> bool:
    """Evict after a prompt and return True, or return False without a kernel; see `kvdsl.runtime.torch.eviction.Kernel`.

    A first prompt's slots are in text order, so the kernel tells the `order` that `SlotState.store` reads. Policies have no kernel if heads
    or layers choose victims together, or if the choice depends on keys or values.
    """
    state, position = held.state, held.position
    if not hasattr(kernels, "settle_prompt") or state.spec.across_layers:
        return False
    batch, heads, slots = position.shape
    order = torch.empty_like(position, dtype=torch.int64)
    arguments = {
        "text_order": order, "position": position, "columns": held.kept["columns"], "cache_rows": batch,
        "work": held.kept["columns"].new_empty(batch, heads, kernels.CONSTANTS["SCORES"], slots),
        "kept": position.new_empty(batch, heads, slots, dtype=torch.int8),
        "newest": held.newest.contiguous(), "real": held.rows, "numbers": held.numbers.contiguous(),
        "ring_rows": state.column_index.ring_rows(position.device),
        "constants": state.constants if state.spec.tensors is not None else None, "D": held.kept["keys"].shape[-1],
        "slots": slots, "window": state.window or EVERYTHING,
        "seed": signed(state.seed), "layer": state.layer, "first_head": state.head_offset, "TILE": COMPARED, "BLOCK": SETTLED_AT_ONCE,
        **kernels.CONSTANTS,
    }  # fmt: skip
    launch(kernels.settle_prompt, (heads, batch), arguments, ALONE_OPTIONS)
    if held.of_prompt and not state.allocated:
        held.kept["order"] = order
    return True


def _queries(prompt: Prompt) -> Tensor:
    """Return the queries as attention sees them, [batch, query_heads, tokens, dim]; float32 if rotated."""
    everything = slice(None)
    return prompt.queries(everything, everything, everything).flatten(1, 2) if prompt.turns else prompt.call.query


def _of_texts(prompt: Prompt, first: int) -> dict[str, Any]:
    """Return `_texts`, which the layers of a forward share."""
    return prompt.call.once(("texts", first), prompt.position, lambda: _texts(prompt, first))


def _texts(prompt: Prompt, first: int) -> dict[str, Any]:
    """Return the text positions of every row's new tokens, and their order. `first`: the first query that counts."""
    real = prompt.position >= 0
    behind = prompt.position.amax(1) + 1
    first_new = behind - real.sum(1, dtype=torch.int32)
    padded = prompt.call.real is not None
    return {
        "first_new": first_new,
        "first_asked": first_new + real[:, :first].sum(1, dtype=torch.int32),
        "behind": behind,
        "order": real.int().argsort(dim=1, descending=True, stable=True).int() if padded else None,
        "PADDED": padded,
    }


def _strides(name: str, x: Tensor, third: str) -> dict[str, int]:
    return {f"{name}_{dim}": stride for dim, stride in zip(("row", "head", third), x.stride(), strict=False)}
