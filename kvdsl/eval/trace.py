"""Which tokens a policy kept, step by step, while a model read a prompt and went on from it; and a page that shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jinja2
import torch
from torch import Tensor

from kvdsl.resources import resource

DIGITS = 4
"""Significant digits of a column's value on the page."""


@dataclass
class Trace:
    """What a cache held of one text.

    Attributes:
        ids: every token that was fed, and the last that was generated.
        prompt_tokens: how many of them are the prompt.
        seen: how many tokens the cache had seen after each step; the first step is the first part of the prompt.
        layers: the layers that the policy manages.
        gone: int32 [layers, kv_heads, tokens], the first step after which the token was no longer cached; -1 while it is.
        columns: name -> float32 [layers, kv_heads, tokens], the state column when the token was last cached; NaN if it left with
            the step that brought it.
    """

    ids: list[int]
    prompt_tokens: int
    layers: list[int]
    seen: list[int] = field(default_factory=list)
    gone: Tensor = field(default_factory=lambda: torch.empty(0))
    columns: dict[str, Tensor] = field(default_factory=dict)


def trace(
    model: Any,
    prompt: Sequence[int],
    new_tokens: int,
    cache: Any,
    chunk: int | None = None,
    tick: Callable[[], None] = lambda: None,
) -> Trace:
    """Generate greedily after the prompt, and note after every forward what the cache holds.

    Args:
        cache: of kvdsl, empty.
        chunk: tokens of the prompt fed at a time; None for all.
        tick: called after every forward, `steps` times.
    """
    made = Trace(list(prompt), len(prompt), list(cache.managed))
    longest = len(prompt) + new_tokens
    with torch.inference_mode():
        for part in _parts(prompt, chunk):
            logits = _forward(model, part, cache)
            _note(made, cache, len(part), longest)
            tick()
        for _ in range(new_tokens - 1):
            made.ids.append(int(logits.argmax()))
            logits = _forward(model, made.ids[-1:], cache)
            _note(made, cache, 1, longest)
            tick()
    made.ids.append(int(logits.argmax()))
    return made


def steps(prompt: Sequence[int], new_tokens: int, chunk: int | None) -> int:
    """How many forwards a trace takes."""
    return sum(1 for _ in _parts(prompt, chunk)) + new_tokens - 1


def _parts(prompt: Sequence[int], chunk: int | None) -> Iterator[Sequence[int]]:
    size = chunk or len(prompt)
    return (prompt[at : at + size] for at in range(0, len(prompt), size))


def _forward(model: Any, ids: Sequence[int], cache: Any) -> Tensor:
    """The last token's logits, [vocabulary]."""
    given = torch.tensor([list(ids)], device=model.device)
    logits: Tensor = model(input_ids=given, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[0, -1].float()


def _note(made: Trace, cache: Any, tokens: int, longest: int) -> None:
    """Add a step after which the cache has seen `tokens` more."""
    step, seen = len(made.seen), tokens + (made.seen[-1] if made.seen else 0)
    made.seen.append(seen)
    for index, layer in enumerate(made.layers):
        position = cache.positions(layer)[0].cpu()
        if not made.gone.numel():
            made.gone = torch.full((len(made.layers), len(position), longest), -1, dtype=torch.int32)
        # Free slots all write to a place behind the text.
        slot = torch.where(position >= 0, position, longest).long()
        held = torch.zeros(len(position), longest + 1, dtype=torch.bool).scatter_(1, slot, value=True)[:, :seen]
        left = made.gone[index, :, :seen]
        left[~held & (left < 0)] = step
        for name, column in cache.state(layer).items():
            if column.dim() == 3:  # a ring of the last queries has no single value
                _note_column(made, name, index, slot, column[0].cpu())


def _note_column(made: Trace, name: str, index: int, slot: Tensor, values: Tensor) -> None:
    if name not in made.columns:
        made.columns[name] = torch.full(made.gone.shape, torch.nan)
    behind = torch.nn.functional.pad(made.columns[name][index], (0, 1))
    made.columns[name][index] = behind.scatter(1, slot, values)[:, :-1]


# -- the page ----------------------------------------------------------------------------------------------------------


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of every token. Of tokens that only together make a character, the last has it, and the others have nothing."""
    found: list[str] = []
    start = 0
    for at in range(len(ids)):
        before = tokenizer.decode(ids[max(0, start - 1) : start]) if start else ""
        text = tokenizer.decode(ids[max(0, start - 1) : at + 1])[len(before) :]
        unfinished = text.endswith("\ufffd") and at - start < 3 and at < len(ids) - 1
        found.append("" if unfinished else text)
        start = start if unfinished else at + 1
    return found


def as_data(made: Trace, tokenizer: Any) -> dict[str, Any]:
    """A trace for JSON: `tokens`, `prompt_tokens`, `seen`, `layers`, `gone` and `columns`, lists by layer, KV head and token."""
    return {
        "tokens": pieces(tokenizer, made.ids), "prompt_tokens": made.prompt_tokens, "seen": made.seen, "layers": made.layers,
        "gone": made.gone.tolist(), "columns": {name: _rounded(values.tolist()) for name, values in made.columns.items()},
    }  # fmt: skip


def _rounded(values: Any) -> Any:
    """Nested lists of numbers with few digits, None for what JSON cannot say."""
    if isinstance(values, list):
        return [_rounded(one) for one in values]
    return float(f"{values:.{DIGITS}g}") if -torch.inf < values < torch.inf else None


def page(data: dict[str, Any]) -> str:
    """One HTML file that needs nothing else; whatever the data hold is escaped.

    Args:
        data: what `as_data` gives, and `policy`, `settings` (text) and `model`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(resource("templates", "html"))), undefined=jinja2.StrictUndefined, autoescape=True
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return environment.get_template("trace.html.jinja").render(data=data)
