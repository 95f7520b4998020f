"""The memory layout of a cache: the options `storage` and `rope`, which do not change results, and `kv_dtype`, which rounds keys and
values.
"""

from __future__ import annotations

from kvdsl.errors import KvdslError

OPTIONS = ("storage", "rope", "kv_dtype")

ROPES = ("fused", "cached")

KV_DTYPES = ("model", "int8", "int4", "fp8")
"""Storage types of keys and values, defined in `kvdsl.interp.rounding`. `int8/int4` stores keys in the first, values in the second."""

GROUP = 32
"""The number of values that share a scale in `int4`."""

_SCALE_BYTES = 2

_BLOCK = 16
"""The default slots of a block, as in paged attention."""


def slots_of_a_block(storage: str) -> int:
    """Return the slots of a block in `storage`: 16 for `blocks:16` and for `blocks`, 0 for `in_place`.

    Raises:
        KvdslError: for anything else.
    """
    kind, colon, size = storage.partition(":") if isinstance(storage, str) else ("", "", "")
    if kind == "in_place" and not colon:
        return 0
    if kind == "blocks" and not colon:
        return _BLOCK
    if kind == "blocks" and size.isascii() and size.isdigit() and len(size) <= 10 and 0 < int(size) < 2**31:
        return int(size)
    raise KvdslError(
        f"`storage` is {storage!r}; use `in_place`, `blocks`, or `blocks:16` with the slots of a block, 1 or more"
    )


def keeps_halves(rope: str, policy: str, *, compact: bool) -> bool:
    """Return whether `rope` caches every key's rotated half.

    Args:
        policy: its name, for messages. compact: whether its positions are compact.

    Raises:
        KvdslError: for an unknown value, or if the policy never rotates keys.
    """
    if rope not in ROPES:
        raise KvdslError(f"`rope` is {rope!r}; use {' or '.join(f'`{one}`' for one in ROPES)}")
    if rope == "cached" and not compact:
        raise KvdslError(
            f"{policy} uses positions in the text, so it never rotates keys: leave out `rope` (`cached` is for policies with "
            f"`positions compact`)"
        )
    return rope == "cached"


def rounds_to(kv_dtype: str, policy: str, *, halves: bool) -> str:
    """Return `kv_dtype` after a check.

    Args:
        policy: its name, for messages. halves: whether every key's rotated half is cached.

    Raises:
        KvdslError: for an unknown value, or together with `rope="cached"`.
    """
    pair = dtypes_of(kv_dtype)
    if kv_dtype != "model" and halves:
        raise KvdslError(
            f"`rope` is `cached` and `kv_dtype` is `{kv_dtype}`: the rotated halves of {policy}'s keys would take more than the keys; "
            f"leave out `rope`"
        )
    return "/".join(dict.fromkeys(pair))


def dtypes_of(kv_dtype: str) -> tuple[str, str]:
    """Return the storage types of keys and of values, such as those of `int8/int4`, or twice that of `int8`.

    Raises:
        KvdslError: for anything else. Only both can be in the model's dtype.
    """
    key, slash, value = kv_dtype.partition("/") if isinstance(kv_dtype, str) else ("", "", "")
    pair = key, value if slash else key
    if not set(pair) <= set(KV_DTYPES) or (slash and "model" in pair):
        raise KvdslError(
            f"`kv_dtype` is {kv_dtype!r}; use {', '.join(f'`{one}`' for one in KV_DTYPES[:-1])} or `{KV_DTYPES[-1]}`, or one for keys and "
            f"one for values: `int8/int4`"
        )
    return pair


def vector_bytes(kv_dtype: str, dims: int) -> int:
    """Return the bytes of a vector of so many dims in one of `KV_DTYPES` other than `model`, including scales."""
    if kv_dtype == "int4":
        return -(-dims // 2) + _SCALE_BYTES * -(-dims // GROUP)
    return dims + _SCALE_BYTES
