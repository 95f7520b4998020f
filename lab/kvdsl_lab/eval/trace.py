"""Which tokens a policy kept, step by step, while a model read a prompt and went on from it; and a page that shows it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import torch
from torch import Tensor

from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.torch import eviction

SCORE, PROTECTED = "score", "protected"
"""What a page shows of a token beside the policy's state columns."""


@dataclass
class Trace:
    """What a cache held of one text.

    Attributes:
        ids: every token that was fed, and the last that was generated.
        prompt_tokens: how many of them are the prompt.
        seen: how many tokens the cache had seen after each step; the first step is the first part of the prompt.
        layers: the layers that the policy manages.
        gone: int32 [layers, kv_heads, tokens], the first step after which the token was no longer cached; -1 while it is.
        values: by name, what tokens had when the policy decided who leaves: `score`, `protected` (1 for what may not leave) and the
            state columns, float32 [numbers]. For every layer, KV head and token in turn, a number for each step from the one that
            read it to the one with which it left, or the last; NaN where nothing was decided.
    """

    ids: list[int]
    prompt_tokens: int
    layers: list[int]
    seen: list[int] = field(default_factory=list)
    gone: Tensor = field(default_factory=lambda: torch.empty(0))
    values: dict[str, Tensor] = field(default_factory=dict)

    def read_at(self) -> Tensor:
        """The step that read each token that was fed, int64 [tokens]."""
        return torch.bucketize(torch.arange(self.seen[-1]), torch.tensor(self.seen), right=True)

    def places(self) -> Tensor:
        """Where each token's numbers begin in `values`, int64 [layers, kv_heads, tokens]; a last entry says where all end, flat."""
        gone = self.gone[..., : self.seen[-1]].long()
        held = torch.where(gone < 0, len(self.seen) - 1, gone) - self.read_at() + 1
        return torch.nn.functional.pad(held.flatten().cumsum(0), (1, 0))


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
        cache: of kvdsl, empty. Only the torch backend tells what decoded tokens scored; the others tell it of the prompt's.
        chunk: tokens of the prompt fed at a time; None for all.
        tick: called after every forward, `steps` times.
    """
    made = Trace(list(prompt), len(prompt), list(cache.managed))
    longest = len(prompt) + new_tokens
    cache.expect_prompt(len(prompt))
    settled: list[_Settled] = []
    with torch.inference_mode(), eviction.watched(lambda *what: settled.append(_settled(len(made.seen), *what))):
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
    made.values = _values(made, settled)
    return made


@dataclass(frozen=True)
class _Settled:
    """What one layer's slots had in a settle: `position` [kv_heads, slots], and values likewise."""

    step: int
    layer: int
    position: Tensor
    values: dict[str, Tensor]


def _settled(step: int, held: eviction.Held, score: Tensor | float, protected: Tensor) -> _Settled:
    position = held.position[0].cpu().long()
    columns = held.state.column_index.single(held.kept["columns"])
    each = {
        SCORE: torch.as_tensor(score)[..., 0, :] if isinstance(score, Tensor) else torch.tensor(score),
        PROTECTED: protected,
    }
    values = {
        name: value.float().cpu().broadcast_to(1, *position.shape)[0].clone() for name, value in (each | columns).items()
    }
    return _Settled(step, held.state.layer, position.clone(), values)


def _values(made: Trace, settled: Sequence[_Settled]) -> dict[str, Tensor]:
    """Lay out what the settles told as `Trace.values` has it; of several in one step, the last that a token saw."""
    places = made.places()
    starts, read_at = places[:-1].view(made.gone[..., : made.seen[-1]].shape), made.read_at()
    found: dict[str, Tensor] = {}
    for one in settled:
        live = one.position >= 0
        token = one.position.clamp(min=0)
        at = starts[made.layers.index(one.layer)].gather(1, token) + one.step - read_at[token]
        for name, value in one.values.items():
            flat = found.setdefault(name, torch.full((int(places[-1]),), torch.nan))
            flat[at[live]] = value[live]
    return found


def steps(prompt: Sequence[int], new_tokens: int, chunk: int | None) -> int:
    """How many forwards a trace takes."""
    return sum(1 for _ in _parts(prompt, chunk)) + new_tokens - 1


def _parts(prompt: Sequence[int], chunk: int | None) -> Iterator[Sequence[int]]:
    size = chunk or len(prompt)
    return (prompt[at : at + size] for at in range(0, len(prompt), size))


def _forward(model: Any, ids: Sequence[int], cache: Any) -> Tensor:
    """The last token's logits, [vocabulary]."""
    given = torch.tensor([list(ids)], device=model.device)
    logits: Tensor = model(input_ids=given, **with_cache(cache), use_cache=True, logits_to_keep=1).logits
    return logits[0, -1].float()


def _note(made: Trace, cache: Any, tokens: int, longest: int) -> None:
    """Add a step after which the cache has seen `tokens` more."""
    step, seen = len(made.seen), tokens + (made.seen[-1] if made.seen else 0)
    made.seen.append(seen)
    for index, layer in enumerate(made.layers):
        position = cache.positions(layer)[0].cpu()
        if not made.gone.numel():
            made.gone = torch.full((len(made.layers), len(position), longest), -1, dtype=torch.int32)
        note_left(made.gone[index, :, :seen], position, step)


def note_left(gone: Tensor, position: Tensor, step: int) -> None:
    """Note who is no longer among the tokens that a layer holds after a step.

    Args:
        gone: int32 [kv_heads, tokens seen by then], as in `Trace`; it is changed.
        position: int32 [kv_heads, slots]: the tokens' places in the text, below 0 where a slot is free.
    """
    heads, seen = gone.shape
    slot = torch.where(position >= 0, position, seen).long()  # free slots all write to a place behind the text
    held = torch.zeros(heads, seen + 1, dtype=torch.bool).scatter_(1, slot, value=True)[:, :seen]
    gone[~held & (gone < 0)] = step


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
    """A trace for JSON: `tokens`, `prompt_tokens`, `seen`, `layers`, `gone` (lists by layer, KV head and token) and `values`.

    Each of `values` is `Trace.values` as the base64 of little-endian float32.
    """
    values = {name: base64.b64encode(flat.numpy().astype("<f4").tobytes()).decode() for name, flat in made.values.items()}
    return {
        "tokens": pieces(tokenizer, made.ids), "prompt_tokens": made.prompt_tokens, "seen": made.seen, "layers": made.layers,
        "gone": made.gone.tolist(), "values": values,
    }  # fmt: skip


def page(data: dict[str, Any]) -> str:
    """One HTML file that needs nothing else; whatever the data hold is escaped.

    Args:
        data: what `as_data` gives, and `policy`, `expression` (its score, or an empty text), `settings` and `model`, texts.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), undefined=jinja2.StrictUndefined, autoescape=True
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    return environment.get_template("trace.html.jinja").render(data=data)
