"""The Triton backend.

A decode step launches `attend` and `settle` per layer and token. Further launches:

- a selection adds `look` and `choose`, and `vote` if heads choose together;
- a hard cap adds `make_room`;
- heads that agree on victims add `agree`, twice under a hard cap;
- slots in blocks add `take`, and `give_back` if the layer evicts;
- a state in blocks of a serving engine adds `move`, twice.

One launch, `at_once`, can replace the two where `sizes.AT_ONCE_PER_PROCESSOR` allows it.

A prompt uses torch's attention, and one or two launches for its statistics. The layers of a forward share what is the same for all, and
the host asks once, at the end of the first prompt, whether all numbers were finite.

A step never waits for the device, and all scratch memory is allocated in advance. So a CUDA graph can capture a step.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.angles import digits
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.gpu.attend import attend
from kvdsl.runtime.gpu.kernels import kernels_of
from kvdsl.runtime.gpu.launch import check_release, is_hopper, launch, on, precision_of, signed
from kvdsl.runtime.gpu.layout import give_back, take
from kvdsl.runtime.gpu.lent import Behind, Lent
from kvdsl.runtime.gpu.prepared import Launch, Prepared
from kvdsl.runtime.gpu.prompt import observe
from kvdsl.runtime.gpu.prompt import settle as settle_prompt
from kvdsl.runtime.gpu.select import LEVELS
from kvdsl.runtime.gpu.sizes import (
    ALONE_OPTIONS,
    CHOOSE_OPTIONS,
    EVERYTHING,
    GIVE_BACK_OPTIONS,
    LOOK_OPTIONS,
    SETTLE_OPTIONS,
    TAKE_OPTIONS,
    VOTED_AT_ONCE,
    Sizes,
    choosers,
    turns_few,
)
from kvdsl.runtime.graph import enlist
from kvdsl.runtime.lifetimes import plain_tensors
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state import copies
from kvdsl.runtime.state.blocks import Blocks
from kvdsl.runtime.state.layout import SlotAfterSlot
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.tensors import stays_where_it_is
from kvdsl.runtime.supplied import supplied_of
from kvdsl.runtime.torch import statistics
from kvdsl.runtime.torch.prefill import attend_and_observe, prefill
from kvdsl.runtime.torch.prompt import Prompt

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_PROCESSORS_IN_THE_INTERPRETER = 8
_OF_SOME = (
    *("rank", "length", "table", "sketch", "sketch_keys", "prompt", "copied", "page_bounds"),
    *("columns", "numbers", "constants"),
)
"""Arguments that are tensors of some states only."""


class TritonBackend:
    """Serve one policy's layers on a GPU, or in Triton's interpreter (TRITON_INTERPRET=1).

    Raises:
        KvdslError: if the policy has no Triton kernels, the kernels do not support the device or dtype, or Triton is too old.
    """

    name = "triton"

    def __init__(self, spec: PolicySpec, device: torch.device, dtype: torch.dtype) -> None:
        check_release()
        if not spec.triton_source.exists():
            raise KvdslError(spec.without("triton"))
        if device.type != "cuda" and not interpreted():
            raise KvdslError(
                f"the triton backend needs tensors on a GPU, not on {device} (or TRITON_INTERPRET=1, to try it out)"
            )
        if dtype not in DTYPES:
            raise KvdslError(f"the triton backend knows float32, bfloat16 and float16, not {dtype}")
        self.served = enlist(self, spec, dtype)
        self.kernels = kernels_of(spec.triton_source)
        self._dot = tl.float32 if interpreted() else DTYPES[dtype]

    def __deepcopy__(self, memo: dict[int, object]) -> TritonBackend:
        """Return itself: the backend holds no cache state, so copies of a cache share it."""
        return self

    def prefill(self, state: SlotState, call: AttentionCall) -> Tensor:
        """Attend to a prompt and fill the slots; see `kvdsl.runtime.torch.prefill.prefill`."""
        with on(call.query.device):
            attend = partial(attend_and_observe, observe=self._fold)
            out = prefill(state, call, attend, partial(settle_prompt, self.kernels))
        # Allocate now: a compiled step receives these tensors as inputs, and a captured one cannot wait for the host. Caches of layers
        # that share a budget may still grow, so they allocate later.
        if state.allocated and not state.room.grows:
            stays_where_it_is(*workspace(state, self.kernels, sizes_of(call)).tensors.values())
            if state.spec.compact:
                stays_where_it_is(copies.keep_length(state))
            copies.keep(state, 1)
            if (rope := _turns(state, call)) is not None:
                digits(rope, state.position.device)
        return out

    def work_in(self, state: SlotState, call: AttentionCall, tensors: dict[str, Tensor]) -> None:
        """Use another state's workspace tensors for this state. Both states need slots of the same shape."""
        workspace(state, self.kernels, sizes_of(call), tensors)

    def _fold(self, prompt: Prompt, lse: Tensor) -> None:
        """Fold a prompt into the statistics; see `kvdsl.runtime.torch.statistics.observe`.

        torch folds if logits have a distance bias, if they are far from 0, and for policies that fold query by query.
        """
        folds = not hasattr(self.kernels, "observe")
        if folds or prompt.call.slopes is not None or statistics.is_far(prompt, lse):
            statistics.observe(prompt, lse)
            return
        observe(self.kernels, self._dot, prompt, lse)

    @plain_tensors()
    def decode(self, state: SlotState, call: AttentionCall) -> Tensor:
        """Decode the new tokens one by one. Return [batch, tokens, query_heads, value_dim].

        Raises:
            KvdslError: if the new tokens differ from the cache in dtype or sizes: kernels receive bare pointers.
        """
        state.check_fits(call.key, call.value, *state.position.shape[:2])
        tokens = call.query.shape[2]
        state.make_room(tokens)
        copies.forget_halves(state)
        if state.spec.compact:
            copies.keep_length(state)
        with on(call.query.device):
            work = workspace(state, self.kernels, sizes_of(call))
            copies.keep(state, 1)
            steps = [self.decode_token(state, call, t, work) for t in range(tokens)]
        return steps[0] if tokens == 1 else torch.cat(steps, dim=1)

    def decode_token(
        self, state: SlotState, call: AttentionCall, t: int, work: Workspace, which: Tensor | None = None,
        behind: Behind | None = None,
    ) -> Tensor:  # fmt: skip
        """Decode one new token of every row, or of some rows. The state already has all tensors that the kernels read.

        Args:
            t: index of the token in the call.
            work: a workspace for at least the call's rows.
            which: int32 [batch], the state's row of each of the call's rows, without duplicates; None: all, in order.
            behind: the rows' requests and prompts, for a state that is `Lent`.

        Returns:
            [batch, 1, query_heads, value_dim].
        """
        query, key, value = (x[:, :, t].contiguous() for x in (call.query, call.key, call.value))
        out = query.new_empty(len(query), 1, query.shape[1], value.shape[-1])
        fresh = {
            "which": which, "query": query, "new_key": key, "new_value": value, "out": out,
            "real": work.tensors["every_row"] if call.real is None else call.real[:, t].contiguous(),
            "sinks": None if call.sinks is None else call.sinks.contiguous(),
            "slopes": None if call.slopes is None else call.slopes.float().contiguous(),
            "supplied": supplied_of(state.spec, call.part(slice(t, t + 1))) if state.spec.supplied else None,
            **(dict.fromkeys(Behind._fields) if behind is None else behind._asdict()),
        }  # fmt: skip
        known = _prepared.get(work)
        if known is not None and known.serves(state, call, fresh):
            known.run(fresh)
        elif interpreted():
            for one in self._launches(state, call, work, fresh):
                launch(one.kernel, one.grid, one.arguments, one.options)
        else:
            _prepared[work] = Prepared(self._launches(state, call, work, fresh), state, call, fresh)
        return out

    def _launches(
        self, state: SlotState, call: AttentionCall, work: Workspace, fresh: Mapping[str, Tensor | None]
    ) -> Iterator[Launch]:
        """Yield the launches of one token, in order."""
        batch, heads, cache_rows = len(call.query), call.key.shape[1], len(state.position)
        sizes, rope, layout = sizes_of(call), _turns(state, call), state.layout
        lent = layout if isinstance(layout, Lent) else None
        in_blocks = layout if isinstance(layout, Blocks) else None
        block_size = getattr(lent or in_blocks, "size", 0)
        alone = sizes.settle(work.splits, work.pieces, work.width, rope, alone=True)
        settle, options = alone, ALONE_OPTIONS
        if self.kernels.CONSTANTS["SPREADS"]:
            settle, options = sizes.settle(work.splits, work.pieces, work.width, rope), SETTLE_OPTIONS
        arguments = work.tensors | {
            **fresh,
            "angles": None if rope is None else digits(rope, state.position.device),
            **dict.fromkeys(_OF_SOME), **state.tensors(), "keys": layout.key_pool, "values": layout.value_pool,
            "SELECTS": state.selects, "SIZE": block_size,
            "K_AS": state.format.key, "V_AS": state.format.value,
            "batch": batch, "cache_rows": cache_rows, "heads": heads,
            "SOME": fresh["which"] is not None,
            "slots": state.slots, "splits": work.splits, "per_split": work.per_split, "per_piece": work.per_piece, "width": work.width,
            "pages": state.page_bounds.shape[2] if state.spec.bounds_pages else 0,
            "scaling": call.scaling, "softcap": call.softcap or 0.0, "window": call.window or EVERYTHING,
            "seed": signed(state.seed), "layer": state.layer, "first_head": state.head_offset,
            **self.kernels.CONSTANTS, "DOT": self._dot, "PRECISION": precision_of(state.spec.kv_dtype),
            "SINKS": call.sinks is not None,
            "BIASED": call.slopes is not None, "RANKED": state.spec.compact,
            "BESIDE": lent is not None,
        }  # fmt: skip
        if lent is not None:
            yield lent.launch(arguments, back=False)
        agrees = state.evicts and hasattr(self.kernels, "agree")
        if state.spec.hard_cap and state.evicts:
            yield Launch(self.kernels.make_room, (heads, batch), arguments | alone, ALONE_OPTIONS)
            if agrees:
                yield Launch(self.kernels.agree, (batch,), arguments | alone | {"BEFORE": True}, ALONE_OPTIONS)
        if state.selects:
            look = sizes.look(work.width or sizes.key_dim, in_blocks=block_size > 0, packed=state.format.packed)
            yield Launch(self.kernels.look, (work.splits, heads, batch), arguments | look, LOOK_OPTIONS)
            if hasattr(self.kernels, "vote"):
                yield Launch(self.kernels.vote, (work.splits, batch), arguments | {"BLOCK": VOTED_AT_ONCE}, LOOK_OPTIONS)
            chosen = sizes.choose(work.splits, work.choosers, pages=chooses_pages(self.kernels))
            yield Launch(self.kernels.choose, (work.choosers, heads, batch), arguments | chosen, CHOOSE_OPTIONS)
        plain = isinstance(layout, SlotAfterSlot)
        few = turns_few(sizes, self.kernels.CONSTANTS["SLIDES"], state.format.packed)
        dense = {"DENSE": state.even and plain and call.window is None and sizes.reads_ahead(None if few else rope)}
        programs = work.splits, heads, batch
        processors = _processors_at_once(state.position.device)
        alike = plain and not state.format.packed and hasattr(self.kernels, "at_once")
        if alike and sizes.fits_at_once(state.slots, heads * batch, processors):
            options, together = sizes.at_once_options(work.splits), sizes.at_once(work.splits, rope, few=few)
            yield Launch(self.kernels.at_once, programs, arguments | dense | together, options)
            return
        attends = arguments | dense | sizes.attend(rope, few=few, packed=state.format.packed)
        yield Launch(attend, programs, attends, sizes.attend_options)
        if in_blocks is not None:
            yield Launch(take, (1,), arguments | sizes.take(work.splits) | {"blocks": in_blocks.blocks}, TAKE_OPTIONS)
        yield Launch(self.kernels.settle, (work.pieces + 1, heads, batch), arguments | settle, options)
        if agrees:
            yield Launch(self.kernels.agree, (batch,), arguments | alone | {"BEFORE": False}, ALONE_OPTIONS)
        if in_blocks is not None and state.evicts:
            gives = arguments | sizes.give_back(block_size)
            yield Launch(give_back, (arguments["table"].shape[1], batch), gives, GIVE_BACK_OPTIONS)
        if lent is not None:
            yield lent.launch(arguments, back=True)


_prepared: weakref.WeakKeyDictionary[Workspace, Prepared] = weakref.WeakKeyDictionary()
"""Each workspace's launches, prepared for its most recent kind of token."""


def _turns(state: SlotState, call: AttentionCall) -> Rope | None:
    """Return the rotation that attention applies to cached keys; None without compact positions."""
    return call.rope if state.spec.compact else None


@lru_cache
def _first_rows(batch: int, heads: int, rows: int, in_blocks: bool, device: torch.device) -> Tensor:
    """Return the row offset of each head's first key, int64 [batch, kv_heads], for heads of so many rows. Layers share it."""
    with plain_tensors():
        pair = torch.arange(batch * heads, device=device).view(batch, heads)
        return (pair % heads if in_blocks else pair) * rows


@lru_cache
def _every_row(batch: int, device: torch.device) -> Tensor:
    """Return True for each row. Layers share it."""
    with plain_tensors():
        return torch.ones(batch, dtype=torch.bool, device=device)


def sizes_of(call: AttentionCall) -> Sizes:
    """Return the sizes that determine the kernels' constants."""
    key, value = call.key, call.value
    return Sizes(
        call.query.shape[1] // key.shape[1], key.shape[-1], value.shape[-1], key.element_size(), is_hopper(key.device)
    )


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, which accepts CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def chooses_pages(kernels: Any) -> bool:
    """Return whether the policy selects whole pages."""
    return str(kernels.CONSTANTS["BY"]).startswith("page")


# -- scratch tensors ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Workspace:
    """One layer's scratch tensors. Launches of one token pass data through them; the next token overwrites it.

    Attributes:
        fits: what it was allocated for; see `fits`.
        tensors: by kernel argument.
        splits, per_split: see `Sizes.splits`; a prompt beside the slots is one split more. pieces, per_piece: see `Sizes.pieces`.
        choosers: see `sizes.choosers`.
        width: dims of the sketch, 0 without one.
    """

    fits: tuple[Any, ...]
    tensors: dict[str, Tensor]
    splits: int
    per_split: int
    pieces: int
    per_piece: int
    choosers: int
    width: int


def workspace(state: SlotState, kernels: Any, sizes: Sizes, tensors: dict[str, Tensor] | None = None) -> Workspace:
    """Return the layer's workspace. Rebuild it, from `tensors` if given, when the slots are new or have grown."""
    known = state.workspace
    if not isinstance(known, Workspace) or known.fits != fits(state, kernels, sizes):
        state.workspace = workspace_of(state, kernels, sizes, len(state.position), tensors)
    return state.workspace  # type: ignore[no-any-return]


def workspace_of(
    state: SlotState, kernels: Any, sizes: Sizes, batch: int, tensors: dict[str, Tensor] | None = None
) -> Workspace:
    """Return a new workspace for steps of `batch` rows."""
    _, heads, slots = state.position.shape
    cut = slots, batch * heads, _processors(state.position.device)
    splits, per_split = sizes.splits(slots)
    splits += isinstance(state.layout, Lent)
    pieces, per_piece = sizes.pieces(*cut) if kernels.CONSTANTS["SPREADS"] else (1, slots)
    choose = choosers(*cut, sizes.choose_block(pages=chooses_pages(kernels)))
    tensors = tensors or _allocate(state, kernels, sizes, batch, splits, pieces, choose)
    return Workspace(fits(state, kernels, sizes), tensors, splits, per_split, pieces, per_piece, choose, _width(state))


def fits(state: SlotState, kernels: Any, sizes: Sizes) -> tuple[Any, ...]:
    """Return all that a workspace depends on, except the rows of its steps."""
    shapes = (state.position.shape, state.layout.key_pool.shape)
    return (
        *shapes,
        state.position.device,
        state.column_index.ring_sizes,
        sizes,
        kernels.CONSTANTS["SCORES"],
        _width(state),
        state.selects,
    )


def _width(state: SlotState) -> int:
    return state.sketch.shape[-1] if state.spec.sketches else 0


def _allocate(
    state: SlotState, kernels: Any, sizes: Sizes, batch: int, splits: int, pieces: int, choose: int
) -> dict[str, Tensor]:
    _, heads, slots = state.position.shape
    logits = slots if kernels.CONSTANTS["LOGITS"] else 0
    settlers = max(splits, pieces)  # in one launch each split settles
    choices = slots if state.selects else 0
    taken = choices if kernels.CONSTANTS["OBSERVED"] else 0

    def floats(*shape: int) -> Tensor:
        return state.columns.new_empty(batch, heads, *shape)

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return state.position.new_empty(batch, heads, *shape, dtype=dtype)

    device, in_blocks = state.position.device, isinstance(state.layout, Blocks | Lent)
    head_rows = state.layout.head_rows if isinstance(state.layout, Blocks | Lent) else slots
    zeros = {"arrived": ints(), "meetings": ints(), "heads_met": state.seen.new_empty(batch)}
    torch._foreach_zero_(list(zeros.values()))
    tensors = {
        "first_rows": _first_rows(len(state.position), heads, head_rows, in_blocks, device),
        "part": floats(splits, sizes.group, sizes.value_dim),
        "top": floats(splits, sizes.group),
        "total": floats(splits, sizes.group),
        "logits": floats(sizes.group, logits),
        "new_logits": floats(sizes.group),
        "work": floats(kernels.CONSTANTS["SCORES"], slots),
        "kept": ints(slots, dtype=torch.int8),
        **zeros,
        "lowest_found": ints(settlers, dtype=torch.int64),
        "victims": ints(settlers),
        "at_ends": ints(settlers),
        "first_free": ints(splits),
        "held": ints(splits),
        "grades": ints(choices + 16),
        "levels": ints(splits, LEVELS.value if state.selects else 0),
        "candidates": ints(choices + 16),
        "listed": ints(choose),
        "chosen": ints(choices),
        "found": ints(),
        "joins": ints(),
        "taken": ints(taken, dtype=torch.int8),
        "newest": ints(),
        "gaps": ints(slots if state.spec.compact else 0),
        "ring_rows": state.column_index.ring_rows(device),
        "every_row": _every_row(batch, device),
    }
    if isinstance(state.layout, Blocks):
        tensors["wanted"] = torch.empty_like(state.layout.table, dtype=torch.int32)
        tensors |= {name: state.position.new_empty(state.layout.blocks) for name in ("owned", "free")}
    return tensors


def _processors_at_once(device: torch.device) -> int:
    """Return the multiprocessors whose programs can wait for each other: none in the interpreter, which runs one after another."""
    return 0 if interpreted() else _processors(device)


def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return _PROCESSORS_IN_THE_INTERPRETER
    return torch.cuda.get_device_properties(device).multi_processor_count
