"""Find the spans of a conversation: roles and turns by the tokenizer's chat template, thinking by what stands around it."""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvdsl.errors import KvdslError

if TYPE_CHECKING:
    from kvdsl.runtime.spec import PolicySpec

Message = Mapping[str, Any]

Stretch = list[int | None]
"""Where a stretch of tokens begins, and the place behind its last one; None: it goes on."""

THINK = ("<think>", "</think>")
"""What most models that think write around it."""

_FARTHEST = 64
"""Tokens among the last ones in which a marker of thinking may lie."""


def spans_of(
    tokenizer: Any, messages: Sequence[Message], spans: Collection[str] | None = None, *, thinks: tuple[str, str] = THINK, **template: Any
) -> dict[str, list[Any]]:  # fmt: skip
    """Find the spans of a conversation that a model is about to answer.

    Args:
        messages: as the chat template takes them.
        spans: the names to find, `turns` among them; None: every role, `think` and `turns`.
        thinks: what the model writes around its thinking.
        template: more of `apply_chat_template`, `tools` for example.

    Returns:
        By name, [start, end] of every stretch in the tokens that the template makes; end is None where the answer goes on. `turns` has
        the places where turns have ended, and `prompt` the number of tokens and their checksum. It can be written as JSON.

    Raises:
        KvdslError: if the tokenizer has no chat template, or does not say where its tokens lie in a text.
    """
    if not template.get("chat_template"):
        template.pop("chat_template", None)
        refuse_no_template(tokenizer)
    if not tokenizer.is_fast:
        raise KvdslError(
            f"{type(tokenizer).__name__} does not say where its tokens lie in a text: load it with `use_fast=True`"
        )
    answer = template.pop("add_generation_prompt", True)
    whole = rendered(tokenizer, messages, answer=answer, **template)
    made = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    begins = [begin for begin, _ in made["offset_mapping"]]
    found: dict[str, list[Any]] = defaultdict(list)
    turns = []
    for name, start, end in _stretches(tokenizer, messages, whole, answer, thinks, template):
        stretch = [bisect_left(begins, start), None if end is None else bisect_left(begins, end)]
        if stretch[0] != stretch[1]:
            found[name].append(stretch)
        if name == "assistant" and end is not None:
            turns.append(stretch[1])
    found["turns"] = turns
    return {name: one for name, one in found.items() if spans is None or name in spans} | {
        "prompt": checksum(made["input_ids"])
    }


def names_of(spec: PolicySpec) -> list[str]:
    """The names of what a policy reads, as `spans_of` takes them."""
    reads_turns = "turn" in spec.hears or "turns" in spec.numbers
    return [*dict(spec.spans), *(["turns"] if reads_turns else [])]


def mark_all(cache: Any, spans: Mapping[str, list[Any]]) -> None:
    """Mark in an empty cache what `spans_of` found of the prompt that comes next."""
    for at in spans.get("turns", []):
        cache.end_turn(at)
    for name in spans.keys() - {"turns", "prompt"}:
        for stretch in spans[name]:
            cache.mark(name, *stretch)


def checksum(ids: Sequence[int]) -> list[int]:
    """The number of tokens and a checksum: other texts have others."""
    return [len(ids), zlib.crc32(array("q", ids).tobytes())]


def refuse_no_template(tokenizer: Any) -> None:
    """Raise KvdslError for a tokenizer without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise KvdslError(
            f"{type(tokenizer).__name__} of {tokenizer.name_or_path} has no chat template: give it the model's, or use `generate`"
        )


def rendered(tokenizer: Any, messages: Sequence[Message], *, answer: bool, **template: Any) -> str:
    """The template's text; with `answer`, up to where the model's answer begins."""
    made: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer, **template)
    return made


def end_of(
    tokenizer: Any, messages: Sequence[Message], whole: str, at: int, *, answer: bool = False, template: Mapping[str, Any] | None = None
) -> int:  # fmt: skip
    """Return where some messages end in the text of more: up to there their own text is the same. It is not before `at`."""
    if not messages:
        return at
    try:
        part = rendered(tokenizer, messages, answer=answer, **(template or {}))
    except Exception:  # templates refuse what they do not expect in many ways: a system prompt alone, for example
        content = str(messages[-1]["content"]).strip()
        found = whole.find(content, at)
        return at if found < 0 else found + len(content)
    shortest = min(len(part), len(whole))
    return max(at, next((place for place in range(shortest) if part[place] != whole[place]), shortest))


def _stretches(
    tokenizer: Any, messages: Sequence[Message], whole: str, answer: bool, thinks: tuple[str, str], template: Mapping[str, Any]
) -> Iterator[tuple[str, int, int | None]]:  # fmt: skip
    """Yield name, start and end of each stretch, in characters. What the template writes around an answer is no part of it."""

    def end(count: int, at: int, *, behind_header: bool = False) -> int:
        return end_of(tokenizer, messages[:count], whole, at, answer=behind_header, template=template)

    at = 0
    for count, message in enumerate(messages):
        answered = message["role"] == "assistant"
        header = end(count, at)
        start = end(count, header, behind_header=True) if answered else header
        words_end = _content_end(message, whole, start, thinks[1]) if answered else None
        at = end(count + 1, start) if words_end is None else words_end
        goes_on = answered and count + 1 == len(messages) and not answer
        yield message["role"], start, None if goes_on else at
        if answered:
            yield from (
                ("think", first, last)
                for first, last in _thoughts(whole[:at], header, thinks)
                if goes_on or last is not None
            )
    if answer:
        yield "assistant", len(whole), None
        yield from (("think", first, last) for first, last in _thoughts(whole, at, thinks))


def _content_end(message: Message, whole: str, start: int, closing: str) -> int | None:
    """Return where an answer's words end; templates may leave its thinking out. None for an answer without words."""
    content = message.get("content")
    for words in (content.strip(), content.rpartition(closing)[2].strip()) if isinstance(content, str) else ():
        found = whole.find(words, start) if words else -1
        if found >= 0:
            return found + len(words)
    return None


def _thoughts(text: str, at: int, thinks: tuple[str, str]) -> Iterator[tuple[int, int | None]]:
    """Yield where thinking begins and ends behind a place; the last may not have ended."""
    opening, closing = thinks
    while (begin := text.find(opening, at)) >= 0:
        end = text.find(closing, begin)
        at = len(text) if end < 0 else end + len(closing)
        yield begin, None if end < 0 else at


class Thinking:
    """Finds thinking in tokens as they come.

    Args:
        decode: the text of a token.
        around: what stands before and behind thinking.
        mark: gets the place where thinking begins and None, and, once it has ended, both places.
        begun: where it has begun already.
    """

    def __init__(
        self, decode: Callable[[int], str], around: tuple[str, str], mark: Callable[[int, int | None], None], begun: int | None = None
    ) -> None:  # fmt: skip
        self._decode, self._around, self._mark = decode, around, mark
        self._pieces: list[str] = []
        self._begun = begun

    def read(self, token: int, place: int) -> None:
        """Read the token at a place of the text."""
        self._pieces = [*self._pieces[-_FARTHEST:], self._decode(token)]
        wanted = self._around[self._begun is not None]
        if wanted not in "".join(self._pieces):
            return
        if self._begun is None:
            self._begun = place + 1 - self._tokens_of(wanted)
            self._mark(self._begun, None)
        else:
            self._mark(self._begun, place + 1)
            self._begun = None
        self._pieces.clear()

    def _tokens_of(self, marker: str) -> int:
        """In how many of the last tokens a marker lies."""
        return next(count for count in range(1, len(self._pieces) + 1) if marker in "".join(self._pieces[-count:]))

    def end(self, place: int) -> None:
        """The answer has ended, perhaps in the middle of a thought."""
        if self._begun is not None:
            self._mark(self._begun, place)
