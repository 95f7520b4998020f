"""One request of a server as a page of `kvdsl trace`: `kvdsl serve … --kvdsl-trace FILE`.

`additional_config["kvdsl_trace"]` names the file. While there is no such file, the next request that begins is followed; when it has
ended the file is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kvdsl.integrations.vllm.settings import Settings, asked
from kvdsl.integrations.vllm.token_values import Text
from kvdsl.lab import lab


class Paged(Protocol):
    """A step.

    Attributes:
        pages: the batch's requests, in its order, as `held` takes them.
    """

    @property
    def pages(self) -> Sequence[Any]: ...


class Tracing:
    """Follows one request after the other.

    Args:
        out: gets the page of each; while it is there, none is followed.
    """

    def __init__(self, config: Any, out: Path) -> None:
        self._config, self._out = config, out
        self._row: int | None = None
        self._followed: Followed | None = None

    def batch_is(self, texts: Mapping[int, Text]) -> None:
        """The batch has changed.

        Args:
            texts: by row.
        """
        rows = (row for row, text in texts.items() if self._followed and text.answer is self._followed.text.answer)
        self._row = next(rows, None)
        if self._row is not None:
            return
        if self._followed is not None and self._followed.is_new:
            self._write(self._followed)
        elif not self._out.exists():
            begun = [(row, text) for row, text in texts.items() if not text.answer]
            self._row, self._followed = (begun[0][0], Followed(begun[0][1])) if begun else (None, None)

    def layer_is_done(self, layer: int, held: Callable[[Any], tuple[int, Tensor]], step: Paged) -> None:
        """Note what a layer holds, once it has attended and evicted.

        Args:
            held: of one of the step's pages, what `Caches.held` says.
        """
        if self._followed is not None and self._row is not None:
            seen, position = held(step.pages[self._row])
            self._followed.note(layer, seen, position.cpu(), self._config.model_config.max_model_len)

    def _write(self, followed: Followed) -> None:
        """Write the file; if that fails, log why, and go on serving."""
        followed.is_new = False
        try:
            followed.write(self._out, self._config)
        except Exception as error:
            logging.getLogger("vllm.kvdsl").error("no trace was written to %s: %s", self._out, error)


@dataclass
class Followed:
    """What a request's layers hold, step by step.

    Attributes:
        seen: tokens that were read, by step.
        is_new: whether there is more than was written. A request may come back that was put aside.
        gone: by layer, int32 [kv_heads, tokens of the longest text], as the `Trace` of `kvdsl trace` has it.
    """

    text: Text
    seen: list[int] = field(default_factory=list)
    is_new: bool = False
    gone: dict[int, Tensor] = field(default_factory=dict)

    def note(self, layer: int, seen: int, position: Tensor, longest: int) -> None:
        """What a layer holds, [kv_heads, slots], once it has seen so many tokens."""
        if not self.seen or seen > self.seen[-1]:
            self.seen.append(seen)
            self.is_new = True
        if layer not in self.gone:
            self.gone[layer] = torch.full((len(position), longest), -1, dtype=torch.int32)
        lab("eval.trace", "a trace").note_left(self.gone[layer][:, :seen], position, len(self.seen) - 1)

    def write(self, out: Path, config: Any) -> None:
        """Write the page.

        Args:
            config: a `VllmConfig`.
        """
        from kvdsl.files import write_whole

        write_whole(out, lab("eval.trace", "a trace").page(self._data(config)))

    def _data(self, config: Any) -> dict[str, Any]:
        from transformers import AutoTokenizer

        from kvdsl.cli.common import FORMAT_VERSION
        from kvdsl.compiler import analyse, find_policy
        from kvdsl.environment import environment
        from kvdsl.ir.printer import print_expression

        tracing, settings, model = lab("eval.trace", "a trace"), asked(config), config.model_config
        assert isinstance(settings, Settings)
        ids = [*self.text.prompt, *(one for one in self.text.answer if one >= 0)][
            : self.seen[-1] + 1
        ]  # below 0: not known yet
        layers = sorted(self.gone)
        gone = torch.stack([self.gone[layer][:, : len(ids)] for layer in layers])
        found = tracing.Trace(ids, len(self.text.prompt), layers, self.seen, gone)
        given = {name: str(value) for name, value in settings.given}
        score = analyse(find_policy(settings.policy), settings=given).policy.score
        return {
            "format_version": FORMAT_VERSION,
            "environment": environment(dtype=str(model.dtype).removeprefix("torch.")),
            "policy": settings.spec.name,
            "expression": "" if score is None else print_expression(score),
            "settings": ", ".join(f"{name}={value}" for name, value in given.items()) or "its own settings",
            "model": str(model.served_model_name or model.model),
            **tracing.as_data(found, AutoTokenizer.from_pretrained(model.tokenizer)),
        }
