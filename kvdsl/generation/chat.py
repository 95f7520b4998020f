"""Chat with a model, and mark in its cache the parts of the text that the policy reads: roles, thinking and turns.

The tokenizer's chat template locates each message in the text, including its markup. The message is marked by its role if the policy
reads a span of that name. Thinking is marked as it is generated, before it is cached.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from kvdsl.errors import KvdslError
from kvdsl.generation.models import encode, ends_of
from kvdsl.generation.spans import THINK, Message, Thinking, end_of, refuse_no_template, rendered
from kvdsl.runtime.hf.cache import KVCache
from kvdsl.runtime.hf.versions import with_cache

_REPLY = "\ue000kvdsl's reply\ue000"
"""Stands for the model's earlier answers in the rendered conversation, since the cache holds their own tokens."""


def chat(model: Any, tokenizer: Any, cache: KVCache, *, thinks: tuple[str, str] = THINK) -> Chat:
    """Start a chat: `talk = kvdsl.chat(model, tokenizer, cache)`; each `talk("Hello")` is a turn.

    Args:
        cache: an empty cache of the model.
        thinks: the markers around the model's thinking, which becomes the span `think`.

    Raises:
        KvdslError: if the tokenizer has no chat template, or the cache is not empty.
    """
    return Chat(model, tokenizer, cache, thinks)


class Chat:
    """A conversation of one row.

    Attributes:
        messages: all messages so far, including the model's.
        ids: the text so far as tokens; the last may not be cached yet.
    """

    def __init__(self, model: Any, tokenizer: Any, cache: KVCache, thinks: tuple[str, str] = THINK) -> None:
        refuse_no_template(tokenizer)
        if cache.get_seq_length() != 0:
            raise KvdslError("the cache is not empty: call `cache.reset()` before the chat")
        self.messages: list[Message] = []
        self.ids: list[int] = []
        self._model, self._tokenizer, self._cache, self._thinks = model, tokenizer, cache, thinks
        self._spans = {name for name, _ in cache.spec.spans}

    def __call__(self, messages: str | Sequence[Message], **settings: Any) -> str:
        """Run a turn: read the new messages, generate an answer, and end the turn.

        Args:
            messages: the user's text, or messages for the template, such as `{"role": "tool", "content": "..."}`.
            settings: arguments of `generate`, such as `max_new_tokens`.

        Returns:
            The answer, including its thinking, without special tokens.

        Raises:
            KvdslError: for several beams or sequences: a chat has one row.
        """
        if settings.get("num_beams", 1) != 1 or settings.get("num_return_sequences", 1) != 1:
            raise KvdslError("a chat has one row: leave out `num_beams` and `num_return_sequences`")
        said: list[Message] = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        thoughts = _Thoughts(self._tokenizer, self._cache, self._thinks if "think" in self._spans else None)
        for role, text in self._new_parts(said):
            self._read(role, encode(self._tokenizer, text), thoughts)
        reply = self._answer(thoughts, settings)
        self.messages += [*said, {"role": "assistant", "content": reply}]
        self._cache.end_turn()
        return reply

    def _read(self, role: str | None, new: list[int], thoughts: _Thoughts) -> None:
        """Read a part of the text and mark it by its role; thinking may start in the part that opens an answer."""
        if role in self._spans and new:
            self._cache.mark(role, len(self.ids), len(self.ids) + len(new))
        if role is None:
            thoughts.begin(len(self.ids))
            thoughts.read(new)
        self.ids += new

    def _answer(self, thoughts: _Thoughts, settings: Mapping[str, Any]) -> str:
        """Generate the model's answer."""
        begin, device = len(self.ids), self._model.device
        ids = torch.tensor([self.ids], device=device)
        if "assistant" in self._spans:
            self._cache.mark("assistant", begin)
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), **with_cache(self._cache), stopping_criteria=[thoughts], **settings
        )
        made: list[int] = (out if isinstance(out, Tensor) else out.sequences)[0, begin:].tolist()
        reply: str = self._tokenizer.decode(made, skip_special_tokens=True)
        if made and made[-1] in ends_of(self._model):
            made.pop()  # the template adds it before the next message
        self.ids += made
        thoughts.end(len(self.ids))
        if "assistant" in self._spans and made:
            self._cache.mark("assistant", begin, len(self.ids))
        return reply

    # -- the template --------------------------------------------------------------------------------------------------

    def _new_parts(self, said: Sequence[Message]) -> Iterator[tuple[str | None, str]]:
        """Yield the new parts of the text with their roles: empty for the end of the last answer, None for the start of the next."""
        before = [{**one, "content": _REPLY} if one["role"] == "assistant" else one for one in self.messages]
        whole = rendered(self._tokenizer, [*before, *said], answer=True)
        at = whole.rindex(_REPLY) + len(_REPLY) if before else 0
        behind = end_of(self._tokenizer, before, whole, at)
        yield "", whole[at:behind]
        at = behind
        for count, message in enumerate(said, 1):
            end = end_of(self._tokenizer, [*before, *said[:count]], whole, at)
            yield message["role"], whole[at:end]
            at = end
        yield None, whole[at:]


class _Thoughts(StoppingCriteria):  # type: ignore[misc]
    """Reads each generated token before it is cached and marks thinking; never stops generation.

    Args:
        around: the markers before and after thinking; None if the policy does not read it.
    """

    def __init__(self, tokenizer: Any, cache: KVCache, around: tuple[str, str] | None) -> None:
        self._place = 0
        self._thinking: Thinking | None = None
        if around is not None:
            self._thinking = Thinking(
                lambda token: tokenizer.decode([token]), around, lambda *ends: cache.mark("think", *ends)
            )

    def begin(self, place: int) -> None:
        """Start reading at a position of the text."""
        self._place = place

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        self.read(input_ids[0, self._place :].tolist())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def read(self, new: Sequence[int]) -> None:
        """Read more tokens."""
        for token in new:
            if self._thinking is not None:
                self._thinking.read(token, self._place)
            self._place += 1

    def end(self, place: int) -> None:
        """End the answer, possibly inside thinking."""
        if self._thinking is not None:
            self._thinking.end(place)
