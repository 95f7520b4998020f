"""Read a request's marks of its prompt: `kvdsl_spans` in `SamplingParams.extra_args`, which the API calls `vllm_xargs`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvdsl.budget import is_whole
from kvdsl.errors import KvdslError
from kvdsl.generation.spans import checksum, names_of
from kvdsl.runtime.marks import refuse_unknown
from kvdsl.runtime.spec import PolicySpec

KEY = "kvdsl_spans"


class RequestMarks(NamedTuple):
    """A prompt's spans and turns.

    Attributes:
        spans: by name, [start, end) in tokens; an end of None continues in the answer.
        turns: positions at which turns ended, ascending.
    """

    spans: dict[str, list[tuple[int, int | None]]]
    turns: list[int]


def request_marks(spec: PolicySpec, extra: Mapping[str, Any] | None, prompt: Sequence[int]) -> RequestMarks:
    """Read and check a request's marks.

    Args:
        extra: the request's `extra_args`.
        prompt: its token ids.

    Raises:
        KvdslError: if a mark is malformed, outside the prompt, of another prompt, or not read by the policy.
    """
    given = (extra or {}).get(KEY, {})
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise KvdslError(f"`{KEY}` is no JSON: {error}") from None
    if not isinstance(given, Mapping):
        raise KvdslError(f'`{KEY}` is {given!r}; give stretches by name, {{"tool": [[12, 40]]}}')
    rest = dict(given)
    known, turns = rest.pop("prompt", None), rest.pop("turns", [])
    if known is not None and list(known) != checksum(prompt):
        raise KvdslError(
            f"`{KEY}` is of another prompt ({known[:1]} tokens) than the one that vLLM made of the request ({len(prompt)} tokens): render "
            f"both by the same chat template, with the same tools"
        )
    for name in rest:
        refuse_unknown(spec, name)
    if turns and "turns" not in names_of(spec):
        raise KvdslError(f"{spec.name} reads no turns: leave `turns` out of `{KEY}`")
    spans = {name: [_stretch(name, one, len(prompt)) for one in _list(name, found)] for name, found in rest.items()}
    return RequestMarks(spans, sorted(_place("turns", at, len(prompt)) for at in _list("turns", turns)))


def _list(name: str, found: Any) -> list[Any]:
    if not isinstance(found, list | tuple):
        raise KvdslError(f"`{name}` in `{KEY}` is {found!r}; give a list")
    return list(found)


def _stretch(name: str, found: Any, length: int) -> tuple[int, int | None]:
    match found:
        case (first, last):
            start, end = _place(name, first, length), None if last is None else _place(name, last, length)
        case _:
            raise KvdslError(
                f"a stretch of `{name}` in `{KEY}` is {found!r}; give [start, end], the end behind its last token"
            )
    if end is not None and end <= start:
        raise KvdslError(
            f"`{name}` from {start} to {end} in `{KEY}` holds no token: the end is the place behind its last one"
        )
    return start, end


def _place(name: str, found: Any, length: int) -> int:
    if not is_whole(found, 0) or found > length:
        raise KvdslError(
            f"`{name}` in `{KEY}` names place {found!r}, and the prompt has {length} tokens: give places from 0 to {length}"
        )
    return found
