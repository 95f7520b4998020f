"""The slots of one layer: tensors of fixed size with the cached tokens and the policy's numbers."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.forward import read
from kvdsl.runtime.lifetimes import Linked, plain_tensors
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.columns import ColumnIndex
from kvdsl.runtime.state.layout import Layout, SlotAfterSlot
from kvdsl.runtime.state.order import FREE, in_text_order, ranks, text_order
from kvdsl.runtime.state.packed import Format
from kvdsl.runtime.state.room import Room
from kvdsl.runtime.state.settings import Settings
from kvdsl.runtime.state.shared import Choices, Together
from kvdsl.runtime.state.tensors import (
    BY_SLOT,
    EMPTY,
    MARKED,
    NOTHING,
    PACKED,
    SLOT_DIM,
    Declared,
    holding,
    in_slots,
    stays_where_it_is,
    with_rows,
)


class SlotState(Linked):
    """The cache of one layer.

    Keys and values are in `layout`. The other tensors are allocated at the end of a prompt; until the next prompt they are replaced only
    while the cache grows. N is the number of slots per KV head.

    Always:
        position [batch, kv_heads, N] int32: the token's position in the row's text, padding excluded; -1 for a free slot.
        columns [rows, batch, kv_heads, N] float32: a row per state column, then each ring's rows.
        seen [batch] int32: the number of the row's tokens so far, padding excluded: the position of the next token.
        numbers [batch, len(spec.numbers)] float64: the policy's numbers; [batch, kv_heads, len(spec.numbers)] where heads differ.
    Policies that sketch:
        sketch [batch, kv_heads, D] int32: the chosen dims, ascending; -1 where a row has fewer than D.
        prompt [batch] int32: the row's tokens up to the end of its last prompt, padding excluded.
    Derived from keys for kernels (see `copies`), empty until needed:
        sketch_keys [batch, kv_heads, tiles, D, tile] in the model's dtype: the keys at the sketch's dims.
        page_bounds [batch, kv_heads, pages, 2, key_dim]: the smallest and largest key of every page.
        copied [batch] int32: 1 if the two above are up to date in the row. It is a tensor because CUDA graphs cannot keep other state.
    Policies with compact positions:
        rank [batch, kv_heads, N] int32: how many live slots of the head hold an earlier token; -1 for a free slot.
        length [batch, kv_heads, 1] int32: the head's live tokens, for kernels that cannot count them; empty until counted.
    Caches with `rope cached`:
        half_keys [batch, kv_heads, N, rotated dims] in the model's dtype: `Rope.rotate_half` of the keys; empty until needed.
    Policies that read tensors from files:
        constants [rows, kv_heads, key_dim] float32: this layer's part, in the order of the policy's `tensor` lines; see `Tensors.rows`.

    Attributes:
        format: how keys and values are stored.
        layout: where they lie.
        room: plans the number of slots.
        column_index: which rows of `columns` hold what.
        declared: the declaration of every tensor by name, the layout's included.
        evicts: whether a decode step may evict.
        selects: whether a decoded token attends to a selection only.
        even: whether every head comes to fill nearly all slots: kernels then read slots without checking which are live.
        paged: the number of slots that `page_bounds` has room for, 0 for none.
        window: the number of tokens that a query of this layer sees, or None.
        scaling, rope: from the last call.
        text: queries of the prompt that has not settled yet, for scores that read them: per forward [batch, query_heads, tokens, dim] and
            positions, int32 [batch, tokens], FREE for padding.
        prompt_from: position of each row's first token of the prompt that has not settled yet, int32 [batch, 1, 1], if the policy's rings
            hold this prompt only. Otherwise, and between prompts, None.
        processes: the number of processes that share the layer's KV heads. This one serves heads from `head_offset` on.
        together: the layers that evict together with this one, or None.
        choices: the selections that this layer makes for others or reuses, or None.
        warned: warnings already given in this cache.
        workspace: a backend's workspace with its `tensors` by name, or None. It is not part of the cache.
        expected: a lower bound of prompt lengths, for a prompt that comes in parts.
    """

    LINKS = ("spec", "workspace")

    position: Tensor
    columns: Tensor
    seen: Tensor
    numbers: Tensor
    sketch: Tensor = NOTHING
    prompt: Tensor
    rank: Tensor
    length: Tensor
    half_keys: Tensor
    constants: Tensor = NOTHING
    sketch_keys: Tensor
    page_bounds: Tensor
    copied: Tensor

    window: int | None

    def __init__(
        self,
        spec: PolicySpec,
        params: Mapping[str, float | None],
        *,
        layout: Layout | None = None,
        layer: int = 0,
        layers: int = 1,
        head_offset: int = 0,
        seed: int = 0,
    ) -> None:
        self.spec = spec
        self.format = Format(spec.kv_dtype)
        self.layout = SlotAfterSlot() if layout is None else layout
        self.settings = Settings(spec, params, layer, layers)
        self.room = Room(self.settings)
        self.column_index = ColumnIndex(spec)
        self.layer = layer
        self.head_offset = head_offset
        self.processes = 1
        self.seed = seed
        self.together: Together | None = None
        self.choices: Choices | None = None
        self.warned: set[str] = set()
        self._own = {one.name: one for one in BY_SLOT if one.of(spec)}
        self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> SlotState:
        """Copy the tensors, not the policy."""
        memo[id(self.spec)] = self.spec
        return super().__deepcopy__(memo)

    def follow(self, spec: PolicySpec) -> None:
        """Restore the policy after unpickling."""
        self.spec = self.settings.spec = spec

    def lay_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Set tensors by name. The end of the first prompt is written into those of matching shape."""
        for name, tensor in tensors.items():
            setattr(self if name in self._own else self.layout, name, tensor)

    def adopt(
        self,
        tensors: Mapping[str, Tensor],
        *,
        window: int | None,
        ring_sizes: tuple[int, ...],
        evicts: bool,
        selects: bool,
        even: bool,
    ) -> None:
        """Serve the tensors of another state of the same policy that is allocated and of fixed size.

        Args:
            tensors: its tensors by name.
        """
        self.lay_into(tensors)
        self.window, self.evicts, self.selects, self.even = window, evicts, selects, even
        self.column_index.ring_sizes = ring_sizes
        self.allocated = True
        self.paged = self.slots

    def reset(self) -> None:
        """Drop everything. The next forward allocates tensors."""
        self.allocated = False
        self.room.forget()
        self.evicts = False
        self.selects = False
        self.even = False
        self.paged = 0
        self.window = None
        self.scaling = 1.0
        self.rope: Rope | None = None
        self.text: list[tuple[Tensor, Tensor]] = []
        self.prompt_from: Tensor | None = None
        self.column_index.ring_sizes = ()
        self.workspace: Any = None
        self.expected = 0
        self.settings.turns = 0
        for name in self._own:
            setattr(self, name, NOTHING)
        self.layout.forget()
        if self.together is not None:
            self.together.forget()

    def stays_fixed(self) -> bool:
        """Whether the slots never grow while decoding. Before the first prompt: whether that holds for any prompt."""
        return not self.room.grows if self.allocated else self.room.stays_fixed()

    # -- numbers -------------------------------------------------------------------------------------------------------

    def resolve_after(self, seen: Tensor, lengths: Tensor, *, all_come: bool) -> Tensor:
        """Return the policy's numbers after a forward of a prompt. The prompt is the row's whole text so far.

        Args:
            seen: int32 [batch], tokens per row, the new ones included. A row without new tokens keeps its numbers.
            lengths: the same on the CPU.
            all_come: whether every row has new tokens.

        Raises:
            KvdslError: as `Settings.resolve` does.
        """
        numbers = self.settings.resolve(lengths.clamp(min=self.expected), seen.device)
        if all_come or not self.allocated:
            return numbers
        return torch.where((seen > self.seen).view(-1, *(1,) * (numbers.dim() - 1)), numbers, self.numbers)

    # -- storage -------------------------------------------------------------------------------------------------------

    def store(self, kept: dict[str, Tensor], seen: Tensor, numbers: Tensor, staying: tuple[int, int] | None = None) -> None:
        """Fill the slots, in text order, with the tokens kept at the end of a prompt. Tensors of the right shape are reused.

        Args:
            kept: `keys`, `values`, `position` and `columns` over any number of slots; FREE is the position of an evicted token. If it
                has `order`, that is their `text_order`.
            staying: the fewest and the most tokens that a head keeps of a text in order; None if only the device knows.
        """
        position = kept["position"]
        if staying is None:
            filled, in_order = map(int, read([(position >= 0).sum(-1).max(), in_text_order(position)]))
        else:
            filled, in_order = staying[1], staying[0] == position.shape[-1]
        numbers, self.evicts = self.settings.while_decoding(numbers)
        chooses = not self.spec.reuses or (self.choices is not None and self.choices.chooser == self.layer)
        self.selects = self.spec.selects and chooses and self.settings.table(numbers).selects
        slots = self.room.plan(numbers, filled, position.device, evicts=self.evicts)
        if self.spec.sketches:
            self.prompt = holding(self.prompt, torch.where(seen > self.seen, seen, self.prompt) if self.allocated else seen)
        self.seen, self.numbers = holding(self.seen, seen), holding(self.numbers, numbers)
        self.even = self.room.is_even(numbers)
        self.paged = 0
        order = None
        if not in_order or position.shape[-1] > slots:
            order = (kept["order"] if "order" in kept else text_order(position))[..., :slots]
        self._allocate(kept, order, slots)
        if self.format.packed:
            kept = kept | {name: kept[rows] for name, rows in zip(("keys", "values"), PACKED, strict=True)}
        self.layout.lay_out(self, kept, order)
        self.forget_copies()
        self.allocated = True
        if not self.room.grows:
            stays_where_it_is(*self.tensors().values())

    def make_room(self, tokens: int) -> None:
        """Grow, if needed, before `tokens` more are placed."""
        room = self.room
        if not room.grows:
            return
        room.filled += tokens
        if room.shrinks and room.filled > self.slots:  # budgets that depend on the data may have freed slots
            room.filled = int((self.position >= 0).sum(-1).max()) + tokens
        if room.filled > self.slots:
            with plain_tensors():
                self.extend(room.grown())
        if room.grows:
            self.layout.make_room(self, tokens)

    def reserve(self) -> None:
        """Allocate all slots that can be needed, now and at the end of every later prompt."""
        self.room.reserve()
        if self.allocated and self.room.grows:
            with plain_tensors():
                self.extend()

    def extend(self, slots: int | None = None) -> None:
        """Grow to `slots` per KV head, at most the limit. None means the limit."""
        limit = self.room.limit
        slots = limit if slots is None else slots if limit is None else min(slots, limit)
        if slots is None:
            return
        held = self.position >= 0
        self._allocate({"position": self.position, "columns": self.columns}, None, slots)
        self.room.grows = slots != limit
        self.layout.grow(self, held)
        self.forget_copies()

    def _allocate(self, kept: Mapping[str, Tensor], order: Tensor | None, slots: int) -> None:
        """Allocate positions, columns and ranks for `slots` slots that begin with the kept ones, in `order` if given."""
        self.position = in_slots("position", self.position, kept["position"], order, slots, FREE)
        self.columns = in_slots("columns", self.columns, kept["columns"], order, slots)
        if self.spec.compact:
            self.rank = holding(self.rank, ranks(self.position))

    def forget_copies(self, *, halves: bool = True) -> None:
        """Invalidate the tensors derived from keys and positions. Their readers rebuild them.

        Args:
            halves: also the rotated halves.
        """
        batch, heads, _ = self.position.shape
        for name in EMPTY.keys() & self._own.keys():
            old, shape = getattr(self, name), (batch, heads, *EMPTY[name])
            if old.shape == shape or (name == "half_keys" and not halves) or (name in MARKED and old.numel()):
                continue
            dtype = self.position.dtype if name == "length" else self.dtype
            setattr(self, name, self.position.new_empty(shape, dtype=dtype))
        if "copied" in self._own:
            self.copied = holding(self.copied, self.position.new_zeros(batch))

    @property
    def slots(self) -> int:
        """Slots per KV head."""
        return self.position.shape[-1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of computations with keys and values."""
        return torch.float32 if self.format.packed else self.layout.dtype

    @property
    def dims(self) -> tuple[int, int]:
        """Dims of a key and of a value."""
        key, value = self.layout.key_pool.shape[-1], self.layout.value_pool.shape[-1]
        return self.format.dims(key, value)

    @property
    def keys(self) -> Tensor:
        """[batch, kv_heads, slots, key_dim]; a copy if they are packed or not in slot order."""
        return self.format.keys(self.layout.keys(self.slots))

    @property
    def values(self) -> Tensor:
        """[batch, kv_heads, slots, value_dim]; a copy if they are packed or not in slot order."""
        return self.format.values(self.layout.values(self.slots))

    @property
    def declared(self) -> dict[str, Declared]:
        """Declarations by name, the layout's first."""
        return {one.name: one for one in self.layout.DECLARED} | self._own

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by name, in the order of `declared`."""
        return self.layout.tensors() | {name: getattr(self, name) for name in self._own}

    def check_fits(self, key: Tensor, value: Tensor, rows: int, heads: int) -> None:
        """Raise KvdslError if new keys and values differ in dtype or size from the cached ones: kernels receive bare pointers.

        Args:
            rows: rows of the batch.
            heads: KV heads.
        """
        found = [(x.dtype, tuple(x.shape[:2]), x.shape[-1]) for x in (key, value)]
        if found != [(self.dtype, (rows, heads), dims) for dims in self.dims]:
            raise KvdslError("the new keys and values have another dtype or size than the cached ones; call `reset()`")

    def in_slots(self) -> dict[str, Tensor]:
        """Return the tensors in slot order, named in `SLOT_DIM`; with packed rows also those in `PACKED`."""
        if not self.format.packed:
            return {name: getattr(self, name) for name in SLOT_DIM}
        rows = dict(zip(PACKED, (self.layout.keys(self.slots), self.layout.values(self.slots)), strict=True))
        read = {"keys": self.format.keys(rows["key_rows"]), "values": self.format.values(rows["value_rows"])}
        return {name: read[name] if name in read else getattr(self, name) for name in SLOT_DIM} | rows

    def bytes(self) -> int:
        """Return the size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors().values()) if self.allocated else 0

    # -- rows ----------------------------------------------------------------------------------------------------------

    def select_rows(self, rows: Tensor) -> None:
        """Replace row i by row rows[i] (beam search), in place if the batch keeps its size."""
        if not self.allocated:
            return
        for name, one in self._own.items():
            tensor: Tensor = getattr(self, name)
            if one.batch is not None and tensor.shape != NOTHING.shape:
                setattr(self, name, with_rows(tensor, one.batch, rows))
        self.layout.select_rows(self, rows)


class SameTensors:
    """Detect whether a state's tensors are still the same objects, so that cached addresses are valid. Holds weak references."""

    def __init__(self, state: SlotState) -> None:
        in_layout = [one.name for one in state.layout.DECLARED]
        self._tensors_of = attrgetter(*(f"layout.{name}" if name in in_layout else name for name in state.declared))
        self._tensors = [weakref.ref(tensor) for tensor in self._tensors_of(state)]

    def holds(self, state: SlotState) -> bool:
        """Whether all tensors are the same objects as before."""
        return all(map(is_, self._tensors_of(state), [known() for known in self._tensors]))
