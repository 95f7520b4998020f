"""Sizes of the kernels' blocks, splits and warps, derived from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvdsl.runtime.rope import Rope

_TILE_BYTES = 1 << 14
"""Bytes of keys, and as many of values, that `attend` loads per stage. Half of that if it rotates or decodes keys in registers."""

_SETTLE_ELEMENTS = 2048
"""Elements of a [G, BLOCK] tile of logits in `settle`: 16 per thread (8 on AMD)."""

_ALONE_ELEMENTS = 8192
"""The same if a program serves all slots of a KV head or row, with 4× the threads. Also elements of its tiles of keys or values."""

SETTLED_AT_ONCE = 2048
"""Slots per iteration of `settle_prompt`, which has no logits."""

COMPARED = 64
"""Slots per side of a tile that compares slots with each other; each thread holds a few elements."""

_PAIR_ELEMENTS = 2048
"""Elements of keys or values per side of such a tile, if it multiplies them. AMD's registers hold no more."""

VOTED_AT_ONCE = 256
"""Slots or pages per iteration of `vote`."""

_LOOKED_AT = 1 << 12
"""Elements of a tile of `look`: keys over the sketch's dims, or bounds of pages."""

_KEY_BYTES = 1 << 15
"""Bytes of keys that an `observe` program keeps. It reads every query, so many slots should share those loads."""

_QUERY_BYTES = 1 << 14
"""Bytes of one head's queries that it loads per stage."""

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
"""Triton's compile options; decision 53 compares others on an H200.

The narrow options use few warps where registers suffice, because few warps exchange little data. Without `maxnreg`, ptxas aims at several
programs per multiprocessor, and spills. `choose` and programs with all slots of a head fit once per multiprocessor, `look` twice.
"""

EVERYTHING = 2**30
"""The window of models without one."""

SPLIT = 256
"""Slots per `attend` program, and per partial sum: a multiple of every block. It is fixed, so that a row's sums never depend on the rows
beside it. A head's partial sums, written and read again, are 3 % of its keys and values. Twice the slots would halve that, but leave less
than a program a multiprocessor at 8 rows of 1,024 slots, which an H200 punished by a third of `attend`.
"""

MAX_SPLITS = 64
"""Most partial sums per KV head. Beyond `SPLIT` × as many slots, programs take more."""

SETTLERS_PER_PROCESSOR = 4
"""Target number of `settle` programs per multiprocessor."""

AT_ONCE_PER_PROCESSOR = 0
"""Programs of `at_once` per multiprocessor that may wait for each other. 0: steps always take two launches, because no GPU has run it."""

MAX_CHOOSERS = 16
"""Most `choose` programs per KV head. The last one to finish searches every program's list for each candidate."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine the kernels' constants.

    Attributes:
        group: query heads per KV head. key_dim, value_dim: size of a key and of a value. item: bytes per element.
        hopper: whether the GPU is a Hopper. Its narrow options come from measurements on an H200. Compiled for other GPUs, kernels spill
            with them.
    """

    group: int
    key_dim: int
    value_dim: int
    item: int
    hopper: bool = False

    @property
    def attend_block(self) -> int:
        """Slots per iteration of `attend`; at least 16, the rows of a matrix product."""
        wide = _TILE_BYTES // (_power_of_two(max(self.key_dim, self.value_dim)) * self.item)
        return max(16, min(64 if self.narrow else 128, wide))

    @property
    def settle_block(self) -> int:
        """Slots per iteration of `settle` if programs share a KV head's slots."""
        return max(16, min(512, _SETTLE_ELEMENTS // _power_of_two(self.group)))

    @property
    def alone_block(self) -> int:
        """Slots per iteration of `settle` if a program serves all slots of a head, and of `make_room` and `agree`."""
        return max(16, min(2048, _ALONE_ELEMENTS // _power_of_two(self.group)))

    @property
    def narrow(self) -> bool:
        """Whether two warps can hold the sums of `attend`.

        Then the group's queries fit one matrix tile, elements have 16 bits, and keys and values have at most 128 dims, a power of
        two, so nothing is masked.
        """
        short = all(dim <= 128 and dim == _matrix(dim) for dim in (self.key_dim, self.value_dim))
        return self.hopper and self.item == 2 and _matrix(self.group) == 16 and short

    @property
    def attend_options(self) -> dict[str, int]:
        """Compile options of `attend`."""
        return NARROW_ATTEND_OPTIONS if self.narrow else ATTEND_OPTIONS

    def observe_options(self, *, reduced: bool) -> dict[str, int]:
        """Return compile options of `observe`; `reduced`: whether it also reads the results of `over_slots`."""
        return NARROW_OBSERVE_OPTIONS if self.hopper and self.item == 2 and not reduced else OBSERVE_OPTIONS

    def choose_block(self, *, pages: bool) -> int:
        """Return slots or pages per iteration of `choose`. With more pages AMD's compiler runs out of scalar registers."""
        return 1024 if pages else 2048

    def look_block(self, dims: int) -> int:
        """Return slots or pages per iteration of `look`, with `dims` elements each."""
        return max(16, min(256, _LOOKED_AT // _matrix(dims)))

    def attend(self, rope: Rope | None = None, *, few: bool = False, packed: bool = False) -> dict[str, Any]:
        """Return constants of `attend` that depend on the sizes.

        Args:
            rope: the rotation of keys, if the kernel rotates them. few: see `turns_few`. packed: whether it decodes them from another
                `kv_dtype`. Either takes registers and halves the block, unless two warps rotate few.
        """
        short = packed or (rope is not None and not (few and self.narrow))
        return _pairs(rope, self.key_dim) | {
            "G": self.group,
            "G_PAD": _matrix(self.group),
            "D": self.key_dim,
            "D_PAD": _matrix(self.key_dim),
            "E": self.value_dim,
            "E_PAD": _matrix(self.value_dim),
            "BLOCK": max(16, self.attend_block // 2) if short else self.attend_block,
            "FEW": few,
            "KEEPS": 0,
            "KEPT": 0,
        }

    def at_once(self, splits: int, rope: Rope | None = None, *, few: bool = False) -> dict[str, Any]:
        """Return constants of `at_once` that depend on the sizes; see `attend` and `settle`."""
        attends = self.attend(rope, few=few)
        settles = self.settle(splits, splits, rope=rope) | {"D_PAD": attends["D_PAD"], "E_PAD": attends["E_PAD"]}
        return settles | {"M_PAD": attends["G_PAD"], "BLOCK": SPLIT, "TOGETHER": attends["BLOCK"], "FEW": few}

    def fits_at_once(self, slots: int, pairs: int, processors: int) -> bool:
        """Return whether `at_once` can serve steps: whether one program holds a split's logits, and programs can wait for each other.

        Args:
            pairs: KV heads of all rows. processors: see `pieces`; 0 if programs run one after another.
        """
        splits, each = self.splits(slots)
        held = each == SPLIT and self.group <= 8
        dims = all(16 <= dim <= 128 for dim in (self.key_dim, self.value_dim))  # `attend` pads fewer otherwise than `settle`
        most = processors * min(AT_ONCE_PER_PROCESSOR, _most_at_once(self))
        return AT_ONCE_PER_PROCESSOR > 0 and held and dims and (splits == 1 or splits * pairs <= most)

    def at_once_options(self, splits: int) -> dict[str, int]:
        """Return compile options of `at_once`. Only a cooperative launch lets programs wait for each other."""
        stages = 1 if self.item == 4 else 2  # loading float32 ahead would take more registers than there are
        options = {"num_warps": 4, "num_stages": stages, "maxnreg": 168 if _most_at_once(self) == 3 else 255}
        return options | ({"launch_cooperative_grid": True} if splits > 1 else {})

    def reads_ahead(self, rope: Rope | None) -> bool:
        """Return whether `attend` has enough registers to read free slots too and to mask their values afterwards."""
        return rope is None and self.item == 2

    def settle(
        self, splits: int, pieces: int, width: int = 0, rope: Rope | None = None, *, alone: bool = False
    ) -> dict[str, Any]:
        """Return constants of `settle` that depend on the sizes.

        Args:
            splits: see `splits`. pieces: see `pieces`. width: dims of a sketch.
            rope: the rotation of keys, if the cache stores rotated halves. alone: whether a program serves all slots of a head.
        """
        return _pairs(rope, self.key_dim) | {
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
            "TOGETHER": 0,
        }

    def pieces(self, slots: int, pairs: int, processors: int) -> tuple[int, int]:
        """Return how many `settle` programs share a KV head's slots, and the slots per program.

        Each program takes whole blocks. All heads together get at most `SETTLERS_PER_PROCESSOR` programs per multiprocessor, but every head
        gets at least one.

        Args:
            pairs: KV heads of all rows. processors: multiprocessors of the device.
        """
        blocks = -(-slots // self.settle_block)
        each = -(-blocks // max(1, min(blocks, processors * SETTLERS_PER_PROCESSOR // pairs)))
        return -(-blocks // each), each * self.settle_block

    def look(self, dims: int, *, in_blocks: bool = False, packed: bool = False) -> dict[str, Any]:
        """Return constants of `look` that depend on the sizes.

        Args:
            dims: elements of a key that `look` reads.
            in_blocks: whether keys lie in blocks; their addresses take registers. packed: whether keys have another `kv_dtype` than the
                model's; then a sketch reads whole keys.
        """
        slots = self.look_block(self.key_dim if packed else dims)
        return self.attend() | {"W_PAD": _matrix(dims), "BLOCK": max(16, slots // 2) if in_blocks else slots}

    def choose(self, splits: int, pieces: int, *, pages: bool) -> dict[str, Any]:
        """Return constants of `choose` that depend on the sizes; `pages`: whether it chooses pages."""
        programs = {"S_PAD": _power_of_two(splits), "PIECES_PAD": _power_of_two(pieces)}
        return programs | {"D": self.key_dim, "BLOCK": self.choose_block(pages=pages)}

    def take(self, splits: int) -> dict[str, Any]:
        """Return constants of `take`."""
        return {"S_PAD": _power_of_two(splits), "BLOCK": 1024, "PAIRS": max(1, 2048 // _power_of_two(splits))}

    def give_back(self, block: int) -> dict[str, Any]:
        """Return constants of `give_back`; `block`: slots per block."""
        return {"BLOCK": max(32, min(512, _power_of_two(block)))}

    @property
    def observe_slots(self) -> int:
        """Slots per `observe` program. float32 products take extra registers, so at most half as many."""
        return max(16, min(128 if self.item < 4 else 64, _KEY_BYTES // (_matrix(self.key_dim) * self.item)))

    @property
    def observe_queries(self) -> int:
        """Queries per iteration of `observe`; for float32 at most half as many."""
        return max(16, min(64 if self.item < 4 else 32, _QUERY_BYTES // (_matrix(self.key_dim) * self.item)))

    def observe(self) -> dict[str, Any]:
        """Return constants of `observe` that depend on the sizes."""
        return self._tile(self.observe_slots, self.observe_queries)

    def over_slots(self) -> dict[str, Any]:
        """Return the same for `over_slots`. It sums over the other axis of a tile, and has registers only for smaller tiles."""
        return self._tile(max(16, self.observe_slots // 2), max(16, self.observe_queries // 2))

    def _tile(self, slots: int, queries: int) -> dict[str, Any]:
        return {"G": self.group, "D": self.key_dim, "D_PAD": _matrix(self.key_dim), "SLOTS": slots, "QUERIES": queries}

    def splits(self, slots: int) -> tuple[int, int]:
        """Return how many `attend` programs share a KV head's slots, and the slots per program, from the slots alone."""
        each = max(SPLIT, -(-slots // (MAX_SPLITS * self.attend_block)) * self.attend_block)
        return -(-slots // each), each


def choosers(slots: int, pairs: int, processors: int, block: int) -> int:
    """Return how many `choose` programs share a KV head's slots or pages.

    Args:
        pairs, processors: see `Sizes.pieces`. block: see `Sizes.choose_block`.
    """
    return max(1, min(MAX_CHOOSERS, -(-slots // block), processors // pairs))


def turns_few(sizes: Sizes, slides: bool, packed: bool) -> bool:
    """Return whether `attend` has a second loop for the few keys that it rotates. slides: see `SLIDES` in `kvdsl.lower.triton`."""
    return slides and not packed and sizes.item == 2


def _most_at_once(sizes: Sizes) -> int:
    """Return for how many programs of `at_once` a multiprocessor has registers."""
    return 3 if sizes.hopper and sizes.item == 2 else 2


def _pairs(rope: Rope | None, key_dim: int) -> dict[str, Any]:
    """Return constants for the rotated dims and their pairs."""
    pairs, offset, pairing = (0, 0, "half") if rope is None else (rope.pairs, rope.offset, rope.pairing)
    stay = key_dim - 2 * pairs
    return {
        "TURNS": rope is not None,
        "PAIRS": pairs,
        "P_PAD": _matrix(pairs),
        "R_PAD": _matrix(stay) if stay else 0,
        "OFFSET": offset,
        "INTERLEAVED": pairing == "interleaved",
    }


def _matrix(n: int) -> int:
    return max(16, _power_of_two(n))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()
