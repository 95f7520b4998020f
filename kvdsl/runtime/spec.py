"""The description of a policy that its generated package passes to the runtime."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdsl.abi import ABI
from kvdsl.memory import keeps_halves, rounds_to, slots_of_a_block

if TYPE_CHECKING:
    from torch import Tensor

    from kvdsl.runtime.given import Given
    from kvdsl.runtime.tensors import Tensors


Memory = tuple[int | None, bool, str]


@dataclass(frozen=True)
class PolicySpec:
    """One policy, as its generated package describes it.

    Attributes:
        name: the published spelling, for messages.
        stem: the package's name.
        params: names of the policy's params, in the constructor's order.
        numbers: names of all numbers that kernels or the runtime read per row, in the order of `SlotState.numbers`. Counts are whole,
            sizes at least 1. The runtime uses these names:
            `capacity`: tokens kept per KV head after a settle; inf in a layer that does not evict.
            `trigger`, `slack`, `max_drop`, `prefill_block`: as in the language.
            `floor`, `layer_floor`: tokens that a head, or a layer, cannot lose to others of a shared budget.
            `head_floor`: a head's `floor` as a part of its layer's share.
            `select`: tokens that a query attends to; inf in a layer that does not select. `page`, `sketch_dims`, `sketch_every`: as in
            the language. `chooser`: the layer whose choice this one reuses, -1 for none.
            `block`: slots per block, of a policy with blocks by default.
            `size_<ring>`: the size of each ring.
        resolve: computes `numbers` by name from the user's params, float64 [batch] each.
        columns: names of the state columns with one number per slot.
        column_rules: how each is updated: `sum`, `squares`, `max`, `min`, `last`, `ema`, `token`, `fold` or `prune`.
        bounded: whether the policy evicts.
        group: how the query heads of a GQA group are reduced: `mean`, `max` or `sum`; `each` if every one selects for itself.
        reads_attention: whether the policy reads attention. If not, any attention implementation serves it.
        torch_kernels: the generated torch functions, documented in `kvdsl.runtime.torch.backend`.
        cpu_source: the generated C++ file; it does not exist if the policy has no C++ form.
        triton_source: the generated Triton kernels; also may not exist.
        rings: name and size (the name of a number) of every column that stores the newest queries one by one.
        when: the phase in which the policy evicts: `both`, `prefill` or `decode`.
        victims: who agrees on victims: each KV head for itself (`own`), a layer's `heads`, or the heads of all `layers`.
        across: whether the KV heads of a layer share a budget, so that they may keep different numbers of tokens.
        across_layers: how layers share their budgets once all have seen the prompt: `shares` by worth, one `pool` of all heads, or
            empty for not at all.
        heads_differ: whether numbers differ by KV head because they read tensors; `resolve` then returns [batch, kv_heads].
        measures: whether the budget depends on the cached data: `torch_kernels.budget` computes it at a settle, at most `capacity`.
        counts: whether the number of selected tokens depends on the data: `torch_kernels.count`.
        weighs: whether attention is weighted per token: `torch_kernels.weight`.
        overprotects: whether more tokens may be protected than the budget.
        hard_cap: whether room is made before a token is placed.
        selects: whether a decoded token attends to a selection only.
        reuses: whether layers reuse another layer's selection, named by the number `chooser`.
        heads_vote: whether all KV heads of a layer together choose what a token attends to.
        bounds_pages: whether kernels store the smallest and largest key of every page for the selection.
        sketches: whether the policy reads a few dims of keys and queries, chosen again from time to time.
        compact: whether a key's rotary position is its rank among the live slots.
        rotates: whether an expression reads the key rotation.
        reads_text: whether the score reads all queries of the prompt.
        rope_cached: whether a key's rotated half is stored beside it. A cache's option may override this and the next two.
        block: slots per block; 0 for contiguous slots; None for the number `block`, if the policy has it.
        kv_dtype: the storage dtype of keys and values, or `model`.
        vectors: whether torch kernels compute per query, slot and dim, so that they must take fewer queries at once.
        tensors: the tensors that the policy reads from files, or None.
        tensors_of_values: whether these tensors' dims are those of values.
        supplied: names of per-token values from the caller with their defaults; None for no default.
        spans: spans that the caller marks, and the column of `supplied` that says which tokens lie in each.
        `hears`: names in `supplied` that the cache itself fills in.
        settles_turns: whether the policy may evict when a turn ends.
        torch_evicts: whether C++ decodes and torch evicts, because C++ lacks an operation of the score or of `keep`.
        abi: the runtime interface that the package was generated for.
    """

    name: str
    stem: str
    params: tuple[str, ...]
    numbers: tuple[str, ...]
    resolve: Callable[[Given], dict[str, Tensor]]
    columns: tuple[str, ...]
    column_rules: tuple[str, ...]
    bounded: bool
    group: str
    reads_attention: bool
    torch_kernels: Any
    cpu_source: Path
    triton_source: Path
    rings: tuple[tuple[str, str], ...] = ()
    when: str = "both"
    victims: str = "own"
    across: bool = False
    across_layers: str = ""
    heads_differ: bool = False
    measures: bool = False
    counts: bool = False
    weighs: bool = False
    overprotects: bool = False
    hard_cap: bool = False
    selects: bool = False
    reuses: bool = False
    heads_vote: bool = False
    bounds_pages: bool = False
    sketches: bool = False
    compact: bool = False
    rotates: bool = False
    reads_text: bool = False
    rope_cached: bool = False
    block: int | None = None
    kv_dtype: str = "model"
    vectors: bool = False
    tensors: Tensors | None = None
    tensors_of_values: bool = False
    supplied: tuple[tuple[str, float | None], ...] = ()
    spans: tuple[tuple[str, str], ...] = ()
    hears: tuple[str, ...] = ()
    settles_turns: bool = False
    torch_evicts: bool = False
    abi: int = ABI

    @property
    def reads_chats(self) -> bool:
        """Whether the policy reads what only a cache receives: spans and turns."""
        return bool(self.spans or self.hears or "turns" in self.numbers)

    @property
    def observes(self) -> bool:
        """Whether a column accumulates over queries, a block of queries at a time."""
        return bool(self.rings or set(self.column_rules) - {"token", "fold", "prune"})

    @property
    def remembers_prompts(self) -> bool:
        """Whether rings hold queries of the current prompt only; see `kvdsl.ir.nodes.Policy`."""
        return self.when == "prefill" and not self.selects

    @property
    def forgets(self) -> bool:
        """Whether everything stored about queries is discarded with their prompt."""
        return self.remembers_prompts and bool(self.rings) and set(self.column_rules) <= {"token"}

    @property
    def agreement(self) -> str | None:
        """What a layer's KV heads decide together, for messages; None if each decides for itself."""
        if self.across or self.across_layers:
            return "share a budget"
        if self.victims != "own":
            return "agree on victims"
        return "select tokens together" if self.heads_vote else None

    @property
    def in_blocks(self) -> bool:
        """Whether slots lie in blocks."""
        return "block" in self.numbers if self.block is None else self.block > 0

    def laid_out(self, storage: str | None = None, rope: str | None = None, kv_dtype: str | None = None) -> PolicySpec:
        """Return the policy with these options of memory layout; None keeps the policy's own.

        Raises:
            KvdslError: if an option is unknown or does not fit the policy.
        """
        block = self.block if storage is None else slots_of_a_block(storage)
        cached = self.rope_cached if rope is None else keeps_halves(rope, self.name, compact=self.compact)
        return self.with_memory((block, cached, rounds_to(kv_dtype or self.kv_dtype, self.name, halves=cached)))

    def without(self, target: str) -> str:
        """Return why the package has no kernels for `cpu` or `triton`, what that costs and what to do, as its manifest says."""
        try:
            manifest = json.loads(self.cpu_source.with_name("manifest.json").read_text(encoding="utf-8"))
            return str(manifest["without"][target])
        except (OSError, ValueError, KeyError, TypeError):
            return f"there are no {'C++' if target == 'cpu' else 'Triton'} kernels in its package (`kvdsl explain` says why)"

    @property
    def memory(self) -> Memory:
        """The options of memory layout: `block`, `rope_cached` and `kv_dtype`."""
        return self.block, self.rope_cached, self.kv_dtype

    def with_memory(self, memory: Memory) -> PolicySpec:
        """Return the policy with this `memory`."""
        block, cached, kv_dtype = memory
        return self if memory == self.memory else replace(self, block=block, rope_cached=cached, kv_dtype=kv_dtype)

    @property
    def unrounded(self) -> PolicySpec:
        """The policy with keys and values in the model's dtype."""
        return self.with_memory((self.block, self.rope_cached, "model"))

    def __post_init__(self) -> None:
        if self.abi != ABI:
            raise ImportError(
                f"the generated package `{self.stem}` was made for runtime interface {self.abi}, this kvdsl has {ABI}: "
                f"run `kvdsl compile` on its .kv file again"
            )
