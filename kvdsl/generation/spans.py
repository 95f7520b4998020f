"""Find the spans of a conversation: roles and turns by the tokenizer's chat template, thinking by its markers."""

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

THINK = ("<think>", "</think>")
"""The markers around thinking of most models."""

_FARTHEST = 64
"""The number of last tokens searched for a marker."""


def spans_of(
    tokenizer: Any, messages: Sequence[Message], spans: Collection[str] | None = None, *, thinks: tuple[str, str] = THINK, **template: Any
) -> dict[str, list[Any]]:  # fmt: skip
    """Find the spans of a conversation that a model is about to answer.

    Args:
        messages: as for `apply_chat_template`.
        spans: the names to find, `turns` among them; None: every role, `think` and `turns`.
        thinks: the markers around thinking.
        template: further arguments of `apply_chat_template`, such as `tools`.

    Returns:
        By name, [start, end) of every stretch in tokens of the rendered prompt; an end of None continues in the answer. `turns` has
        the positions at which turns ended, `prompt` the number of tokens and their checksum. JSON can represent it.

    Raises:
        KvdslError: if the tokenizer has no chat template, or no offsets of its tokens in a text.
    """
    if not template.get("chat_template"):
        template.pop("chat_template", None)
        refuse_no_template(tokenizer)
    if not tokenizer.is_fast:
        raise KvdslError(f"{type(tokenizer).__name__} has no offsets of its tokens in a text: load it with `use_fast=True`")
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
    """Return the names that a policy reads, for `spans_of`."""
    reads_turns = "turn" in spec.hears or "turns" in spec.numbers
    return [*dict(spec.spans), *(["turns"] if reads_turns else [])]


def mark_all(cache: Any, spans: Mapping[str, list[Any]]) -> None:
    """Mark the spans of `spans_of` in an empty cache, before the prompt."""
    for at in spans.get("turns", []):
        cache.end_turn(at)
    for name in spans.keys() - {"turns", "prompt"}:
        for stretch in spans[name]:
            cache.mark(name, *stretch)


def checksum(ids: Sequence[int]) -> list[int]:
    """Return the number of tokens and a checksum of their ids."""
    return [len(ids), zlib.crc32(array("q", ids).tobytes())]


def refuse_no_template(tokenizer: Any) -> None:
    """Raise KvdslError for a tokenizer without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        raise KvdslError(
            f"{type(tokenizer).__name__} of {tokenizer.name_or_path} has no chat template: give it the model's, or use `generate`"
        )


def rendered(tokenizer: Any, messages: Sequence[Message], *, answer: bool, **template: Any) -> str:
    """Render the messages; with `answer`, also the header of the model's answer."""
    made: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer, **template)
    return made


def end_of(
    tokenizer: Any, messages: Sequence[Message], whole: str, at: int, *, answer: bool = False, template: Mapping[str, Any] | None = None
) -> int:  # fmt: skip
    """Return the character at which `messages` end in the text of a longer conversation; at least `at`."""
    if not messages:
        return at
    try:
        part = rendered(tokenizer, messages, answer=answer, **(template or {}))
    except Exception:  # templates raise many errors for unexpected input, such as a system prompt alone
        content = str(messages[-1]["content"]).strip()
        found = whole.find(content, at)
        return at if found < 0 else found + len(content)
    shortest = min(len(part), len(whole))
    return max(at, next((place for place in range(shortest) if part[place] != whole[place]), shortest))


def _stretches(
    tokenizer: Any, messages: Sequence[Message], whole: str, answer: bool, thinks: tuple[str, str], template: Mapping[str, Any]
) -> Iterator[tuple[str, int, int | None]]:  # fmt: skip
    """Yield name, start and end of each stretch, in characters. The markup around an answer is not part of it."""

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
    """Return the end of an answer's text, with or without its thinking, which templates may omit. None for an empty answer."""
    content = message.get("content")
    for words in (content.strip(), content.rpartition(closing)[2].strip()) if isinstance(content, str) else ():
        found = whole.find(words, start) if words else -1
        if found >= 0:
            return found + len(words)
    return None


def _thoughts(text: str, at: int, thinks: tuple[str, str]) -> Iterator[tuple[int, int | None]]:
    """Yield start and end of thinking after a character; the last end may be None."""
    opening, closing = thinks
    while (begin := text.find(opening, at)) >= 0:
        end = text.find(closing, begin)
        at = len(text) if end < 0 else end + len(closing)
        yield begin, None if end < 0 else at


class Thinking:
    """Finds thinking in a stream of tokens.

    Args:
        decode: returns the text of a token.
        around: the markers before and after thinking.
        mark: called with (start, None) when thinking starts, and with (start, end) when it ends.
        begun: start of thinking that continues from the prompt, or None.
    """

    def __init__(
        self, decode: Callable[[int], str], around: tuple[str, str], mark: Callable[[int, int | None], None], begun: int | None = None
    ) -> None:  # fmt: skip
        self._decode, self._around, self._mark = decode, around, mark
        self._pieces: list[str] = []
        self._begun = begun

    def read(self, token: int, place: int) -> None:
        """Read the token at a position of the text."""
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
        """Return how many of the last tokens a marker covers."""
        return next(count for count in range(1, len(self._pieces) + 1) if marker in "".join(self._pieces[-count:]))

    def end(self, place: int) -> None:
        """End the answer, possibly inside thinking."""
        if self._begun is not None:
            self._mark(self._begun, place)
