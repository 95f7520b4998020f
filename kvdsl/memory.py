"""How a cache lies in memory: the options `storage` and `rope`, which change nothing of what it keeps or says."""

from __future__ import annotations

from kvdsl.errors import KvdslError

ROPES = ("fused", "cached")

_BLOCK = 16
"""Slots of a block where nobody says how many, as in paged attention."""


def slots_of_a_block(storage: str) -> int:
    """What `storage` says: `blocks:16` is 16, `blocks` 16 as well, and `in_place` 0.

    Raises:
        KvdslError: if it is none of these.
    """
    kind, colon, size = storage.partition(":") if isinstance(storage, str) else ("", "", "")
    if kind == "in_place" and not colon:
        return 0
    if kind == "blocks" and not colon:
        return _BLOCK
    if kind == "blocks" and size.isascii() and size.isdigit() and len(size) <= 10 and 0 < int(size) < 2**31:
        return int(size)
    raise KvdslError(
        f"`storage` is {storage!r}; give `in_place`, `blocks`, or `blocks:16` with the slots of a block, 1 or more"
    )


def keeps_halves(rope: str, policy: str, *, compact: bool) -> bool:
    """What `rope` says: whether every key's rotated half is kept beside it.

    Args:
        policy: its name, for messages. compact: whether its positions are.

    Raises:
        KvdslError: if it says neither, or if the policy never turns a key.
    """
    if rope not in ROPES:
        raise KvdslError(f"`rope` is {rope!r}; give {' or '.join(f'`{one}`' for one in ROPES)}")
    if rope == "cached" and not compact:
        raise KvdslError(
            f"{policy} counts positions in the text, so that no key is ever turned: leave `rope` out (`cached` is for policies with "
            f"`positions compact`)"
        )
    return rope == "cached"
