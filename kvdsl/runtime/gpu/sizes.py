"""How the kernels are cut: blocks, splits and warps, from the shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvdsl.runtime.rope import Rope

_TILE_BYTES = 1 << 14
"""Of keys, and as much of values, that an `attend` program has in flight in a stage; half of that where it turns keys, in registers."""

_SETTLE_ELEMENTS = 2048
"""Of a [G, BLOCK] tile of logits in `settle`: 16 a thread (8 on AMD)."""

_ALONE_ELEMENTS = 8192
"""The same where a program has all slots of a KV head, or of a row, and four times as many threads; of keys or values likewise."""

SETTLED_AT_ONCE = 2048
"""Slots that `settle_prompt` takes at once: no logits are there."""

COMPARED = 64
"""Slots of either side of a tile in which slots are compared with each other: numbers that one program's threads hold a few of."""

_PAIR_ELEMENTS = 2048
"""Of keys or values of either side of such a tile, where those are multiplied: AMD's registers hold no more."""

VOTED_AT_ONCE = 256
"""Slots or pages that a program of `vote` takes at once."""

_LOOKED_AT = 1 << 12
"""Numbers of a tile of keys over the sketch's dims, or of pages' bounds, in `look`."""

_KEY_BYTES = 1 << 15
"""Of keys that an `observe` program holds all the time: it reads every query, so many slots should share that."""

_QUERY_BYTES = 1 << 14
"""Of the queries of one head that it has in flight in a stage."""

ATTEND_OPTIONS = {"num_warps": 4, "num_stages": 3}
NARROW_ATTEND_OPTIONS = {"num_warps": 2, "num_stages": 2}
SETTLE_OPTIONS = {"num_warps": 4, "num_stages": 1, "maxnreg": 128}
ALONE_OPTIONS = {"num_warps": 16, "num_stages": 1, "maxnreg": 128}
LOOK_OPTIONS = {"num_warps": 4, "num_stages": 2, "maxnreg": 255}
CHOOSE_OPTIONS = {"num_warps": 16, "num_stages": 1, "maxnreg": 128}
OBSERVE_OPTIONS = {"num_warps": 8, "num_stages": 2}
NARROW_OBSERVE_OPTIONS = {"num_warps": 4, "num_stages": 3}
TAKE_OPTIONS = {"num_warps": 8, "num_stages": 1}
GIVE_BACK_OPTIONS = {"num_warps": 1, "num_stages": 1}
"""What Triton compiles with; decision 53 says what an H200 said of others. Few warps exchange little, where registers suffice: that is what
the narrow ones are for. Left to itself, ptxas aims at several programs a multiprocessor, and spills; `choose` and programs that are alone
with their slots have one, and `look` two.
"""

EVERYTHING = 2**30
"""The window of a model that has none."""

MAX_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 2
"""How many `attend` programs a multiprocessor is meant to have."""

NARROW_PROGRAMS_PER_PROCESSOR = 3
"""The same of two warps."""

SETTLERS_PER_PROCESSOR = 4
"""How many `settle` programs a multiprocessor is meant to have."""

MAX_CHOOSERS = 16
"""Programs of `choose` that share a KV head's slots: the last to arrive looks for every candidate among all of theirs."""

FINER = 4
START = 0.5
"""What a program costs before and after its blocks, in blocks: an estimate."""


@dataclass(frozen=True)
class Sizes:
    """The constants that the kernels are compiled with.

    Attributes:
        group: query heads per KV head. key_dim, value_dim: numbers of a key, of a value. item: bytes of one of those.
        hopper: whether the GPU is one, such as the H200 that was asked what it wants. No other was, nor do others' compilers find the
            registers for it.
    """

    group: int
    key_dim: int
    value_dim: int
    item: int
    hopper: bool = False

    @property
    def attend_block(self) -> int:
        """Slots that `attend` takes at once; matrices are multiplied 16 rows at a time."""
        wide = _TILE_BYTES // (_power_of_two(max(self.key_dim, self.value_dim)) * self.item)
        return max(16, min(64 if self.narrow else 128, wide))

    @property
    def settle_block(self) -> int:
        """Slots that `settle` takes at once, where programs share a KV head's."""
        return max(16, min(512, _SETTLE_ELEMENTS // _power_of_two(self.group)))

    @property
    def alone_block(self) -> int:
        """Slots that it takes at once where a program has all of them, and `make_room` and `agree`."""
        return max(16, min(2048, _ALONE_ELEMENTS // _power_of_two(self.group)))

    @property
    def narrow(self) -> bool:
        """Whether two warps hold what `attend` sums up: the group's queries are one tile of a matrix, on 16 bits, and heads are short and
        whole powers of two, of which nothing is masked.
        """
        short = all(dim <= 128 and dim == _matrix(dim) for dim in (self.key_dim, self.value_dim))
        return self.hopper and self.item == 2 and _matrix(self.group) == 16 and short

    @property
    def attend_options(self) -> dict[str, int]:
        """What `attend` is compiled with."""
        return NARROW_ATTEND_OPTIONS if self.narrow else ATTEND_OPTIONS

    def observe_options(self, *, reduced: bool) -> dict[str, int]:
        """What `observe` is compiled with; `reduced`: whether it looks at what `over_slots` has found, too."""
        return NARROW_OBSERVE_OPTIONS if self.hopper and self.item == 2 and not reduced else OBSERVE_OPTIONS

    def choose_block(self, *, pages: bool) -> int:
        """Slots or pages that `choose` takes at once. With more pages AMD's compiler runs out of scalar registers."""
        return 1024 if pages else 2048

    def look_block(self, dims: int) -> int:
        """Slots or pages of so many numbers each that `look` takes at once."""
        return max(16, min(256, _LOOKED_AT // _matrix(dims)))

    def attend(self, rope: Rope | None = None, *, packed: bool = False) -> dict[str, Any]:
        """Constants of `attend` that depend on the sizes.

        Args:
            rope: the rotation of keys, if the kernel rotates them. packed: whether it converts them from another `kv_dtype`. Either
                takes registers.
        """
        return self._pairs(rope) | {
            "G": self.group,
            "G_PAD": _matrix(self.group),
            "D": self.key_dim,
            "D_PAD": _matrix(self.key_dim),
            "E": self.value_dim,
            "E_PAD": _matrix(self.value_dim),
            "BLOCK": max(16, self.attend_block // 2) if packed or rope is not None else self.attend_block,
        }

    def reads_ahead(self, rope: Rope | None) -> bool:
        """Whether `attend` has registers enough to read free slots, too, and to drop their values afterwards."""
        return rope is None and self.item == 2

    def _pairs(self, rope: Rope | None) -> dict[str, Any]:
        """Which dims turn, and in which pairs."""
        pairs, offset, pairing = (0, 0, "half") if rope is None else (rope.pairs, rope.offset, rope.pairing)
        stay = self.key_dim - 2 * pairs
        return {
            "TURNS": rope is not None,
            "PAIRS": pairs,
            "P_PAD": _matrix(pairs),
            "R_PAD": _matrix(stay) if stay else 0,
            "OFFSET": offset,
            "INTERLEAVED": pairing == "interleaved",
        }

    def settle(
        self, splits: int, pieces: int, width: int = 0, rope: Rope | None = None, *, alone: bool = False
    ) -> dict[str, Any]:
        """Constants of `settle` that follow from the sizes; `width`: dims of a sketch. `rope`: how keys turn, if their halves are kept.
        `alone`: whether a program has all slots.
        """
        return self._pairs(rope) | {
            "G": self.group,
            "G_PAD": _power_of_two(self.group),
            "D": self.key_dim,
            "D_PAD": _power_of_two(self.key_dim),
            "E": self.value_dim,
            "E_PAD": _power_of_two(self.value_dim),
            "S_PAD": _power_of_two(splits),
            "PIECES_PAD": _power_of_two(pieces),
            "W_PAD": _matrix(width),
            "BLOCK": self.alone_block if alone else self.settle_block,
            "ROWS": max(16, _ALONE_ELEMENTS // _power_of_two(max(self.key_dim, self.value_dim))),
            "TILE": COMPARED,
            "ROW_TILE": max(16, min(COMPARED, _PAIR_ELEMENTS // _power_of_two(max(self.key_dim, self.value_dim)))),
        }

    def pieces(self, slots: int, pairs: int, processors: int) -> tuple[int, int]:
        """How many programs of `settle` share a KV head's slots, and how many slots each has: whole blocks, and no more programs than
        multiprocessors have room for.

        Args:
            pairs, processors: see `splits`.
        """
        blocks = -(-slots // self.settle_block)
        each = -(-blocks // max(1, min(blocks, processors * SETTLERS_PER_PROCESSOR // pairs)))
        return -(-blocks // each), each * self.settle_block

    def look(self, dims: int, *, in_blocks: bool = False, packed: bool = False) -> dict[str, Any]:
        """Constants of `look` that depend on the sizes.

        Args:
            dims: numbers of a key that are looked at.
            in_blocks: whether keys lie in blocks, so that addresses take registers. packed: whether their `kv_dtype` is not the model's,
                so that a sketch reads whole keys.
        """
        slots = self.look_block(self.key_dim if packed else dims)
        return self.attend() | {"W_PAD": _matrix(dims), "BLOCK": max(16, slots // 2) if in_blocks else slots}

    def choose(self, splits: int, pieces: int, *, pages: bool) -> dict[str, Any]:
        """Constants of `choose` that follow from the sizes; `pages`: whether those are what it chooses."""
        return {"S_PAD": _power_of_two(splits), "PIECES_PAD": _power_of_two(pieces), "BLOCK": self.choose_block(pages=pages)}

    def take(self, splits: int) -> dict[str, Any]:
        """Constants of `take`."""
        return {"S_PAD": _power_of_two(splits), "BLOCK": 1024, "PAIRS": max(1, 2048 // _power_of_two(splits))}

    def give_back(self, block: int) -> dict[str, Any]:
        """Constants of `give_back`, for blocks of so many slots."""
        return {"BLOCK": max(32, min(512, _power_of_two(block)))}

    @property
    def observe_slots(self) -> int:
        """Slots of an `observe` program; in float32, whose products take registers of their own, half as many at most."""
        return max(16, min(128 if self.item < 4 else 64, _KEY_BYTES // (_matrix(self.key_dim) * self.item)))

    @property
    def observe_queries(self) -> int:
        """Queries that it takes at once, likewise."""
        return max(16, min(64 if self.item < 4 else 32, _QUERY_BYTES // (_matrix(self.key_dim) * self.item)))

    def observe(self) -> dict[str, Any]:
        """Constants of `observe` that follow from the sizes."""
        return self._tile(self.observe_slots, self.observe_queries)

    def over_slots(self) -> dict[str, Any]:
        """The same of `over_slots`: its sums are over the other side of a tile, for which smaller ones leave the registers."""
        return self._tile(max(16, self.observe_slots // 2), max(16, self.observe_queries // 2))

    def _tile(self, slots: int, queries: int) -> dict[str, Any]:
        return {"G": self.group, "D": self.key_dim, "D_PAD": _matrix(self.key_dim), "SLOTS": slots, "QUERIES": queries}

    def splits(self, slots: int, pairs: int, processors: int) -> tuple[int, int]:
        """How many programs share a KV head's slots, and how many slots each has: enough to fill the chip, and even loads.

        A launch ends with the processor that has most to do: 136 programs on 132 processors leave most of them idle half the time.
        So of up to `FINER` times as many programs as fill the chip, those with the least for that processor.

        Args:
            pairs: KV heads of all rows.
            processors: multiprocessors of the device.
        """
        blocks = -(-slots // self.attend_block)
        programs = NARROW_PROGRAMS_PER_PROCESSOR if self.narrow else PROGRAMS_PER_PROCESSOR
        filling = max(1, min(blocks, MAX_SPLITS, processors * programs // pairs))

        def most(splits: int) -> float:
            per_split = -(-blocks // splits)
            programs = pairs * -(-blocks // per_split)
            return -(-programs // processors) * (per_split + START)

        best = min(range(filling, min(blocks, MAX_SPLITS, FINER * filling) + 1), key=most)
        per_split = -(-blocks // best) * self.attend_block
        return -(-slots // per_split), per_split


def choosers(slots: int, pairs: int, processors: int, block: int) -> int:
    """How many programs of `choose` share a KV head's slots, or what they find out that there are of pages.

    Args:
        pairs, processors: see `Sizes.splits`. block: see `Sizes.choose_block`.
    """
    return max(1, min(MAX_CHOOSERS, -(-slots // block), processors // pairs))


def _matrix(n: int) -> int:
    return max(16, _power_of_two(n))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
