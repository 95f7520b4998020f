"""Undo and guessed tokens: `crop`, assisted decoding and prompt lookup.

In transformers an assistant guesses tokens, the model runs on all of them at once, and wrong ones are cropped. An evicting cache must then
restore what it evicted: `activate_past_recording` makes every layer record its steps (`kvdsl.runtime.state.undo`), and tokens are served
one by one, as if each had been generated alone.

The first forward has prompt and guesses together. The prompt's end decides when the policy first evicts: `generate` asks for logits of
the guesses and of the token before them (`logits_to_keep`), and `kvdsl.runtime.hf.forwards` passes their number on.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor

from kvdsl.budget import is_whole
from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.hf.versions import can_roll_back
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.undo import UndoLog, can_truncate, truncate

STEPS = 20
"""Default number of recorded steps, transformers' default number of guesses. A forward with more guesses is recorded whole."""

# -- a forward ---------------------------------------------------------------------------------------------------------


def prompt_tokens(tokens: int, guesses: int | None, length: int, prompt_length: int) -> int:
    """Return how many of a forward's first tokens are a prompt, while steps are recorded. The others are served one by one.

    Args:
        tokens: of the forward.
        guesses: how many of the last ones are guesses; None if unknown: then all that follow a generated token are.
        length: tokens cached before.
        prompt_length: tokens up to the end of the last prompt.
    """
    if guesses is None:
        guesses = tokens if length > prompt_length else 0
    sure = max(0, tokens - guesses)
    if length == 0:
        return max(1, sure)
    return sure if sure > 1 else 0  # a single token is the last generated one


def serve(
    log: UndoLog, state: SlotState, call: AttentionCall, prompt: int, guesses: int, one: Callable[[AttentionCall], Tensor]
) -> Tensor:
    """Serve a forward, recording every step: [batch, tokens, query_heads, value_dim].

    Args:
        prompt: how many of the first tokens are a prompt.
        guesses: how many of the last ones are guesses.
        one: serves the prompt, or one token after it.

    Raises:
        KvdslError: if layers must agree after every token but several came, or if they share a budget after the prompt but guesses came
            with it.
    """
    tokens, outs = call.query.shape[2], []
    if prompt and tokens > prompt and state.spec.across_layers:
        raise KvdslError(
            f"the layers of {state.spec.name} share a budget once all have seen the prompt, but guesses came with it, in one forward: "
            f"generate without `assistant_model` and `prompt_lookup_num_tokens`, or run the prompt by itself first"
        )
    if tokens - prompt > 1 and state.spec.victims == "layers":
        raise KvdslError(together(state.spec.name))
    if prompt:
        log.forget()
        outs.append(one(call.part(slice(0, prompt))))
    for t in range(prompt, tokens):
        log.note(state, at_least=guesses)
        outs.append(one(call.part(slice(t, t + 1))))
    return outs[0] if len(outs) == 1 else torch.cat(outs, 1)


def together(policy: str) -> str:
    """Return the message for a policy whose layers agree on victims, with guesses."""
    return (
        f"{policy} evicts what all layers agree on, token by token, but guesses come several in one forward: generate without "
        f"`assistant_model` and `prompt_lookup_num_tokens`"
    )


# -- taking back -------------------------------------------------------------------------------------------------------


class Undo:
    """Undo of one layer's tokens.

    Attributes:
        log: recorded steps, or None.
        prompt_length: tokens up to the end of the last prompt; the log does not undo these.
    """

    def __init__(self, state: SlotState) -> None:
        self._state = state
        self.log: UndoLog | None = None
        self.prompt_length = 0

    def record(self, steps: int) -> None:
        """Record steps from now on, so that the last `steps` can be undone."""
        if self.log is None:
            self.log = UndoLog(steps)
        self.log.steps = max(self.log.steps, steps)

    def forget(self) -> None:
        """Drop the recorded steps."""
        if self.log is not None:
            self.log.forget()

    def to_remove(self, length: int, tokens: int, *, noted_only: bool = False) -> int:
        """Return how many tokens `crop(tokens)` removes: `-tokens`, or those beyond a positive length.

        Args:
            length: cached tokens.
            noted_only: whether other layers cannot go back beyond recorded steps.

        Raises:
            KvdslError: if that many cannot be taken back, or `tokens` is not an int.
        """
        removed = asked_to_remove(tokens, length)
        unaided = not noted_only and can_truncate(self._state, length, length - removed, self.prompt_length)
        if not self._is_noted(length, removed) and not unaided:
            refuse_too_far(self.log, removed, length - self.prompt_length)
        return removed

    def take_back(self, length: int, removed: int) -> None:
        """Take back the number of tokens that `to_remove` returned."""
        if self.log is not None and self._is_noted(length, removed):
            self.log.take_back(self._state, removed)
        elif removed:
            truncate(self._state, length - removed)
            self.forget()
        self.prompt_length = min(self.prompt_length, length - removed)

    def _is_noted(self, length: int, steps: int) -> bool:
        """Whether the log covers so many steps."""
        return self.log is not None and steps <= min(len(self.log), length - self.prompt_length)


def refuse_unrecordable(policy: PolicySpec, layers: Sequence[Any]) -> None:
    """Raise KvdslError if a layer cannot undo tokens."""
    if policy.victims == "layers":
        raise KvdslError(together(policy.name))
    for index, layer in enumerate(layers):
        if not can_roll_back(layer):
            raise KvdslError(
                f"layer {index} is transformers' own {type(layer).__name__}, from which this release ({transformers.__version__}) "
                f"cannot take tokens back: generate without `assistant_model` and `prompt_lookup_num_tokens`"
            )


def refuse_second_run(cached: int) -> NoReturn:
    """Raise KvdslError if the whole text would run again on `cached` tokens."""
    raise KvdslError(
        f"{cached} tokens are cached, and the whole text is about to run again, as this release of transformers "
        f"({transformers.__version__}) does when guesses begin on a filled cache: generate without `assistant_model` and "
        f"`prompt_lookup_num_tokens` from the second turn on, or call `cache.reset()` and pass the whole conversation"
    )


def check_steps(steps: Any) -> int:
    """Return the number of steps to record.

    Raises:
        KvdslError: if it is not a positive int.
    """
    if not is_whole(steps, 1):
        raise KvdslError(f"`steps` is {steps!r}; give the number of tokens that `crop` may take back, 1 or more")
    return steps


def asked_to_remove(tokens: Any, length: int) -> int:
    """Return how many of the `length` cached tokens `crop(tokens)` removes.

    Args:
        tokens: the negative of that number; or, if positive, the length to keep.

    Raises:
        KvdslError: if it is not an int, or if fewer are cached.
    """
    try:
        if isinstance(tokens, bool):
            raise TypeError
        asked = operator.index(tokens)
    except TypeError:
        raise KvdslError(f"`crop` takes a whole number, not {tokens!r}: minus the number of tokens to remove (-8)") from None
    removed = -asked if asked <= 0 else max(0, length - asked)
    if removed > length:
        raise KvdslError(
            f"`crop` is to remove {removed} tokens, but the cache has {length}: remove fewer, or call `cache.reset()` to begin again"
        )
    return removed


def refuse_too_far(log: UndoLog | None, removed: int, generated: int) -> None:
    """Raise KvdslError unless the last `removed` tokens can be taken back, of the `generated` ones after the prompt."""
    if removed <= 0:
        return
    if removed > generated:
        raise KvdslError(
            f"`crop` is to remove {removed} tokens, but {generated} followed the prompt, and what left with the prompt's end is "
            f"gone: remove fewer, or call `cache.reset()` and run the shorter prompt"
        )
    if log is None:
        raise KvdslError(
            "what the last tokens displaced was not noted, so they cannot be taken back: call `cache.activate_past_recording()` "
            "before they come in (assisted decoding and prompt lookup of transformers 4.57 do not do so themselves)"
        )
    if removed > len(log):
        raise KvdslError(
            f"`crop` is to remove {removed} tokens, but the last {len(log)} were noted: call "
            f"`cache.activate_past_recording(steps={removed})` before they come in"
        )
