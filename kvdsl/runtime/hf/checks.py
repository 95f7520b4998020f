"""Checks of a layer's forward. Each message says what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kvdsl.budget import spelled
from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.hf.counting import Counting
from kvdsl.runtime.lifetimes import plain_tensors
from kvdsl.runtime.state.slots import SlotState

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of keys and values."""

MOST_TOKENS = 2**31 - 1
"""Longest text: positions are int32."""

UNTOLD = -1
"""The window of a forward without a mask."""


def check_dtype(dtype: torch.dtype) -> None:
    """Raise KvdslError for an unsupported dtype of keys and values."""
    if dtype not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise KvdslError(f"keys and values are {str(dtype).removeprefix('torch.')}; kvdsl stores {names}: convert the model")


def check_continues(state: SlotState, key: Tensor, length: int, batch_size: int) -> None:
    """Raise KvdslError if new keys differ from the cache in rows or device, or have an unsupported dtype."""
    if length == 0:
        check_dtype(key.dtype)
        return
    if key.shape[0] != batch_size:
        raise KvdslError(
            f"the cache holds {batch_size} rows, but {key.shape[0]} came in: call `cache.reset()` before another batch"
        )
    if state.allocated and (key.device != state.position.device):
        raise KvdslError(
            f"the cache lies on {state.position.device}, but the model now runs on {key.device}: call `cache.reset()`"
        )


def check_length(length: int, tokens: int) -> None:
    """Raise KvdslError before positions overflow int32."""
    if length + tokens > MOST_TOKENS:
        raise KvdslError(
            f"a cache counts {MOST_TOKENS:,} tokens, and {length:,} have been seen: call `cache.reset()` and begin again with the "
            f"end of the text"
        )


def check_window(module: nn.Module, layer: int, window: int | None, asked: int | None) -> None:
    """Raise KvdslError if the model's mask and its cache have different windows. The self-test pads, so that masks are checked there."""
    if asked in (UNTOLD, window):
        return
    masked, cached = ("the whole text" if size is None else f"{size} tokens" for size in (asked, window))
    raise KvdslError(
        f"{type(module).__name__} is masked to see {masked}, but transformers' own cache would give it {cached} in layer {layer}: "
        f"prompts and decoded tokens would see different tokens, which no policy supports"
    )


def check_text(state: SlotState, positions: Tensor | None, real: Tensor | None, tokens: int) -> None:
    """Raise KvdslError if positions go back, as for an unrelated prompt. Skipped in decode steps on GPUs, to avoid waiting."""
    if positions is None or positions.ndim != 2 or not state.allocated:
        return
    if tokens == 1 and positions.device.type != "cpu":
        return
    new = torch.full_like(state.seen, tokens) if real is None else real.sum(1)
    behind = positions.amax(1) + 1 < state.seen + new
    if bool((behind & (new > 0)).any()):
        raise KvdslError(
            f"position {int(positions.max())} comes after {int(state.seen.max())} cached tokens: this text does not "
            f"continue the cached one; call `cache.reset()` before an unrelated prompt"
        )


def check_turns(state: SlotState, call: AttentionCall, turn_ends: Sequence[int]) -> None:
    """Raise KvdslError unless the call is a prompt in which these turns of every row end."""
    tokens = call.key.shape[2]
    new = call.key.new_full((len(call.key),), tokens, dtype=torch.int32) if call.real is None else call.real.sum(1)
    before = state.seen if state.allocated else torch.zeros_like(new)
    least, most = int(before.max()), int((before + new).min())
    outside = [at for at in turn_ends if not least <= at <= most]
    if outside or (state.allocated and tokens == 1):
        raise KvdslError(
            f"a turn was said to end at place {(outside or turn_ends)[0]}, and this forward brings places {least} to {most} of a row: "
            f"`end_turn(at)` is for a prompt, and `end_turn()` for the text that is cached"
        )


def check_gaps(state: SlotState, real: Tensor, window: int) -> None:
    """Raise KvdslError for padding behind text in a layer with a window: transformers counts padding in its windows, kvdsl does not.

    Skipped in decode steps on GPUs.
    """
    if real.shape[1] == 1 and real.device.type != "cpu":
        return
    seen = real.new_zeros(len(real), dtype=torch.int32) if not state.allocated else state.seen
    behind_text = ~real & ((seen > 0)[:, None] | (real.cumsum(1) > 0))
    if bool((behind_text & real.any(1)[:, None]).any()):
        row = int((behind_text & real.any(1)[:, None]).any(1).int().argmax())
        raise KvdslError(
            f"row {row} has padding behind text, but every layer of the model attends within {window} tokens, among which "
            f"transformers counts padding: pad on the left only, or go on with each row by itself"
        )


def check_counting(state: SlotState, counting: Counting, positions: Tensor | None, call: AttentionCall) -> None:
    """Raise KvdslError if positions do not count tokens one by one, under compact positions. Skipped in decode steps on GPUs."""
    positions, (rows, _, tokens, _) = counting.take(positions), call.query.shape
    if positions is None or positions.ndim not in (2, 3) or positions.shape[-1] != tokens:
        return
    if tokens == 1 and call.query.device.type != "cpu":
        return
    seen = state.seen if state.allocated else torch.zeros(rows, dtype=torch.int32, device=call.query.device)
    with plain_tensors():
        counting.check(positions, call.real, seen, state.spec.name)


def check_mask(state: SlotState, columns: int, mask: Tensor, *, one_token: bool) -> None:
    """Raise KvdslError if a mask of the whole text, [batch, columns], hides cached tokens, which would be attended to.

    Skipped in decode steps on GPUs.
    """
    if not state.allocated or (one_token and mask.device.type != "cpu"):
        return
    seen = state.seen
    if mask.shape[1] < columns or len(mask) != len(seen):
        return  # `mask` reports this
    left_out = seen - (mask[:, :columns] != 0).sum(1).to(seen)
    if bool((left_out > 0).any()):
        row = int(left_out.argmax())
        raise KvdslError(
            f"row {row} of the attention mask leaves out {int(left_out[row])} of {int(seen[row])} tokens that were cached as text: a "
            f"cache of slots cannot hide them again; mask padding when it comes, or call `cache.reset()` and pass the text again"
        )


def texts_of_one(state: SlotState) -> Tensor:
    """Return the rows with a single token so far and no more expected, bool [batch]."""
    return state.seen.clamp(min=state.expected) == 1


def check_rate(state: SlotState, call: AttentionCall) -> None:
    """Raise KvdslError if a prompt comes token by token, so that a budget's ratio would be of its first token."""
    concerned = texts_of_one(state)
    if call.real is not None:
        concerned = concerned & call.real.any(1)
    if bool(concerned.any()):
        budget = state.settings.params.get("budget")
        source = "by default" if budget is None else f"{spelled(budget)},"
        where = "" if len(concerned) == 1 else f" of row {int(concerned.int().argmax())}"
        raise KvdslError(
            f"`budget` of {state.spec.name} is {source} a ratio of the prompt, and one token has come as the prompt{where}: pass "
            f"the prompt in forwards of several tokens (`prefill_chunk_size` of 2 or more), say how long it will be "
            f"(`cache.expect_prompt(4096)`), or give a number of tokens (512)"
        )
