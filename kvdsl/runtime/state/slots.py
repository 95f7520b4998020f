"""The slots of one layer: fixed tensors that hold what is cached, and the numbers that the policy reads."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.linked import Linked
from kvdsl.runtime.plain import plain_tensors
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state import copies
from kvdsl.runtime.state.choices import Choices
from kvdsl.runtime.state.layout import Layout, SlotAfterSlot
from kvdsl.runtime.state.order import FREE, close_gaps, in_text_order, ranks, text_order
from kvdsl.runtime.state.settings import Settings
from kvdsl.runtime.state.tensors import (
    BY_SLOT,
    NOTHING,
    SLOT_DIM,
    Declared,
    holding,
    in_slots,
    stays_where_it_is,
    with_rows,
)

if TYPE_CHECKING:
    from kvdsl.runtime.torch.eviction import Together

AT_ONCE = 1024
"""Slots per KV head that are allocated at the end of a prompt without need, where they are enough for ever."""

_GROWTH = 64
"""A cache that grows has a multiple of this many slots."""

_ALIGNED = 16
"""And so has one on an accelerator of this many: then every head's row of positions and columns begins where a vector may, and Triton
reads several slots at once. An odd number of them costs `settle` 88 registers in place of 64, and twice as many instructions."""


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
        layout: where keys and values lie.
        declared: every tensor, the layout's among them, by name.
        evicts: whether a decoded token may make others leave.
        selects: whether a decoded token attends to a selection only.
        even: whether every head of every row comes to fill its slots, all but a few: kernels then read them without asking which.
        paged: for how many slots there is room for bounds of pages, 0 for none.
        ring_sizes: rows of each ring.
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
        filled: slots that a KV head may need by now, tokens of every row and padding counted; a cache that grows goes by it.
        limit: slots per KV head that are enough for ever, or None where nothing is.
        longest: tokens of the longest text that will come, where somebody knows: slots for these are enough under any policy.
        grows: whether the slots are fewer than that.
        reserves: whether as many as that are allocated as soon as the prompt ends, however short it was. Accelerators, whose graphs
            want tensors that stay where they are, always do.
    """

    LINKS = ("spec", "workspace")

    position: Tensor
    columns: Tensor
    seen: Tensor
    numbers: Tensor
    sketch: Tensor
    prompt: Tensor
    rank: Tensor
    length: Tensor
    half_keys: Tensor
    constants: Tensor
    sketch_keys: Tensor
    page_bounds: Tensor
    copied: Tensor

    window: int | None
    ring_sizes: tuple[int, ...]

    def __init__(
        self,
        spec: PolicySpec,
        given: Mapping[str, float | None],
        *,
        layout: Layout | None = None,
        layer: int = 0,
        layers: int = 1,
        head_offset: int = 0,
        seed: int = 0,
    ) -> None:
        self.spec = spec
        self.layout = SlotAfterSlot() if layout is None else layout
        self.settings = Settings(spec, given, layer, layers)
        self.layer = layer
        self.head_offset = head_offset
        self.processes = 1
        self.seed = seed
        self.together: Together | None = None
        self.choices: Choices | None = None
        self.warned: set[str] = set()
        self.reserves = False
        self.longest: int | None = None
        self._fixed: bool | None = None
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
        self.window, self.ring_sizes, self.evicts, self.selects, self.even = window, ring_sizes, evicts, selects, even
        self.allocated = True
        self.paged = self.slots

    def reset(self) -> None:
        """Forget everything; the next forward allocates anew."""
        self.allocated = False
        self.grows = False
        self.limit: int | None = None
        self.evicts = False
        self.selects = False
        self.even = False
        self.paged = 0
        self.window = None
        self.scaling = 1.0
        self.rope: Rope | None = None
        self.text: list[tuple[Tensor, Tensor]] = []
        self.prompt_from: Tensor | None = None
        self.ring_sizes = ()
        self.workspace: Any = None
        self.expected = 0
        self.filled = 0
        for name in self._own:
            setattr(self, name, NOTHING)
        self.layout.forget()
        if self.together is not None:
            self.together.forget()

    def begin_again(self) -> None:
        """Forget the prompt that has just been read, the first, as if it had not come; where it is to be laid stays."""
        expected, tensors = self.expected, self.tensors()
        self.reset()
        self.expected = expected
        self.lay_into(tensors)

    @property
    def bounded(self) -> bool:
        """Whether the policy ever evicts."""
        return self.spec.bounded

    def stays_fixed(self) -> bool:
        """Whether the slots never grow while decoding; before the prompt is known, whether they will not for a long one."""
        if self.allocated:
            return not self.grows
        if self._fixed is None:
            self._fixed = self._would_stay_fixed()
        return self._fixed

    def _would_stay_fixed(self) -> bool:
        most = self.settings.bounded_by()
        return most is not None and (self.reserves or bool((most <= AT_ONCE).all()))

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

    def constants_of(self, heads: slice = slice(None)) -> dict[str, Tensor]:
        """What the policy's tensors have for some of the KV heads, by name: float32 [heads, (rank,) key_dim]."""
        if self.spec.tensors is None:
            return {}
        return {name: rows[heads] for name, rows in self.spec.tensors.by_name(self.constants).items()}

    # -- columns -------------------------------------------------------------------------------------------------------

    def size_rings(self, numbers: Tensor) -> None:
        """Find how many rows each ring needs: as many as the row with the longest history.

        Raises:
            KvdslError: if a history that is cached already has another size.
        """
        sizes = [self.settings.table(numbers).named[size] for _, size in self.spec.rings]
        if self.allocated:
            known = [self.settings.named(self.numbers.cpu())[size] for _, size in self.spec.rings]
            if any(bool((old != new).any()) for old, new in zip(known, sizes, strict=True)):
                raise KvdslError(
                    f"{self.spec.name} remembers a number of queries that depends on the prompt, and more of a prompt came: pass "
                    f"the prompt in one forward, and call `cache.reset()` before a later one"
                )
        self.ring_sizes = tuple(_whole(float(size.max()), "queries to remember") for size in sizes)

    @property
    def column_rows(self) -> int:
        """Rows of `columns`."""
        return len(self.spec.columns) + sum(self.ring_sizes)

    def single_columns(self, columns: Tensor) -> dict[str, Tensor]:
        """The columns of one number a slot by name, [batch, kv_heads, slots] each, as views of a table of columns."""
        return dict(zip(self.spec.columns, columns[: len(self.spec.columns)], strict=True))

    def rings(self, columns: Tensor) -> dict[str, Tensor]:
        """The rings by name, [size, batch, kv_heads, slots] each, as views of a table of columns; none if they went with the prompt."""
        if len(columns) < self.column_rows:
            return {}
        parts = columns[len(self.spec.columns) :].split(list(self.ring_sizes)) if self.ring_sizes else ()
        return {name: part for (name, _), part in zip(self.spec.rings, parts, strict=True)}

    def ring_rows(self) -> Tensor:
        """The row of `columns` with which each ring begins, int32 [rings]."""
        starts = accumulate(self.ring_sizes[:-1], initial=len(self.spec.columns)) if self.ring_sizes else ()
        return torch.tensor(list(starts), dtype=torch.int32, device="cpu")

    # -- storage -------------------------------------------------------------------------------------------------------

    def store(self, kept: dict[str, Tensor], seen: Tensor, numbers: Tensor, staying: tuple[int, int] | None = None) -> None:
        """Fill the slots with what was kept at the end of a prompt, in text order; they are allocated unless as many are there.

        Args:
            kept: `keys`, `values`, `position` and `columns` over any number of slots; what leaves has a FREE position.
            staying: how many tokens the emptiest and the fullest head keep of a text that is in order; None: only the device knows.
        """
        position = kept["position"]
        self.filled = int((position >= 0).sum(-1).max()) if staying is None else staying[1]
        numbers = self._after_prompt(numbers)
        self.limit = self._limit(numbers, position.device)
        slots = self._first_slots(position.device)
        self.grows = slots != self.limit
        if self.spec.sketches:
            self.prompt = holding(self.prompt, torch.where(seen > self.seen, seen, self.prompt) if self.allocated else seen)
        self.seen, self.numbers = holding(self.seen, seen), holding(self.numbers, numbers)
        self.even = self._is_even(numbers)
        self.paged = 0
        tidy = position.shape[-1] <= slots and (
            in_text_order(position) if staying is None else staying[0] == position.shape[-1]
        )
        order = None if tidy else text_order(position)[..., :slots]
        self._allocate(kept, order, slots)
        self.layout.lay_out(self, kept, order)
        self._forget_copies()
        self.allocated = True
        if not self.grows:
            stays_where_it_is(*self.tensors().values())

    def _after_prompt(self, numbers: Tensor) -> Tensor:
        """The numbers from here on: a policy that evicts in the prompt only has no bound any more."""
        self.evicts = self.bounded and self.settings.table(numbers).evicts
        if self.bounded and self.spec.when == "prefill":
            self.evicts, numbers = False, numbers.clone()
            numbers[..., self.spec.numbers.index("capacity")] = torch.inf
        chooses = not self.spec.reuses or (self.choices is not None and self.choices.chooser == self.layer)
        self.selects = self.spec.selects and chooses and self.settings.table(numbers).selects
        return numbers

    def _limit(self, numbers: Tensor, device: torch.device) -> int | None:
        """Slots that are enough for ever: what a settle keeps and what comes in before the next.

        A prompt may leave more than that, of which the first settle rids the cache: that must fit as well.
        """
        if not self.evicts or (not self.spec.hard_cap and self.settings.table(numbers).never_settles):
            return self.longest
        _, most = self.settings.table(numbers).most
        if most == torch.inf:  # some heads keep everything
            return self.longest
        most = _whole(most if self.longest is None else min(most, self.longest))
        most = max(most, self.filled if self.spec.hard_cap else self.filled + 1)
        return most if device.type == "cpu" else _multiple(most, _ALIGNED)

    def _is_even(self, numbers: Tensor) -> bool:
        """Whether every head of every row comes to fill its slots, all but a few."""
        if self.spec.across or (self.limit is not None and self.limit == self.longest):
            return False
        if self.limit is None:
            return True
        least, _ = self.settings.table(numbers).most
        return _whole(least) >= self.limit - _ALIGNED

    def most_by_head(self) -> Tensor:
        """Tokens that each KV head holds at most while decoding, once what a prompt left has settled: [batch, kv_heads or 1], or inf."""
        bounded = self.evicts and (self.spec.hard_cap or not self.settings.table(self.numbers).never_settles)
        most = (
            self.settings.most_while_attending(self.numbers)
            if bounded
            else torch.full_like(self.seen, torch.inf, dtype=torch.float64)
        )
        return most.view(len(most), -1)

    def _first_slots(self, device: torch.device) -> int:
        """Slots to allocate at the end of a prompt.

        Where the cache will grow just what is there, while later layers read the prompt; the first tokens make it grow.
        """
        if self.limit is None:
            return max(1, self.filled)
        if self.reserves or device.type != "cpu":
            return self.limit
        return min(self.limit, max(AT_ONCE, self.filled + 1))

    def make_room(self, tokens: int) -> None:
        """Before `tokens` more are placed: a cache that grows does so when it is full."""
        if not self.grows:
            return
        self.filled += tokens
        if self.spec.measures and self.filled > self.slots:  # what a budget that reads the data has made room for
            self.filled = int((self.position >= 0).sum(-1).max()) + tokens
        if self.filled > self.slots:
            with plain_tensors():
                self._extend(_grown(self.filled))
        if self.grows:
            self.layout.make_room(self, tokens)

    def align(self) -> None:
        """Have as many slots as on an accelerator."""
        if self.limit is not None:
            self.limit = _multiple(self.limit, _ALIGNED)
            self._extend(self.limit)

    def widen(self, tokens: int) -> None:
        """Have room for so many tokens more than are enough for ever, or for the longest text."""
        if self.limit is not None:
            self.limit = self.limit + tokens if self.longest is None else min(self.limit + tokens, self.longest)
            self._extend(self.limit)

    def reserve(self) -> None:
        """Allocate all slots that will ever be needed: now, and at the end of every prompt to come."""
        self.reserves, self._fixed = True, None
        if self.allocated and self.grows and self.limit is not None:
            with plain_tensors():
                self._extend(self.limit)

    def _extend(self, slots: int) -> None:
        """Have so many slots per KV head, or as many as are enough for ever."""
        slots = slots if self.limit is None else min(slots, self.limit)
        held = self.position >= 0
        self._allocate({"position": self.position, "columns": self.columns}, None, slots)
        self.grows = slots != self.limit
        self.layout.grow(self, held)
        self._forget_copies()

    def _allocate(self, kept: Mapping[str, Tensor], order: Tensor | None, slots: int) -> None:
        """Positions, columns and ranks of `slots` slots that begin with the kept ones, in `order` if it is given."""
        self.position = in_slots("position", self.position, kept["position"], order, slots, FREE)
        self.columns = in_slots("columns", self.columns, kept["columns"], order, slots)
        if self.spec.compact:
            self.rank = holding(self.rank, ranks(self.position))

    def _forget_copies(self) -> None:
        copies.forget(self)
        copies.forget_halves(self)

    @property
    def has_sketch(self) -> bool:
        """Whether a query of the prompt has left a sketch."""
        return "sketch" in self.declared and self.sketch.dim() > 1

    @property
    def slots(self) -> int:
        """Slots per KV head."""
        return self.position.shape[-1]

    @property
    def keys(self) -> Tensor:
        """[batch, kv_heads, slots, key_dim]; a copy, where the layout is another than slot after slot."""
        return self.layout.keys(self.slots)

    @property
    def values(self) -> Tensor:
        """[batch, kv_heads, slots, value_dim]; likewise."""
        return self.layout.values(self.slots)

    @property
    def dtype(self) -> torch.dtype:
        """What keys and values are stored in."""
        return self.layout.key_pool.dtype

    @property
    def declared(self) -> dict[str, Declared]:
        """What is declared of every tensor, the layout's first."""
        return {one.name: one for one in self.layout.DECLARED} | self._own

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, in the order of `declared`."""
        return self.layout.tensors() | {name: getattr(self, name) for name in self._own}

    def in_slots(self) -> dict[str, Tensor]:
        """What has slots one after the other, as in `SLOT_DIM`."""
        return {name: getattr(self, name) for name in SLOT_DIM}

    def bytes(self) -> int:
        """What the tensors occupy."""
        return sum(tensor.nbytes for tensor in self.tensors().values()) if self.allocated else 0

    # -- what is in the slots ------------------------------------------------------------------------------------------

    def check_fits(self, key: Tensor, value: Tensor, rows: int | None = None) -> None:
        """Raise KvdslError for new keys and values of another dtype or size than the cached ones: kernels get bare pointers.

        Args:
            rows: how many rows are served; None: all.
        """
        batch, heads, _ = self.position.shape
        found = [(x.dtype, tuple(x.shape[:2]), x.shape[-1]) for x in (key, value)]
        held = (self.layout.key_pool, self.layout.value_pool)
        if found != [(x.dtype, (batch if rows is None else rows, heads), x.shape[-1]) for x in held]:
            raise KvdslError("the new keys and values have another dtype or size than the cached ones; call `reset()`")

    def settled(self) -> None:
        """A token has been served, and the slots of what left are free."""
        self.layout.settled(self.position)

    def free(self, leaving: Tensor) -> None:
        """Make the tokens in these slots leave: bool [batch, kv_heads, slots], live slots only."""
        if self.spec.compact:
            close_gaps(self.rank, leaving)
        self.position.masked_fill_(leaving, FREE)

    # -- without the last tokens ---------------------------------------------------------------------------------------

    def can_truncate(self, length: int, left: int, prompt: int) -> bool:
        """Whether the first `left` of `length` tokens are what a text of them alone would have left.

        So it is where every row holds all its tokens, none of them padding, where no query leaves anything in those before it,
        where the budget does not read them, and where a prompt that ends there has the same numbers.

        Args:
            prompt: tokens up to the last prompt's end.
        """
        spec = self.spec
        if (
            not self.allocated
            or left < 1
            or spec.sketches
            or spec.measures
            or (spec.rings and not spec.forgets)
            or set(spec.column_rules) - {"token"}
        ):
            return False
        if not bool((self.seen == length).all()) or not bool(((self.position >= 0).sum(-1) == length).all()):
            return False
        if left >= prompt or not spec.numbers:
            return True
        numbers = self.settings.tried(float(max(left, self.expected)))
        return (
            spec.when != "prefill" and numbers is not None and bool((numbers.to(self.numbers.device) == self.numbers).all())
        )

    def truncate(self, left: int) -> None:
        """Have the first `left` tokens only."""
        self.filled -= int(self.seen.max()) - left
        self.free(self.position >= left)
        self.seen.fill_(left)
        self.settled()
        self._forget_copies()

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

    def repeat_rows(self, repeats: int) -> None:
        """Repeat every row `repeats` times, next to itself."""
        if self.allocated:
            self.select_rows(torch.arange(len(self.seen)).repeat_interleave(repeats))


def _whole(count: float, what: str = "slots per KV head") -> int:
    if count >= 2**31:
        raise KvdslError(f"{count:g} {what} are more than any cache can have; lower the number")
    return int(count)


def _grown(needed: int) -> int:
    """Slots for so many tokens and a quarter more, so that what growing copies stays a small part of what attention reads."""
    return _multiple(needed + needed // 4, _GROWTH)


def _multiple(count: int, of: int) -> int:
    """The smallest one that is not below `count`."""
    return -(-count // of) * of
