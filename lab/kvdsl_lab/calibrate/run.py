"""Reading a text with a model, and adding up what its layers tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from kvdsl.errors import KvdslError
from kvdsl.runtime.hf.rope import ropes
from kvdsl_lab.calibrate.statistics import Statistic
from kvdsl_lab.eval.recording import Recording, recorded


def read_twice(ids: Tensor) -> Tensor:
    """Stretches [count, length] of which the first half is followed by itself; [count, length or one less]."""
    half = ids[:, : ids.shape[1] // 2]
    return torch.cat([half, half], 1)


def steps(ids: Tensor, wanted: Iterable[Statistic]) -> int:
    """How often `calibrate` will tick."""
    return len(ids) * len({statistic.twice for statistic in wanted})


def calibrate(
    model: Any, ids: Tensor, wanted: Iterable[Statistic], tick: Callable[[], None] = lambda: None
) -> dict[str, Tensor]:
    """What a model tells of a text, float32 over the axes of each statistic, by its name.

    Args:
        ids: stretches of the text, [count, length].

    Raises:
        KvdslError: if the model has layers without an ordinary cache, of which nothing is known.
    """
    statistics = {statistic.name: statistic for statistic in wanted}
    sums: dict[str, dict[int, Any]] = {name: {} for name in statistics}
    for twice in sorted({statistic.twice for statistic in statistics.values()}):
        asking = {name: statistic for name, statistic in statistics.items() if statistic.twice == twice}
        for stretch in read_twice(ids) if twice else ids:
            _read(model, stretch[None], asking, sums)
            tick()
    return {name: _finished(statistic, sums[name], model) for name, statistic in statistics.items()}


def _read(model: Any, ids: Tensor, asking: Mapping[str, Statistic], sums: Mapping[str, dict[int, Any]]) -> None:
    """One stretch, [1, length]."""
    rotations = ropes(model) if any(statistic.rotation for statistic in asking.values()) else {}
    for layer, recording in recorded(model, ids).items():
        found = Recording(recording.call._replace(rope=rotations.get(layer)))
        for name, statistic in asking.items():
            part = statistic.seen(found)
            sums[name][layer] = sums[name][layer] + part if layer in sums[name] else part


def _finished(statistic: Statistic, sums: Mapping[int, Any], model: Any) -> Tensor:
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(sums) != list(range(layers)):
        raise KvdslError(
            f"{type(model).__name__} has layers that no policy manages (they see a window of the text), and a tensor has a row for each "
            f"layer: {statistic.name} cannot be found for it"
        )
    found = torch.stack([statistic.result(sums[layer]) for layer in range(layers)])
    return statistic.whole(found).float().cpu()
