"""Decode steps of a serving engine whose requests share prompts: one token behind the prompts of some. See `kvdsl.runtime.gpu.lent`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.gpu.backend import TritonBackend
from kvdsl.runtime.gpu.launch import on
from kvdsl.runtime.gpu.lent import Behind, Lent, Lies
from kvdsl.runtime.gpu.rows import Shared, Works, of_nobody
from kvdsl.runtime.lifetimes import plain_tensors
from kvdsl.runtime.state.order import FREE
from kvdsl.runtime.state.slots import SlotState


class Room:
    """Tensors that the layers of a model use one after the other.

    Attributes:
        rows: how many requests a step may have.
        shared: workspaces, see `rows.Works`.
    """

    def __init__(self, rows: int) -> None:
        self.rows = 1 << (rows - 1).bit_length()
        self.shared: Shared = {}
        self._made: dict[Any, dict[str, Tensor]] = {}

    def tensors(self, planes: int, heads: int, slots: int, blocks: int, device: torch.device) -> dict[str, Tensor]:
        """Return the tensors for states of this shape.

        Args:
            planes: positions and columns. blocks: of a request's slots.
        """
        kind = planes, heads, slots, blocks, device
        if kind not in self._made:
            moved = torch.full((planes, self.rows, heads, slots), FREE, dtype=torch.int32, device=device)
            self._made[kind] = {
                "moved": moved,
                "position": moved[0],
                "columns": moved[1:].view(torch.float32),
                "seen": moved.new_zeros(self.rows),
                "real": moved.new_zeros(self.rows, dtype=torch.bool),
                "table": moved.new_zeros(self.rows, blocks, dtype=torch.int64),
            }
        return self._made[kind]


class Answers:
    """The answers of one layer.

    Args:
        state: the layer's, without tensors.
        blocks: [blocks, kv_heads, 2, size, dim] contiguous: keys and values, see `Lent`.
        places: byte offsets of `position`, `columns` (if any) and `seen` in a state's block.
        slots: per KV head. ring_sizes: see `SlotState`.
    """

    def __init__(
        self, backend: TritonBackend, state: SlotState, blocks: Tensor, places: Mapping[str, int], slots: int, ring_sizes: tuple[int, ...],
        room: Room,
    ) -> None:  # fmt: skip
        _, heads, _, size, _ = blocks.shape
        state.column_index.ring_sizes = ring_sizes
        columns = state.column_index.rows
        if columns and places["columns"] != places["position"] + 4 * heads * slots:
            raise KvdslError("the columns of an answer's state do not follow its positions")
        found = room.tensors(1 + columns, heads, slots, -(-slots // size), blocks.device)
        lies = Lies(columns, places["position"] // 4, places["seen"] // 4)
        state.layout = layout = Lent(blocks, lies, found["moved"], found["real"])
        numbers = state.settings.resolve(torch.ones(1), blocks.device)
        pools = {"key_pool": layout.key_pool, "value_pool": layout.value_pool}
        own = {name: found[name] for name in ("position", "columns", "seen", "table")}
        state.adopt(
            pools | own | {"numbers": numbers.repeat(room.rows, *[1] * (numbers.dim() - 1))},
            window=None, ring_sizes=ring_sizes, evicts=True, selects=False, even=False,
        )  # fmt: skip
        self._backend, self._state, self._most, self._real = backend, state, room.rows, found["real"]
        self._behind = 1 + found["table"].shape[1]
        self._works = Works(backend, state, room.shared)

    def make_ready(self, call: AttentionCall) -> None:
        """Compile the kernels and allocate the workspaces for steps of up to all rows. No request's block changes.

        Args:
            call: one token of one row, of the same kind as later steps.
        """
        for nobody in of_nobody(self._most, call):
            query = nobody.query[:, :, 0]
            ints = torch.zeros(len(query), dtype=torch.int32, device=query.device)
            tables = ints.new_zeros(len(query), 1 + self._behind)
            lse = torch.zeros(query.shape[:2], device=query.device)
            self.decode(nobody, Behind(query, lse, tables, ints, ints, ints))

    @plain_tensors()
    def decode(self, call: AttentionCall, behind: Behind, *, check: bool = False) -> Tensor:
        """Decode one token of each of these requests, which are different ones. Return [batch, 1, query_heads, value_dim].

        A row whose state would be in block 0 is no request's: its output is zero, and nothing changes.

        Args:
            call: [batch, heads, 1, dim].
            check: have the device stop if a state has not read all tokens before. It is the same in all layers.

        Raises:
            KvdslError: if the new tokens differ from the blocks in dtype or sizes, or are too many: kernels receive bare pointers.
        """
        rows = len(call.query)
        self._state.check_fits(call.key, call.value, rows, self._state.position.shape[1])
        if rows > self._most:
            raise KvdslError(f"a step has {rows} answers, and there is room for {self._most}")
        real = self._real[:rows]
        with on(call.query.device):
            out = self._backend.decode_token(
                self._state, call._replace(real=real[:, None]), 0, self._works.of(call), behind=behind
            )
        if check:
            follows = self._state.seen[:rows] == behind.places + real
            torch._assert_async(follows.all(), "an answer's blocks do not hold its earlier tokens")
        return out
