"""The texts of the requests in vLLM's batch: their tokens, and the values that policies read of these.

Attention gets neither. vLLM passes them to logits processors, in the same process and before each step. So `Texts` is one, and changes no
logits. `configured` adds it to configurations that need it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor, MoveDirectionality

from kvdsl.integrations.vllm.request_marks import request_marks
from kvdsl.integrations.vllm.settings import Settings, asked, traced
from kvdsl.integrations.vllm.token_values import THOUGHT, Text, ValueReader
from kvdsl.integrations.vllm.tracing import Tracing


class Texts(LogitsProcessor):  # type: ignore[misc]
    """Which request each row of vLLM's batch is.

    Attributes:
        tracing: follows one of them; None without a trace.
        rows: the batch's texts.
    """

    _latest: ClassVar[Texts | None] = None

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        out, settings = traced(vllm_config), asked(vllm_config)
        self._config = vllm_config
        self._settings = settings if settings is not None and settings.spec.reads_chats else None
        self._decode = _decoder(vllm_config) if self._settings and THOUGHT in dict(self._settings.spec.spans) else None
        self.tracing = None if out is None else Tracing(vllm_config, Path(out))
        self.rows: dict[int, Text] = {}
        Texts._latest = self

    @classmethod
    def of(cls, config: Any) -> Texts | None:
        """Those of the engine of a `VllmConfig`, the latest of this process, if it needs any."""
        found = cls._latest
        return found if found is not None and found._config is config and found._needed else None

    @property
    def _needed(self) -> bool:
        """Whether a policy or a trace reads them."""
        return self._settings is not None or self.tracing is not None

    def is_argmax_invariant(self) -> bool:
        """Nothing is changed."""
        return True

    def apply(self, logits: Tensor) -> Tensor:
        """The same."""
        return logits

    def update_state(self, batch_update: Any) -> None:
        """Requests have come, gone, or moved in the batch: in this order, as vLLM has it."""
        if batch_update is None or not self._needed:
            return
        for row in batch_update.removed:
            self.rows.pop(row, None)
        for row, params, prompt, answer in batch_update.added:
            self.rows[row] = Text(prompt or [], answer, _reader(self._settings, params, prompt, answer, self._decode))
        for one, other, direction in batch_update.moved:
            texts = self.rows.pop(one, None), self.rows.pop(other, None)
            kept = zip((other, one), texts if direction is MoveDirectionality.SWAP else texts[:1], strict=False)
            self.rows |= {row: text for row, text in kept if text is not None}
        if self.tracing is not None:
            self.tracing.batch_is(self.rows)


def _reader(settings: Settings | None, params: Any, prompt: Any, answer: list[int], decode: Any) -> ValueReader | None:
    if settings is None:
        return None
    marks = request_marks(settings.spec, params.extra_args, prompt or [])
    return ValueReader(settings.spec, marks, prompt or [], answer, decode, settings.thinks)


def _decoder(config: Any) -> Any:
    """The text of a token."""
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(config.model_config)
    return lambda token: tokenizer.decode([token])
