"""How long a step of an engine takes: a formula, from what the step does and six constants of a machine and a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from kvdsl.errors import KvdslError


@dataclass(frozen=True)
class Work:
    """What a step does.

    Attributes:
        tokens: of prompts and behind them: each goes through all matrices of the model.
        decoding: requests that are behind their prompts.
        read: bytes of the cache that these attend to.
        pairs: of a query in a prompt and a key before it.
    """

    tokens: int
    decoding: int
    read: int
    pairs: int


@dataclass(frozen=True)
class Machine:
    """Seconds; a step takes `step + max(weights, tokens * token) + decoding * request + read * byte + pairs * pair`.

    Attributes:
        step: of each, whatever is in it.
        weights: of reading the model's weights once, below which no step comes, however few tokens it has.
        token: of the arithmetic that a token's matrices take.
        request: of each request behind its prompt, beside its attention.
        byte: of reading one from the cache.
        pair: of a prompt's query and a key before it, in all layers and heads.
    """

    step: float
    weights: float
    token: float
    request: float
    byte: float
    pair: float

    def seconds(self, work: Work) -> float:
        """Of a step."""
        matrices = max(self.weights, work.tokens * self.token)
        return self.step + matrices + work.decoding * self.request + work.read * self.byte + work.pairs * self.pair


@dataclass(frozen=True)
class Model:
    """The shape of a model, in bfloat16 unless `itemsize` says otherwise.

    Attributes:
        parameters: all of them, which every token is multiplied with.
        layers, heads, dim: of queries.
    """

    parameters: float
    layers: int
    heads: int
    dim: int
    itemsize: int = 2


@dataclass(frozen=True)
class DataSheet:
    """What a maker says of one device, and what is assumed of it.

    Attributes:
        bandwidth, operations: of a device, a second: bytes that its memory reads, and multiplications and additions.
        devices: among which weights, heads and caches are spread evenly.
        of_bandwidth, of_operations: which share of these is reached; an assumption.
        step: seconds of a step beside these: the host's, and those of the devices' agreeing; an assumption.
    """

    bandwidth: float
    operations: float
    devices: int
    of_bandwidth: float
    of_operations: float
    step: float

    def machine(self, model: Model) -> Machine:
        """The constants, where nothing takes time but reading, multiplying and `step`."""
        byte = 1 / (self.devices * self.bandwidth * self.of_bandwidth)
        operation = 1 / (self.devices * self.operations * self.of_operations)
        return Machine(
            step=self.step,
            weights=model.parameters * model.itemsize * byte,
            token=2 * model.parameters * operation,
            request=0.0,
            byte=byte,
            pair=4 * model.layers * model.heads * model.dim * operation,
        )


def fitted(works: Sequence[Work], seconds: Sequence[float]) -> Machine:
    """The constants that come nearest to measured steps: least squares of relative errors, no constant below zero.

    Which of `weights` and `tokens * token` is the longer depends on the constants themselves: steps of up to so many tokens are taken to
    read, the others to multiply, and the number is tried with which the errors are least.

    Raises:
        KvdslError: if there are fewer steps than would tell six constants apart.
    """
    if len(works) < 20:
        raise KvdslError(f"{len(works)} steps are too few to find six constants from: measure at least 20")
    table, taken = np.array([astuple(work) for work in works], dtype=float), np.asarray(seconds, dtype=float)
    tokens, others = table[:, 0], table[:, 1:]
    best: tuple[float, Machine] | None = None
    for knee in np.unique(np.quantile(tokens, np.linspace(0, 1, 41))):
        reads = tokens <= knee
        columns = np.column_stack([np.ones(len(taken)), reads, np.where(reads, 0, tokens), others])
        step, weights, token, *rest = _least_squares(columns / taken[:, None], np.ones(len(taken)))
        machine = Machine(step, weights, token, *rest)
        errors = np.array([machine.seconds(work) for work in works]) / taken - 1
        if best is None or float(errors @ errors) < best[0]:
            best = float(errors @ errors), machine
    assert best is not None
    return best[1]


def _least_squares(columns: np.ndarray, wanted: np.ndarray) -> list[float]:
    """Coefficients, none below zero: whichever would be lowest is left out, until none is."""
    scale = np.abs(columns).max(0)
    scale[scale == 0] = 1.0
    left = list(range(columns.shape[1]))
    while True:
        found = np.linalg.lstsq(columns[:, left] / scale[left], wanted, rcond=None)[0]
        if found.min() >= 0:
            break
        left.pop(int(found.argmin()))
    coefficients = np.zeros(columns.shape[1])
    coefficients[left] = found / scale[left]
    return [float(one) for one in coefficients]
