"""How a cache lies in memory: its options `storage` and `rope`, which change nothing of what it keeps or says, and `kv_dtype`, which
rounds keys and values.
"""

from __future__ import annotations

from kvdsl.errors import KvdslError

OPTIONS = ("storage", "rope", "kv_dtype")

ROPES = ("fused", "cached")

KV_DTYPES = ("model", "int8", "int4", "fp8")
"""What keys and values may be stored in. `kvdsl.interp.rounding` says what each is."""

GROUP = 32
"""Numbers that share a scale in `int4`."""

_SCALE_BYTES = 2

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


def rounds_to(kv_dtype: str, policy: str, *, halves: bool) -> str:
    """What `kv_dtype` says: itself, if there is such a one.

    Args:
        policy: its name, for messages. halves: whether every key's rotated half is kept beside it.

    Raises:
        KvdslError: if there is not, or if it does not go with `rope="cached"`.
    """
    if kv_dtype not in KV_DTYPES:
        raise KvdslError(
            f"`kv_dtype` is {kv_dtype!r}; give {', '.join(f'`{one}`' for one in KV_DTYPES[:-1])} or `{KV_DTYPES[-1]}`"
        )
    if kv_dtype != "model" and halves:
        raise KvdslError(
            f"`rope` is `cached` and `kv_dtype` is `{kv_dtype}`: the rotated halves of {policy}'s keys would take more than the keys; "
            f"leave `rope` out"
        )
    return kv_dtype


def vector_bytes(kv_dtype: str, dims: int) -> int:
    """What a key or value of so many dims takes in a `kv_dtype` other than `model`, its scales included."""
    if kv_dtype == "int4":
        return -(-dims // 2) + _SCALE_BYTES * -(-dims // GROUP)
    return dims + _SCALE_BYTES
