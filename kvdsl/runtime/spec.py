"""What a generated package tells the runtime about its policy."""

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
        params: the names of the policy's params, in the order of the constructor.
        numbers: every number that the kernels or the runtime read per row, in the order of `SlotState.numbers`. The runtime
            knows some by name. A policy that evicts has `capacity`, the tokens kept per KV head after a settle (inf in a layer
            that does not evict), and, where it states them, `trigger`, `slack`, `max_drop`, `floor` (tokens that a head cannot
            lose to the others), `layer_floor` (likewise, of a layer's share), `head_floor` (a head's `floor` as a part of that
            share) and `prefill_block`; one that selects has `select` (inf in a layer that does not), `chooser` (the layer whose choice
            this one attends to, -1 for none), `page`, `sketch_dims` and `sketch_every`; one whose slots lie in blocks unless its user
            asks otherwise `block`, their size; every ring `size_<its name>`.
            Counts are whole; sizes are at least 1.
        resolve: from what the user gave to `numbers` by name, float64 [batch] each.
        columns: names of the state columns of one number a slot.
        column_rules: how each is kept up to date: `sum`, `squares`, `max`, `min`, `last`, `ema`, `token`, `fold` or `prune`.
        bounded: whether the policy ever evicts.
        group: how a group's query heads are reduced: `mean`, `max` or `sum`; `each`: they are not, and every one selects for itself.
        reads_attention: whether the policy looks at attention at all; one that does not is served by any attention.
        torch_kernels: the generated torch functions (`kvdsl.runtime.torch.backend` documents them).
        cpu_source: the generated C++ file; there is none where the policy has no C++ form.
        triton_source: the generated Triton kernels, likewise.
        rings: name and size (the name of a number) of every column that holds what the newest queries gave, one by one.
        when: the phase in which the policy evicts: `both`, `prefill` or `decode`.
        victims: who must agree on the victims: `own` (each KV head by itself), a layer's `heads`, or the heads of all `layers`.
        across: whether a layer's KV heads may keep unequally many tokens of one budget.
        across_layers: how the layers share their budgets once all have seen the prompt: each gets `shares` by what it is worth, or
            all heads of all layers are one `pool`; or not at all, the default.
        heads_differ: whether the numbers of a layer's KV heads differ, because they read tensors; `resolve` gives [batch, kv_heads] each.
        measures: whether the budget reads the data: `torch_kernels.budget` finds it at a settle, and it cannot exceed `capacity`.
        counts: whether the number of selected tokens does: `torch_kernels.count`.
        weighs: whether what it attends to counts by a weight: `torch_kernels.weight`.
        overprotects: whether more tokens may be protected than the budget keeps, as by `keep where` and `keep top`.
        hard_cap: whether room is made before a token is placed.
        selects: whether a decoded token attends to a selection only.
        reuses: whether layers take over what another one's queries choose; `chooser` is its number then.
        heads_vote: whether what a token attends to is chosen by what all KV heads of a layer find.
        bounds_pages: whether kernels keep the smallest and largest key of every page, by which a token selects.
        sketches: whether the policy looks at a few dims of keys and queries, which it chooses anew from time to time.
        compact: whether a key's rotary position is its rank among the live slots.
        rotates: whether an expression asks how keys are rotated. `reads_text`: whether the score reads all queries of the prompt.
        rope_cached: whether a key's rotated half is kept beside it. block: how many slots lie together in a block, 0: they lie in
            place; None: as the number `block` says, if there is one. kv_dtype: what keys and values are stored in. These are options of a
            cache, and what a package has is their default.
        vectors: whether the torch kernels compute something for every query, slot and dim, so that they take fewer queries at once.
        tensors: what the policy reads of files, or None. `tensors_of_values`: whether their dims stand beside those of values.
        supplied: the values of each token that the caller gives, and their defaults, None where there is none.
        spans: what the caller marks, and the columns that say which tokens lie in it; of `supplied`, as is what the cache hears itself
            of a token, `hears`.
        settles_turns: whether tokens may leave when a turn ends.
        torch_evicts: whether C++ decodes and torch evicts, because C++ lacks something of the score or of what protects.
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
        """Whether it asks what only a cache is told: spans of the text, and turns."""
        return bool(self.spans or self.hears or "turns" in self.numbers)

    @property
    def observes(self) -> bool:
        """Whether there is a column that what queries give is folded into, a block of them at once."""
        return bool(self.rings or set(self.column_rules) - {"token", "fold", "prune"})

    @property
    def remembers_prompts(self) -> bool:
        """Whether rings tell of the queries of the prompt that is being read; see `kvdsl.ir.nodes.Policy`."""
        return self.when == "prefill" and not self.selects

    @property
    def forgets(self) -> bool:
        """Whether all that it knows of queries goes with the prompt that they are of."""
        return self.remembers_prompts and bool(self.rings) and set(self.column_rules) <= {"token"}

    @property
    def agreement(self) -> str | None:
        """What the KV heads of a layer decide together, as a verb and what follows; None if each decides by itself."""
        if self.across or self.across_layers:
            return "share a budget"
        if self.victims != "own":
            return "agree on who leaves"
        return "choose together what to attend to" if self.heads_vote else None

    @property
    def in_blocks(self) -> bool:
        """Whether slots lie in blocks."""
        return "block" in self.numbers if self.block is None else self.block > 0

    def laid_out(self, storage: str | None = None, rope: str | None = None, kv_dtype: str | None = None) -> PolicySpec:
        """The policy in a cache that lies in memory as these options say; None: as it does.

        Raises:
            KvdslError: if an option says nothing that there is, or nothing that this policy can have.
        """
        block = self.block if storage is None else slots_of_a_block(storage)
        cached = self.rope_cached if rope is None else keeps_halves(rope, self.name, compact=self.compact)
        return self.with_memory((block, cached, rounds_to(kv_dtype or self.kv_dtype, self.name, halves=cached)))

    def without(self, target: str) -> str:
        """Why there are no kernels for `cpu` or `triton`, what that costs, and what to write instead, as the package's manifest says."""
        try:
            manifest = json.loads(self.cpu_source.with_name("manifest.json").read_text(encoding="utf-8"))
            return str(manifest["without"][target])
        except (OSError, ValueError, KeyError, TypeError):
            return f"there are no {'C++' if target == 'cpu' else 'Triton'} kernels in its package (`kvdsl explain` says why)"

    @property
    def memory(self) -> Memory:
        """`block`, `rope_cached` and `kv_dtype`: how a cache lies in memory."""
        return self.block, self.rope_cached, self.kv_dtype

    def with_memory(self, memory: Memory) -> PolicySpec:
        """The policy in a cache that lies so."""
        block, cached, kv_dtype = memory
        return self if memory == self.memory else replace(self, block=block, rope_cached=cached, kv_dtype=kv_dtype)

    def __post_init__(self) -> None:
        if self.abi != ABI:
            raise ImportError(
                f"the generated package `{self.stem}` was made for runtime interface {self.abi}, this kvdsl has {ABI}: "
                f"run `kvdsl compile` on its .kv file again"
            )
