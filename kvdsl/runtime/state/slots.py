"""The slots of one layer: fixed tensors that hold what is cached, and the numbers that the policy reads."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.lifetimes import Linked, plain_tensors
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.columns import ColumnIndex
from kvdsl.runtime.state.layout import Layout, SlotAfterSlot
from kvdsl.runtime.state.order import FREE, in_text_order, ranks, text_order
from kvdsl.runtime.state.packed import dims_of, pack, unpack
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
from kvdsl.runtime.tensors import NO_CONSTANTS, Constants


class SlotState(Linked):
    """What one layer has cached.

    Keys and values are in its `layout`. Tensors beside them (N slots per KV head; allocated at the end of a prompt, and again before the
    next one only while the cache `grows`):
        position [batch, kv_heads, N] int32: the token's place in the row's text, padding excluded; -1 is a free slot.
        columns [rows, batch, kv_heads, N] float32: the policy's state columns, a row each, and behind them every ring's rows.
        seen [batch] int32: the row's tokens so far, padding excluded: the position of its next token.
        numbers [batch, len(spec.numbers)] float64: the policy's numbers per row; [batch, kv_heads, len(spec.numbers)] where heads differ.
    A policy that sketches has two more:
        sketch [batch, kv_heads, D] int32: the dims that it looks at, ascending; -1 where a row has fewer than D.
        prompt [batch] int32: the row's tokens up to its last prompt's end, padding excluded.
    What a backend may keep beside the keys (`copies`), made from them and empty until it is:
        sketch_keys [batch, kv_heads, tiles, D, tile] in the model's dtype: the keys over the sketch's dims.
        page_bounds [batch, kv_heads, pages, 2, key_dim], of a policy with pages: the smallest and largest key of every page.
        copied [batch] int32: 1 where these hold what the row's keys are. It lies with them, because a step in a graph cannot tell
            the next one otherwise.
    One with compact positions:
        rank [batch, kv_heads, N] int32: how many live slots of the head hold an earlier token; -1 where the slot is free.
        length [batch, kv_heads, 1] int32, of backends that cannot count while they attend; empty until it is counted: how many tokens
            the head holds.
    One with `rope cached`, of backends that read it; empty until it is made from the keys:
        half_keys [batch, kv_heads, N, rotated dims] in the model's dtype: `Rope.rotate_half` of the keys.
    And one that reads tensors of files:
        constants [tensors, kv_heads, key_dim] float32: what they have for this layer, in the order of the policy's `tensor` lines; a matrix
            has a row for each of its `rank`.

    Attributes:
        layout: where keys and values lie. room: how many slots there are to be. column_index: which rows of `columns` hold what.
        declared: every tensor, the layout's among them, by name.
        evicts: whether a decoded token may make others leave.
        selects: whether a decoded token attends to a selection only.
        even: whether every head of every row comes to fill its slots, all but a few: kernels then read them without asking which.
        paged: for how many slots there is room for bounds of pages, 0 for none.
        window: how many tokens a query of this layer sees, or None. `scaling`, `rope`: as the last call had them.
        text: the queries of the prompt that has not settled yet, forward by forward, [batch, query_heads, tokens, dim], and their
            places, int32 [batch, tokens], FREE for padding; for a score that reads them.
        prompt_from: the places of the first tokens of the prompt that has not settled yet, int32 [batch, 1, 1], where the policy
            remembers the queries of that prompt alone; None elsewhere, and between prompts.
        processes: over how many the layer's KV heads are spread; these are from `head_offset` on.
        together: the layers that agree on their victims, or None where this one decides by itself.
        choices: what the layer chooses for those above, or takes over from one below; None where it does neither.
        warned: of what somebody was warned, the layers of one cache together.
        workspace: what a backend works in from token to token, with its `tensors` by name, or None; nothing of it is part of the
            cache.
        expected: tokens that a row's prompt counts as at least, because more of it will come.
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
    constants: Tensor
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
        """The same with tensors of its own; of the same policy."""
        memo[id(self.spec)] = self.spec
        return super().__deepcopy__(memo)

    def follow(self, spec: PolicySpec) -> None:
        """Serve this policy, the one that it served before it was pickled."""
        self.spec = self.settings.spec = spec

    def lay_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Have the end of the first prompt be written into these, by name, as far as they have the shapes that it takes."""
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
        """Serve what another state of the same policy has cached, which is allocated and does not grow.

        Args:
            tensors: its tensors by name.
        """
        self.lay_into(tensors)
        self.window, self.evicts, self.selects, self.even = window, evicts, selects, even
        self.column_index.ring_sizes = ring_sizes
        self.allocated = True
        self.paged = self.slots

    def reset(self) -> None:
        """Forget everything; the next forward allocates anew."""
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
        """Whether the slots never grow while decoding; before the prompt is known, whether they will not for a long one."""
        return not self.room.grows if self.allocated else self.room.stays_fixed()

    # -- numbers -------------------------------------------------------------------------------------------------------

    def resolve_after(self, seen: Tensor, known: Tensor | None = None) -> Tensor:
        """The policy's table of numbers after a forward of a prompt: the prompt is all of a row's text so far.

        Args:
            seen: int32 [batch], the rows' tokens, the new ones included; a row to which none came keeps its numbers.
            known: the same on the CPU, if the host knows them.

        Raises:
            KvdslError: as `resolve` does.
        """
        numbers = self.settings.resolve((seen if known is None else known).clamp(min=self.expected), seen.device)
        came = (seen > self.seen).view(-1, *(1,) * (numbers.dim() - 1)) if self.allocated else None
        return numbers if came is None else torch.where(came, numbers, self.numbers)

    # -- constants -----------------------------------------------------------------------------------------------------

    def read_constants(self, key: Tensor, value: Tensor) -> None:
        """Read what the policy's tensors have for this layer, once: for keys and values like these, [batch, kv_heads, tokens, dim].

        Raises:
            KvdslError: if they were made for another model, or if their file is another than it was.
        """
        if self.spec.tensors is None or self.constants.shape != NOTHING.shape:
            return
        if self.spec.tensors_of_values and key.shape[3] != value.shape[3]:
            raise KvdslError(
                f"{self.spec.name} multiplies values by tensors that have a number for every dim of a key, but keys have {key.shape[3]} "
                f"dims and values {value.shape[3]}"
            )
        heads = slice(self.head_offset, self.head_offset + key.shape[1])
        sizes = {
            "layers": self.settings.layers,
            "heads": max(heads.stop, key.shape[1] * self.processes),
            "dims": key.shape[3],
        }
        self.constants = self.spec.tensors.rows(self.layer, sizes, heads).to(key.device)
        self.settings.heads = heads

    def constants_of(self, heads: slice = slice(None)) -> Constants:
        """What the policy's tensors have for some of the KV heads."""
        if self.spec.tensors is None:
            return NO_CONSTANTS
        return Constants({name: rows[heads] for name, rows in self.spec.tensors.by_name(self.constants).items()})

    # -- storage -------------------------------------------------------------------------------------------------------

    def store(self, kept: dict[str, Tensor], seen: Tensor, numbers: Tensor, staying: tuple[int, int] | None = None) -> None:
        """Fill the slots with what was kept at the end of a prompt, in text order; they are allocated unless as many are there.

        Args:
            kept: `keys`, `values`, `position` and `columns` over any number of slots; what leaves has a FREE position.
            staying: how many tokens the emptiest and the fullest head keep of a text that is in order; None: only the device knows.
        """
        position = kept["position"]
        filled = int((position >= 0).sum(-1).max()) if staying is None else staying[1]
        numbers = self._after_prompt(numbers)
        slots = self.room.plan(numbers, filled, position.device, evicts=self.evicts)
        if self.spec.sketches:
            self.prompt = holding(self.prompt, torch.where(seen > self.seen, seen, self.prompt) if self.allocated else seen)
        self.seen, self.numbers = holding(self.seen, seen), holding(self.numbers, numbers)
        self.even = self.room.is_even(numbers)
        self.paged = 0
        tidy = position.shape[-1] <= slots and (
            in_text_order(position) if staying is None else staying[0] == position.shape[-1]
        )
        order = None if tidy else text_order(position)[..., :slots]
        self._allocate(kept, order, slots)
        if self.packed:
            kept = kept | {name: kept[rows] for name, rows in zip(("keys", "values"), PACKED, strict=True)}
        self.layout.lay_out(self, kept, order)
        self.forget_copies()
        self.allocated = True
        if not self.room.grows:
            stays_where_it_is(*self.tensors().values())

    def _after_prompt(self, numbers: Tensor) -> Tensor:
        """The numbers from here on: a policy that evicts in the prompt only has no bound any more."""
        self.evicts = self.spec.bounded and self.settings.table(numbers).evicts
        if self.spec.bounded and self.spec.when == "prefill":
            self.evicts, numbers = False, numbers.clone()
            numbers[..., self.spec.numbers.index("capacity")] = torch.inf
        chooses = not self.spec.reuses or (self.choices is not None and self.choices.chooser == self.layer)
        self.selects = self.spec.selects and chooses and self.settings.table(numbers).selects
        return numbers

    def make_room(self, tokens: int) -> None:
        """Before `tokens` more are placed: a cache that grows does so when it is full."""
        room = self.room
        if not room.grows:
            return
        room.filled += tokens
        if room.shrinks and room.filled > self.slots:  # what a budget that reads the data has made room for
            room.filled = int((self.position >= 0).sum(-1).max()) + tokens
        if room.filled > self.slots:
            with plain_tensors():
                self.extend(room.grown())
        if room.grows:
            self.layout.make_room(self, tokens)

    def reserve(self) -> None:
        """Allocate all slots that will ever be needed: now, and at the end of every prompt to come."""
        self.room.reserve()
        if self.allocated and self.room.grows:
            with plain_tensors():
                self.extend()

    def extend(self, slots: int | None = None) -> None:
        """Have so many slots per KV head, where there is a limit no more than are enough for ever: as many, if nothing else is said."""
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
        """Positions, columns and ranks of `slots` slots that begin with the kept ones, in `order` if it is given."""
        self.position = in_slots("position", self.position, kept["position"], order, slots, FREE)
        self.columns = in_slots("columns", self.columns, kept["columns"], order, slots)
        if self.spec.compact:
            self.rank = holding(self.rank, ranks(self.position))

    def forget_copies(self, *, halves: bool = True) -> None:
        """What was made from keys and positions no longer holds: whoever reads it makes it anew.

        Args:
            halves: the rotated halves, too.
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
    def packed(self) -> bool:
        """Whether keys and values are stored in another dtype than the model's; all that is computed with them is float32 then."""
        return self.spec.kv_dtype != "model"

    @property
    def dtype(self) -> torch.dtype:
        """What keys and values are computed with."""
        return torch.float32 if self.packed else self.layout.dtype

    @property
    def dims(self) -> tuple[int, int]:
        """Dims of a key, and of a value."""
        key, value = self.layout.key_pool.shape[-1], self.layout.value_pool.shape[-1]
        return (dims_of(key, self.spec.kv_dtype), dims_of(value, self.spec.kv_dtype)) if self.packed else (key, value)

    @property
    def keys(self) -> Tensor:
        """[batch, kv_heads, slots, key_dim]; a copy, where the layout is another than slot after slot, or stores them packed."""
        return self.read(self.layout.keys(self.slots))

    @property
    def values(self) -> Tensor:
        """[batch, kv_heads, slots, value_dim]; likewise."""
        return self.read(self.layout.values(self.slots))

    def rows_of(self, vectors: Tensor) -> Tensor:
        """Keys or values as the layout stores them, [..., dim]."""
        return pack(vectors, self.spec.kv_dtype) if self.packed else vectors

    def packed_rows(self, key: Tensor, value: Tensor) -> dict[str, Tensor]:
        """The rows of both by name, as in `PACKED`; nothing where they are stored as they are."""
        return dict(zip(PACKED, (self.rows_of(key), self.rows_of(value)), strict=True)) if self.packed else {}

    def read(self, rows: Tensor) -> Tensor:
        """What is stored, [..., dim], as keys or values."""
        return unpack(rows, self.spec.kv_dtype) if self.packed else rows

    @property
    def declared(self) -> dict[str, Declared]:
        """What is declared of every tensor, the layout's first."""
        return {one.name: one for one in self.layout.DECLARED} | self._own

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, in the order of `declared`."""
        return self.layout.tensors() | {name: getattr(self, name) for name in self._own}

    def check_fits(self, key: Tensor, value: Tensor, rows: int, heads: int) -> None:
        """Raise KvdslError for new keys and values of another dtype or size than the cached ones: kernels get bare pointers.

        Args:
            rows: how many are served. heads: KV heads.
        """
        found = [(x.dtype, tuple(x.shape[:2]), x.shape[-1]) for x in (key, value)]
        if found != [(self.dtype, (rows, heads), dims) for dims in self.dims]:
            raise KvdslError("the new keys and values have another dtype or size than the cached ones; call `reset()`")

    def in_slots(self) -> dict[str, Tensor]:
        """What has slots one after the other, as in `SLOT_DIM`; and as in `PACKED`, where keys and values are."""
        if not self.packed:
            return {name: getattr(self, name) for name in SLOT_DIM}
        rows = dict(zip(PACKED, (self.layout.keys(self.slots), self.layout.values(self.slots)), strict=True))
        read = {"keys": self.read(rows["key_rows"]), "values": self.read(rows["value_rows"])}
        return {name: read[name] if name in read else getattr(self, name) for name in SLOT_DIM} | rows

    def bytes(self) -> int:
        """What the tensors occupy."""
        return sum(tensor.nbytes for tensor in self.tensors().values()) if self.allocated else 0

    # -- rows ----------------------------------------------------------------------------------------------------------

    def select_rows(self, rows: Tensor) -> None:
        """Make row i what row rows[i] was (beams), in place where the batch keeps its size."""
        if not self.allocated:
            return
        for name, one in self._own.items():
            tensor: Tensor = getattr(self, name)
            if one.batch is not None and tensor.shape != NOTHING.shape:
                setattr(self, name, with_rows(tensor, one.batch, rows))
        self.layout.select_rows(self, rows)


class SameTensors:
    """Tells whether a state's tensors are the objects that they were, so that addresses of them hold. None lives longer for it."""

    def __init__(self, state: SlotState) -> None:
        in_layout = [one.name for one in state.layout.DECLARED]
        self._tensors_of = attrgetter(*(f"layout.{name}" if name in in_layout else name for name in state.declared))
        self._tensors = [weakref.ref(tensor) for tensor in self._tensors_of(state)]

    def holds(self, state: SlotState) -> bool:
        """Whether they are the same objects still."""
        return all(map(is_, self._tensors_of(state), [known() for known in self._tensors]))
