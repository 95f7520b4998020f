"""One class: its tiny model, as often as it is needed, and how two runs of it are compared."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

import kvdsl
from kvdsl.runtime.hf.versions import with_cache
from scripts.matrix.sizes import TOKENS, tiny_model

TOLERANCE = 0.01
"""Largest relative deviation of logits, losses and gradients in float32."""

EVERYTHING = 512
"""A budget that no text here fills."""

Result = TypeVar("Result")


class Wrong(Exception):
    """kvdsl's cache gives something else than transformers' own, and says nothing."""


class NotTried(Exception):
    """What kvdsl's cache would be compared with does not work by itself, and why."""


class Subject:
    """A class of models.

    Attributes:
        pristine: its model, which nobody runs.
    """

    def __init__(self, model_type: str, extra: dict[str, Any] | None = None) -> None:
        self.pristine = tiny_model(model_type, extra)

    def fresh(self) -> Any:
        """A copy of the model that never met a cache of ours."""
        return copy.deepcopy(self.pristine)

    @cached_property
    def model(self) -> Any:
        """The copy that kvdsl's caches are made for."""
        return self.fresh()

    @cached_property
    def other(self) -> Any:
        """The copy that never meets one."""
        return self.fresh()

    def cache(self, model: Any | None = None, *, budget: int = EVERYTHING, backend: str = "torch") -> Any:
        """A cache of ours: H2O, which reads attention and evicts."""
        made: Any = kvdsl.load("h2o")
        return made(self.model if model is None else model, budget=budget, backend=backend)


def theirs(run: Callable[[], Result]) -> Result:
    """What transformers' own cache gives.

    Raises:
        NotTried: if it cannot.
    """
    try:
        return run()
    except Exception as error:
        raise NotTried(f"with DynamicCache: {described(error)}") from error


def described(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def native(model: Any) -> DynamicCache:
    """Transformers' own cache for a model, as `generate` makes it."""
    return DynamicCache(config=model.config.get_text_config(decoder=True))


# -- texts -------------------------------------------------------------------------------------------------------------


def text(rows: int, length: int, seed: int = 1) -> Tensor:
    """Random token ids, none of which has a meaning: [rows, length]."""
    return torch.randint(TOKENS.start, TOKENS.stop, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(length: int, *holes: range) -> tuple[Tensor, Tensor]:
    """Ids and mask of two rows, the second of which has padding where `holes` are."""
    ids, mask = text(2, length), torch.ones(2, length, dtype=torch.long)
    for hole in holes:
        ids[1, hole.start : hole.stop] = 0
        mask[1, hole.start : hole.stop] = 0
    return ids, mask


def parameters(module: Any) -> list[str]:
    """The names of what a module's forward takes."""
    return list(inspect.signature(module.forward).parameters)


def cache_name(module: Any) -> str:
    """By what name a module takes its cache."""
    usual = next(iter(with_cache(None)))
    taken = parameters(module)
    return next((name for name in (usual, "cache", "past_key_values") if name in taken), usual)


def arguments(module: Any, ids: Tensor, mask: Tensor, begin: int, end: int) -> dict[str, Any]:
    """A forward's tokens of a text, with positions that count tokens and no padding where it takes them."""
    made: dict[str, Any] = {"input_ids": ids[:, begin:end], "attention_mask": mask[:, :end]}
    if "position_ids" in parameters(module):
        made["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, begin:end]
    return made


def by_name(module: Any, cache: Any, given: dict[str, Any]) -> Tensor:
    """What a module gives for these tokens, the cache given by its name."""
    return first(module(**given, **{cache_name(module): cache}, use_cache=True))


def by_position(module: Any, cache: Any, given: dict[str, Any]) -> Tensor:
    """The same; the cache, and everything before it, given by position."""
    rest, values = dict(given), list[Any]()
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is not parameter.POSITIONAL_OR_KEYWORD:
            raise NotTried("its forward takes no cache by position")
        if parameter.name == cache_name(module):
            return first(module(*values, cache, **rest, use_cache=True))
        usual = None if parameter.default is parameter.empty else parameter.default
        values.append(rest.pop(parameter.name, usual))
    raise NotTried("its forward takes no cache")


def first(output: Any) -> Tensor:
    """Logits of a language model, hidden states of a bare one."""
    found: Tensor = output.logits if getattr(output, "logits", None) is not None else output[0]
    return found.float()


# -- comparing ---------------------------------------------------------------------------------------------------------


def same(ours: Tensor, expected: Tensor, what: str, real: Tensor | None = None) -> None:
    """Raise Wrong if two results differ.

    Args:
        real: bool [rows, tokens], where a token is no padding; None: everywhere.
    """
    if ours.shape != expected.shape:
        raise Wrong(f"{what}: {list(ours.shape)} instead of {list(expected.shape)}")
    if real is not None and expected.shape[:2] == real.shape:
        ours, expected = ours[real.bool()], expected[real.bool()]
    if not bool(expected.isfinite().all()):
        raise NotTried("with DynamicCache: it gives NaN or infinity")
    found = deviation(ours, expected)
    if not found <= TOLERANCE:
        raise Wrong(f"{what}: differs by {found:.2g}")


def deviation(ours: Tensor, expected: Tensor) -> float:
    """The relative deviation, as kvdsl's own self-test has it."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm() if expected.ndim > 1 else expected.norm()
    return float((ours - expected).norm() / spread.clamp(min=1e-12))
