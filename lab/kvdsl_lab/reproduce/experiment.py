"""What a paper's reproduction consists of: experiments, of which each is made of cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvdsl_lab.assets import reference_weights

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Setup:
    """What is measured on, given to every cell.

    Attributes:
        quick: toy sizes.
        model_name: a folder or a hub id; None for the model that ships with kvdsl-lab.
        dtype: of the model: `fp32`, `bf16`, `fp16`; None for float32 (the shipped model) or the checkpoint's own.
        text_file: what the model reads; None for the book that ships with kvdsl-lab.
        backend: what runs the policies.
        repeats: how often a time is taken.
    """

    quick: bool = False
    model_name: str | None = None
    dtype: str | None = None
    text_file: Path | None = None
    backend: str = "auto"
    seed: int = 0
    repeats: int = 11

    def size(self, full: T, quick: T, other: T | None = None) -> T:
        """The one or the other; `other` is the full size on a model of the user's, where that of the shipped one would take too long."""
        if self.quick:
            return quick
        return full if self.model_name is None or other is None else other

    @cached_property
    def _loaded(self) -> tuple[Any, Any]:
        from kvdsl.generation.models import load_model

        return load_model(self.model_name, self.dtype)

    @property
    def model(self) -> Any:
        """The language model, loaded at its first use, with the attention that it came with or that of the last policy."""
        return self._loaded[0]

    @property
    def tokenizer(self) -> Any:
        """The model's."""
        return self._loaded[1]

    @cached_property
    def text(self) -> str:
        """What the model reads."""
        from kvdsl.generation.text import read_text

        return read_text(self.text_file)

    @property
    def dtype_name(self) -> str | None:
        """As torch names the model's; None if the checkpoint decides."""
        if self.dtype is None:
            return "float32" if self.model_name is None else None
        return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[self.dtype]

    def facts(self, reads_text: bool = True) -> dict[str, Any]:
        """What makes a result another one, for JSON; the model and its text only if a paper uses them."""
        read = {
            "model": self.model_name or f"the reference model ({reference_weights()})",
            "text": "the book that ships with kvdsl-lab" if self.text_file is None else str(self.text_file),
        }
        own = {"quick": self.quick, "backend": self.backend, "seed": self.seed, "repeats": self.repeats}
        return (read if reads_text else {}) | own


@dataclass(frozen=True)
class Cell:
    """The smallest part that is measured and saved: `run` gives its rows."""

    name: str
    run: Callable[[Setup], list[Row]]


@dataclass(frozen=True)
class Finding:
    """Whether a claim of the paper holds of the rows (None: they leave it open), and what was measured, in words."""

    claim: str
    holds: bool | None
    measured: str


NEAR = 0.01
"""Scores that lie nearer to each other, and perplexities that differ by a smaller share, decide nothing: they are of one text, or of 25
trials, each of which is 0.04."""


def below(one: float, other: float) -> bool | None:
    """Whether a perplexity is below another; open if they are near each other."""
    return None if abs(one - other) < NEAR * other else one < other


def within(value: tuple[float, float], low: float = -math.inf, high: float = math.inf) -> bool | None:
    """Whether a number lies between two others, of which the quartiles are known; open if only one of these does."""
    inside = [low <= quartile <= high for quartile in value]
    return inside[0] if inside[0] == inside[1] else None


def all_of(verdicts: Iterable[bool | None]) -> bool | None:
    """Whether several claims hold together; open if one is, and none does not hold."""
    found = list(verdicts)
    return False if False in found else None if None in found else True


def _nothing(_: Sequence[Row]) -> list[Finding]:
    return []


def _as_measured(rows: Sequence[Row]) -> list[Row]:
    return list(rows)


@dataclass(frozen=True)
class Experiment:
    """A table or a figure.

    Attributes:
        name: of its files, for example `table2a`.
        title: what it shows, in a few words.
        source: where the paper has it: `Table 2a`.
        cells: what it consists of, at the sizes of a setup; must not load anything.
        says: what the paper finds, in words, if anything.
        findings: the claims, held against the rows.
        table: the rows as a reader sees them.
        plot: draws the rows into an empty figure.
    """

    name: str
    title: str
    source: str
    cells: Callable[[Setup], Iterable[Cell]]
    says: str = ""
    findings: Callable[[Sequence[Row]], Sequence[Finding]] = _nothing
    table: Callable[[Sequence[Row]], Sequence[Row]] = _as_measured
    plot: Callable[[Figure, Sequence[Row]], None] | None = None


@dataclass(frozen=True)
class Paper:
    """A paper's experiments, in the paper's order; `reads_text` unless all of them run on shapes alone."""

    name: str
    title: str
    experiments: tuple[Experiment, ...]
    reads_text: bool = True
