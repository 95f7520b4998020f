"""The slots of one layer: fixed tensors that hold what is cached, and the numbers that the policy reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.linked import Linked
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.settings import Settings
from kvdsl.runtime.state.tensors import NOTHING, SLOT_DIM, VECTORS, Declared, declared

if TYPE_CHECKING:
    from kvdsl.runtime.torch.eviction import Together

FREE = -1
"""The position of a slot that holds no token."""

AT_ONCE = 1024
"""Slots per KV head that are allocated at the end of a prompt without need, where they are enough for ever."""

_GROWTH = 64
"""A cache that grows has a multiple of this many slots."""


class SlotState(Linked):
    """What one layer has cached.

    Tensors (N slots per KV head; allocated at the end of a prompt, and again before the next one only while the cache `grows`):
        keys [batch, kv_heads, N, key_dim], values [batch, kv_heads, N, value_dim]: the model's dtype.
        position [batch, kv_heads, N] int32: the token's place in the row's text, padding excluded; -1 is a free slot.
        columns [rows, batch, kv_heads, N] float32: the policy's state columns, a row each, and behind them every ring's rows.
        seen [batch] int32: the row's tokens so far, padding excluded: the position of its next token.
        numbers [batch, len(spec.numbers)] float64: the policy's numbers per row.
    A policy that sketches has two more:
        sketch [batch, kv_heads, D] int32: the dims that it looks at, ascending; -1 where a row has fewer than D.
        prompt [batch] int32: the row's tokens up to its last prompt's end, padding excluded.
    What a backend may keep beside the keys, made from them and empty until it is:
        sketch_keys [batch, kv_heads, tiles, D, tile] in the model's dtype: the keys over the sketch's dims.
        page_bounds [batch, kv_heads, pages, 2, key_dim], of a policy with pages: the smallest and largest key of every page.
        copied [batch] int32: 1 where these hold what the row's keys are. It lies with them, because a step in a graph cannot tell
            the next one otherwise.
    One with compact positions:
        rank [batch, kv_heads, N] int32: how many live slots of the head hold an earlier token; -1 where the slot is free.
        length [batch, kv_heads, 1] int32, of backends that cannot count while they attend; empty until it is counted: how many tokens
            the head holds.
    And one with `rope cached`, of backends that read it; empty until it is made from the keys:
        half_keys [batch, kv_heads, N, rotated dims] in the model's dtype: `Rope.rotate_half` of the keys.

    Attributes:
        evicts: whether a decoded token may make others leave.
        selects: whether a decoded token attends to a selection only.
        ring_sizes: rows of each ring.
        window: how many tokens a query of this layer sees, or None.
        together: the layers that agree on their victims, or None where this one decides by itself.
        workspace: what a backend works in from token to token, with its `tensors` by name, or None; nothing of it is part of the
            cache.
        expected: tokens that a row's prompt counts as at least, because more of it will come.
        filled: slots that a KV head may need by now, tokens of every row and padding counted; a cache that grows goes by it.
        limit: slots per KV head that are enough for ever, or None where nothing is.
        grows: whether the slots are fewer than that.
        reserves: whether as many as that are allocated as soon as the prompt ends, however short it was. Accelerators, whose graphs
            want tensors that stay where they are, always do.
    """

    LINKS = ("spec", "workspace")

    LAYOUT: tuple[Declared, ...] = VECTORS
    """How keys and values lie: the tensors that hold them."""

    keys: Tensor
    values: Tensor
    position: Tensor
    columns: Tensor
    seen: Tensor
    numbers: Tensor
    sketch: Tensor
    prompt: Tensor
    rank: Tensor
    length: Tensor
    half_keys: Tensor
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
        layer: int = 0,
        layers: int = 1,
        head_offset: int = 0,
        seed: int = 0,
    ) -> None:
        self.spec = spec
        self.settings = Settings(spec, given, layer, layers)
        self.layer = layer
        self.head_offset = head_offset
        self.seed = seed
        self.together: Together | None = None
        self.reserves = False
        self._fixed: bool | None = None
        self.declared = declared(spec, self.LAYOUT)
        self.reset()

    def follow(self, spec: PolicySpec) -> None:
        """Serve this policy, the one that it served before it was pickled."""
        self.spec = self.settings.spec = spec

    def adopt(
        self, tensors: Mapping[str, Tensor], *, window: int | None, ring_sizes: tuple[int, ...], evicts: bool, selects: bool
    ) -> None:
        """Serve what another state of the same policy has cached, which is allocated and does not grow.

        Args:
            tensors: its tensors by name.
        """
        for name, tensor in tensors.items():
            setattr(self, name, tensor)
        self.window, self.ring_sizes, self.evicts, self.selects = window, ring_sizes, evicts, selects
        self.allocated = True

    def reset(self) -> None:
        """Forget everything; the next forward allocates anew."""
        self.allocated = False
        self.grows = False
        self.limit: int | None = None
        self.evicts = False
        self.selects = False
        self.window = None
        self.ring_sizes = ()
        self.workspace: Any = None
        self.expected = 0
        self.filled = 0
        for name in self.declared:
            setattr(self, name, NOTHING)
        if self.together is not None:
            self.together.forget()

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

    def resolve_after(self, seen: Tensor) -> Tensor:
        """The policy's numbers after a forward of a prompt, float64 [batch, len(spec.numbers)]: the prompt is all of a row's text so far.

        Args:
            seen: int32 [batch], the rows' tokens, the new ones included; a row to which none came keeps its numbers.

        Raises:
            KvdslError: as `resolve` does.
        """
        numbers = self.settings.resolve(seen.clamp(min=self.expected))
        return torch.where((seen > self.seen)[:, None], numbers, self.numbers) if self.allocated else numbers

    # -- columns -------------------------------------------------------------------------------------------------------

    def size_rings(self, numbers: Tensor) -> None:
        """Find how many rows each ring needs: as many as the row with the longest history.

        Raises:
            KvdslError: if a history that is cached already has another size.
        """
        sizes = [self.settings.named(numbers)[size] for _, size in self.spec.rings]
        if self.allocated:
            known = [self.settings.named(self.numbers)[size] for _, size in self.spec.rings]
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
        """The rings by name, [size, batch, kv_heads, slots] each, as views of a table of columns."""
        parts = columns[len(self.spec.columns) :].split(list(self.ring_sizes)) if self.ring_sizes else ()
        return {name: part for (name, _), part in zip(self.spec.rings, parts, strict=True)}

    def ring_rows(self) -> Tensor:
        """The row of `columns` with which each ring begins, int32 [rings]."""
        starts = accumulate(self.ring_sizes[:-1], initial=len(self.spec.columns)) if self.ring_sizes else ()
        return torch.tensor(list(starts), dtype=torch.int32)

    # -- storage -------------------------------------------------------------------------------------------------------

    def store(self, kept: dict[str, Tensor], seen: Tensor, numbers: Tensor) -> None:
        """Fill the slots with what was kept at the end of a prompt, in text order; they are allocated unless as many are there.

        Args:
            kept: `keys`, `values`, `position` and `columns` over any number of slots; what leaves has a FREE position.
        """
        position = kept["position"]
        self.filled = int((position >= 0).sum(-1).max())
        numbers = self._after_prompt(numbers)
        self.limit = self._limit(numbers)
        slots = self._first_slots(position.device)
        self.grows = slots != self.limit
        if self.spec.sketches:
            self._put("prompt", torch.where(seen > self.seen, seen, self.prompt) if self.allocated else seen)
        self._put("seen", seen)
        self._put("numbers", numbers)
        self._allocate(kept, text_order(position)[..., :slots], slots)
        self.allocated = True
        if not self.grows:
            stays_where_it_is(*self.tensors().values())

    def _after_prompt(self, numbers: Tensor) -> Tensor:
        """The numbers from here on: a policy that evicts in the prompt only has no bound any more."""
        if self.bounded and self.spec.when == "prefill":
            numbers = numbers.clone()
            numbers[:, self.spec.numbers.index("capacity")] = torch.inf
        named = self.settings.named(numbers)
        self.evicts = self.bounded and bool(named["capacity"].isfinite().any())
        self.selects = self.spec.selects and bool(named["select"].isfinite().any())
        return numbers

    def _limit(self, numbers: Tensor) -> int | None:
        """Slots that are enough for ever: what a settle keeps and what comes in before the next.

        A prompt may leave more than that, of which the first settle rids the cache: that must fit as well.
        """
        if not self.evicts or (not self.spec.hard_cap and self.settings.never_settles(numbers)):
            return None
        most = _whole(float(self.settings.most_while_attending(numbers).max()))
        return max(most, self.filled if self.spec.hard_cap else self.filled + 1)

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
        if self.filled > self.slots:
            self._extend(_grown(self.filled))

    def reserve(self) -> None:
        """Allocate all slots that will ever be needed: now, and at the end of every prompt to come."""
        self.reserves, self._fixed = True, None
        if self.allocated and self.grows and self.limit is not None:
            self._extend(self.limit)

    def _extend(self, slots: int) -> None:
        """Have so many slots per KV head, or as many as are enough for ever."""
        slots = slots if self.limit is None else min(slots, self.limit)
        self._allocate({name: getattr(self, name) for name in self._in_slots()}, None, slots)
        self.grows = slots != self.limit

    def _allocate(self, kept: dict[str, Tensor], order: Tensor | None, slots: int) -> None:
        """Tensors of `slots` slots that begin with the kept ones, in `order` [batch, kv_heads, at most slots] if it is given."""
        for name in self._in_slots():
            old, dim = kept[name], SLOT_DIM[name]
            shape = (*old.shape[:dim], slots, *old.shape[dim + 1 :])
            new = self._filled(name, old, shape, FREE if name == "position" else 0, old.dtype)
            first = old if order is None else taken(name, old, order)
            new.narrow(dim, 0, first.shape[dim]).copy_(first)
            setattr(self, name, new)
        if self.spec.compact:
            self._put("rank", ranks(self.position))
        self._place(kept, order)
        self.forget_copies()
        self.forget_halves()

    def _filled(self, name: str, like: Tensor, shape: tuple[int, ...], value: int, dtype: torch.dtype) -> Tensor:
        """The tensor of that name if it has this shape and dtype, else a new one; full of the value."""
        old: Tensor = getattr(self, name)
        if old is not like and (old.shape, old.dtype, old.device) == (shape, dtype, like.device):
            return old.fill_(value)
        return allocated(like, shape, value, dtype)

    def _put(self, name: str, value: Tensor) -> None:
        """Have the tensor of that name hold a copy, where it lies if it has that shape: graphs of earlier turns still hold then."""
        old: Tensor = getattr(self, name)
        if (old.shape, old.dtype, old.device) == (value.shape, value.dtype, value.device):
            old.copy_(value)
        else:
            setattr(self, name, value.clone())

    def _place(self, kept: dict[str, Tensor], order: Tensor | None) -> None:
        """Place what does not lie slot after slot; the arguments are those of `_allocate`, which has placed everything else."""

    def forget_copies(self) -> None:
        """What is kept beside the keys no longer holds: whoever reads it makes it from them."""
        keys, (batch, heads, _) = self.stored[0], self.position.shape
        if self.spec.sketches and not self.sketch_keys.numel():
            self._forget("sketch_keys", keys, (batch, heads, 0, 0, 0))
        if "page" in self.spec.numbers and not self.page_bounds.numel():
            self._forget("page_bounds", keys, (batch, heads, 0, 2, keys.shape[-1]))
        if "copied" in self.declared:
            self._put("copied", self.position.new_zeros(batch))
        self.forget_length()

    def forget_length(self) -> None:
        """How many tokens a head holds is to be counted anew."""
        if self.spec.compact:
            self._forget("length", self.position, (*self.position.shape[:2], 0))

    def _forget(self, name: str, like: Tensor, shape: tuple[int, ...]) -> None:
        """Have the tensor of that name be empty, with this shape; one that is so already stays, for those who know where it lies."""
        if getattr(self, name).shape != shape:
            setattr(self, name, like.new_empty(shape))

    def keep_length(self) -> Tensor:
        """How many tokens every head of a compact cache holds, counted unless the last step has left it; int32 [batch, kv_heads, 1]."""
        if not self.length.numel():
            self.length = (self.position >= 0).sum(-1, keepdim=True, dtype=torch.int32)
        return self.length

    def keep_copies(self, tile: int) -> None:
        """Have room for what kernels keep beside the keys, where this layer selects.

        Args:
            tile: slots of a tile of `sketch_keys`.
        """
        if not self.selects or "copied" not in self.declared:
            return
        keys, (batch, heads, slots) = self.stored[0], self.position.shape
        if self.spec.sketches:
            self._have("sketch_keys", keys, (batch, heads, -(-slots // tile), self.sketch.shape[-1], tile))
        if "page" in self.spec.numbers:
            pages = int(slots // float(self.settings.named(self.numbers)["page"].min())) + 1
            self._have("page_bounds", keys, (batch, heads, pages, 2, keys.shape[-1]))

    def _have(self, name: str, like: Tensor, shape: tuple[int, ...]) -> None:
        """Have a tensor of that name and shape, with whatever in it if it had another."""
        if getattr(self, name).shape != shape:
            setattr(self, name, like.new_empty(shape))
            self.copied.zero_()
            if not self.grows:
                stays_where_it_is(getattr(self, name))

    def keep_halves(self, rope: Rope | None) -> None:
        """Make the rotated halves from the keys, of a policy that keeps them, unless they are there; what reads them keeps them so."""
        if self.spec.rope_cached and rope is not None and self.allocated and not self.half_keys.numel():
            self.half_keys = rope.rotate_half(self.keys)
            stays_where_it_is(self.half_keys)

    def forget_halves(self) -> None:
        """The rotated halves no longer hold."""
        if self.spec.rope_cached:
            self._forget("half_keys", self.columns, (*self.position.shape[:2], 0, 0))

    @property
    def has_sketch(self) -> bool:
        """Whether a query of the prompt has left a sketch."""
        return "sketch" in self.declared and self.sketch.dim() > 1

    @property
    def slots(self) -> int:
        """Slots per KV head."""
        return self.position.shape[-1] if self.allocated else 0

    def bytes(self) -> int:
        """What the tensors occupy."""
        return sum(tensor.nbytes for tensor in self.tensors().values()) if self.allocated else 0

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, for moving, cloning and reordering."""
        return {name: getattr(self, name) for name in self.declared}

    def _in_slots(self) -> list[str]:
        """The names of what lies slot after slot."""
        return [one.name for one in self.declared.values() if one.slots is not None]

    @property
    def stored(self) -> tuple[Tensor, Tensor]:
        """Keys and values as they lie in memory, [..., dim] each; to be read, or written in place."""
        return self.keys, self.values

    @property
    def dtype(self) -> torch.dtype:
        """What keys and values are stored in."""
        return self.stored[0].dtype

    # -- what is in the slots ------------------------------------------------------------------------------------------

    def write(self, slot: Tensor, key: Tensor, value: Tensor, real: Tensor) -> None:
        """Write one new token per KV head into its slot, over what is there; a padding token leaves everything as it was.

        Args:
            slot: int64 [batch, kv_heads, 1].
            key, value: [batch, kv_heads, 1, dim].
            real: bool [batch, 1].
        """
        keep_old = ~real[:, None, :, None]
        for tensor, new in ((self.keys, key), (self.values, value)):
            at = slot[..., None].expand(-1, -1, -1, tensor.shape[-1])
            tensor.scatter_(2, at, torch.where(keep_old, tensor.gather(2, at), new))

    def write_all(self, keys: Tensor, values: Tensor) -> None:
        """Write the first slots, [batch, kv_heads, any, dim], as they once were; positions are so already."""
        self.keys[:, :, : keys.shape[2]] = keys
        self.values[:, :, : values.shape[2]] = values

    def settled(self) -> None:
        """A token has been served, and the slots of what left are free."""

    def free(self, leaving: Tensor) -> None:
        """Make the tokens in these slots leave: bool [batch, kv_heads, slots], live slots only."""
        if self.spec.compact:
            close_gaps(self.rank, leaving)
        self.position.masked_fill_(leaving, FREE)

    # -- without the last tokens ---------------------------------------------------------------------------------------

    def can_truncate(self, length: int, left: int, prompt: int) -> bool:
        """Whether the first `left` of `length` tokens are what a text of them alone would have left.

        So it is where every row holds all its tokens, none of them padding, where no query leaves anything in those before it,
        and where a prompt that ends there has the same numbers.

        Args:
            prompt: tokens up to the last prompt's end.
        """
        spec = self.spec
        if not self.allocated or not left or spec.sketches or spec.rings or set(spec.column_rules) - {"token"}:
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
        self.forget_copies()
        self.forget_halves()

    # -- rows ----------------------------------------------------------------------------------------------------------

    def select_rows(self, rows: Tensor) -> None:
        """Make row i what row rows[i] was (beams), in place where the batch keeps its size."""
        if not self.allocated:
            return
        for name, one in self.declared.items():
            tensor: Tensor = getattr(self, name)
            if one.batch is None or tensor.shape == NOTHING.shape:
                continue
            chosen = tensor.index_select(one.batch, rows.to(tensor.device))
            if chosen.shape == tensor.shape:
                tensor.copy_(chosen)
            else:
                setattr(self, name, chosen)

    def repeat_rows(self, repeats: int) -> None:
        """Repeat every row `repeats` times, next to itself."""
        if self.allocated:
            self.select_rows(torch.arange(len(self.seen)).repeat_interleave(repeats))


def stays_where_it_is(*tensors: Tensor) -> None:
    """Tell `torch.compile` that these keep their addresses, so that a CUDA graph may change them in place."""
    for tensor in tensors:
        if tensor.device.type == "cuda":
            torch._dynamo.mark_static_address(tensor)


def text_order(position: Tensor) -> Tensor:
    """The slots in the order of the text, the free ones last; int64, of the shape of `position`."""
    return torch.where(position >= 0, position, torch.iinfo(torch.int32).max).argsort(dim=-1, stable=True)


def ranks(position: Tensor) -> Tensor:
    """How many slots hold an earlier token, int32 of the shape of `position`; -1 where the slot is free."""
    return text_order(position).argsort(-1).int().masked_fill_(position < 0, FREE)


def close_gaps(rank: Tensor, leaving: Tensor) -> None:
    """Update the ranks in place when some slots are freed, without sorting: those behind a gap move up.

    Args:
        rank: int32 [batch, kv_heads, slots].
        leaving: bool, of the same shape; live slots only.
    """
    place = rank.long().clamp(min=0)
    gone = torch.zeros_like(rank).scatter_add_(-1, place, leaving.int()).cumsum(-1, dtype=torch.int32)
    rank.sub_(gone.gather(-1, place)).masked_fill_(leaving, FREE).clamp_(min=FREE)


def taken(name: str, tensor: Tensor, order: Tensor) -> Tensor:
    """These slots, [batch, kv_heads, any], of the tensor of that name in `SLOT_DIM`."""
    dim = SLOT_DIM[name]
    if tensor.dim() > dim + 1:
        return tensor.gather(dim, order[..., None].expand(*order.shape, tensor.shape[-1]))
    return tensor.gather(dim, order.expand(*tensor.shape[:dim], order.shape[-1]))


def allocated(like: Tensor, shape: tuple[int, ...], value: int, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor full of one value, on the device of another and, unless told otherwise, of its dtype.

    Raises:
        KvdslError: if there is no memory for it.
    """
    dtype = like.dtype if dtype is None else dtype
    try:
        return like.new_full(shape, value, dtype=dtype)
    except RuntimeError as error:
        size = math.prod(shape) * dtype.itemsize
        raise KvdslError(f"no memory for {size / 2**30:,.1f} GiB of slots ({list(shape)}); lower the budget") from error


def _whole(count: float, what: str = "slots per KV head") -> int:
    if count >= 2**31:
        raise KvdslError(f"{count:g} {what} are more than any cache can have; lower the number")
    return int(count)


def _grown(needed: int) -> int:
    """Slots for so many tokens and a quarter more, so that what growing copies stays a small part of what attention reads."""
    return -(-(needed + needed // 4) // _GROWTH) * _GROWTH
