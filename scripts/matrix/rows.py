"""A class's row of the report: the outcome of every way, and of the class as a whole."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvdsl.errors import KvdslError
from scripts.matrix import subject
from scripts.matrix.subject import NotTried, Subject, Wrong
from scripts.matrix.ways import WAYS

ORDER = ("failed", "wrong", "refused", "right", "not tried")
"""What is true of a class if it is true of any of its ways, the worst first."""

MOST = 240
"""Characters of a reason."""


@dataclass(frozen=True)
class Row:
    """What is tried: a model type, or one with other sizes."""

    model_type: str
    variant: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def class_name(self) -> str:
        """The class of its causal language model."""
        return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[self.model_type])

    @property
    def config_name(self) -> str:
        """The class of its config."""
        return str(CONFIG_MAPPING_NAMES[self.model_type])

    @property
    def name(self) -> str:
        """The config's name without its ending, and what is special about it."""
        stem = self.config_name.removesuffix("Config")
        return f"{stem}, {self.variant}" if self.variant else stem

    def answers_to(self, word: str) -> bool:
        """Whether `--only` means this row by a word."""
        names = (self.model_type, self.class_name, self.config_name, self.name.split(",")[0])
        return word.lower() in {name.lower() for name in names}


def all_rows() -> list[Row]:
    """A row for every class that AutoModelForCausalLM knows, and one for Phi-3's longer texts."""
    rows = [Row(model_type) for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]
    if "phi3" in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        short = {"original_max_position_embeddings": 32, "max_position_embeddings": subject.EVERYTHING}
        rows.insert(list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES).index("phi3") + 1, Row("phi3", "past 32 tokens", short))
    return rows


def carry_out(row: Row, tell: Callable[[str, str], None] = lambda way, outcome: None) -> dict[str, Any]:
    """The row's outcomes.

    Args:
        tell: called with a way's name and outcome as soon as that is known.
    """
    begun = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = _outcomes(row, tell)
    return finished(row, outcomes, time.perf_counter() - begun)


def finished(row: Row, outcomes: dict[str, str], seconds: float) -> dict[str, Any]:
    """The row as the report has it."""
    worst = min(outcomes.values(), key=lambda outcome: ORDER.index(kind(outcome)))
    return {
        "class": row.class_name, "config": row.config_name, "type": row.model_type, "name": row.name, "outcome": kind(worst),
        "reason": worst.partition(": ")[2], "seconds": round(seconds, 1), "ways": outcomes,
    }  # fmt: skip


def kind(outcome: str) -> str:
    """An outcome without its reason."""
    return outcome.partition(":")[0]


def _outcomes(row: Row, tell: Callable[[str, str], None]) -> dict[str, str]:
    try:
        case = Subject(row.model_type, row.extra)
    except Exception as error:
        return everywhere(f"not tried: no tiny model: {subject.described(error)}")
    refused = outcome_of(lambda: _construct(case))
    if refused != "right":
        return everywhere(refused)
    outcomes = {}
    for name, way in WAYS.items():
        outcomes[name] = outcome_of(partial(way, case))
        tell(name, outcomes[name])
    return outcomes


def everywhere(outcome: str) -> dict[str, str]:
    """The same outcome in all ways."""
    return dict.fromkeys(WAYS, outcome[:MOST])


def outcome_of(run: Callable[[], None]) -> str:
    """What became of it, in one line."""
    try:
        run()
    except NotTried as error:
        return f"not tried: {error}"[:MOST]
    except Wrong as error:
        return f"wrong: {error}"[:MOST]
    except KvdslError as error:
        return f"refused: {' '.join(str(error).split())}"[:MOST]
    except Exception as error:
        return f"failed: {subject.described(error)}"[:MOST]
    return "right"


def _construct(case: Subject) -> None:
    """Make a cache for the model; if that is refused, the model must be as it was.

    Raises:
        NotTried: if the model runs no text, with or without a cache.
    """
    ids, mask = subject.padded(12, range(3))
    given = subject.arguments(case.other, ids, mask, 0, 12) | {"use_cache": False}
    try:
        case.cache()
    except KvdslError as refusal:
        with torch.no_grad():
            try:
                expected = subject.theirs(lambda: subject.first(case.other(**given)))
            except NotTried:
                raise refusal from None
            subject.same(subject.first(case.model(**given)), expected, "refused, but no longer as it was", mask)
        raise
    with torch.no_grad():
        try:
            case.other(**given)
        except Exception as error:
            raise NotTried(f"it does not read text by itself: {subject.described(error)}") from error
