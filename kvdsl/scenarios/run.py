"""Run tests on the reference interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from kvdsl.emit import stored_of
from kvdsl.errors import KvdslError
from kvdsl.interp.evaluate import Array
from kvdsl.interp.inputs import values
from kvdsl.interp.layer import Layer
from kvdsl.interp.numbers import Numbers, at_ends
from kvdsl.interp.step import Step
from kvdsl.interp.text import Text
from kvdsl.ir.nodes import Policy
from kvdsl.passes.fold import value_of
from kvdsl.scenarios.check import Scenario
from kvdsl.scenarios.show import numbers_in_words, positions_in_words, table
from kvdsl.source import Span
from kvdsl.syntax import nodes as syn
from kvdsl.tensorfile import check_sizes

T = TypeVar("T")

TOLERANCE = 1e-6
"""The tolerance of comparisons, absolute and relative."""
_LONG = 2.0**20
"""The length of a prompt longer than any budget."""


@dataclass(frozen=True)
class Failure:
    """A failed expectation.

    Attributes:
        span: the step.
        message: such as `evicted: expected 1, found 2`.
        state: the policy's values, as the lines of a table.
    """

    span: Span
    message: str
    state: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The result of a test."""

    scenario: Scenario
    failures: tuple[Failure, ...]

    @property
    def passed(self) -> bool:
        """Whether the test has no failures."""
        return not self.failures


def run_scenario(scenario: Scenario) -> Outcome:
    """Run one test."""
    if scenario.policy is None:  # refused as expected, which the checker has seen
        return Outcome(scenario, tuple(_unreached(scenario.test.steps)))
    failures: list[Failure] = []
    try:
        _Run(scenario, scenario.policy, failures).steps()
    except _StopError as stop:
        failures.append(stop.failure)
    return Outcome(scenario, tuple(failures))


def _unreached(steps: Sequence[syn.Step]) -> Iterator[Failure]:
    """Yield a failure for each expectation after a refusal."""
    for step in syn.of_kind(steps, syn.Expect):
        if step.what != "error":
            yield Failure(step.span, "nothing can be expected here: the policy was refused earlier")


class _StopError(Exception):
    """The test cannot continue."""

    def __init__(self, span: Span, message: str) -> None:
        self.failure = Failure(span, message)
        super().__init__(message)


class _RefusedError(_StopError):
    """A cache would refuse the policy's numbers."""


@dataclass
class _Run:
    """A run of one test. `last` is the last forward's step of each KV head."""

    scenario: Scenario
    policy: Policy
    failures: list[Failure]
    last: list[Step] = field(default_factory=list)
    taken: int = 0

    def __post_init__(self) -> None:
        self.text = self._without_tokens()
        self.heads = self.text.heads

    def _without_tokens(self) -> Text:
        scenario = self.scenario
        return Text(
            self.policy, {}, scenario.layer, scenario.layers, heads=scenario.heads, key_dim=scenario.key_dim,
            value_dim=scenario.value_dim, tensors=self._tensors(),
        )  # fmt: skip

    def _tensors(self) -> dict[str, Array]:
        """Return the contents of the policy's tensors."""
        scenario = self.scenario
        sizes = {"layers": scenario.layers, "heads": scenario.heads, "group": scenario.group, "dims": scenario.key_dim}
        found = {}
        try:
            for tensor in self.policy.tensors:
                stored = stored_of(tensor)
                check_sizes(tensor.name, tensor.axes, stored.shape, sizes, tensor.file)
                found[tensor.name] = values(stored)
        except KvdslError as error:
            raise _StopError(scenario.test.title.span, str(error)) from None
        return found

    def steps(self) -> None:
        """Run the test's steps."""
        expected = self.scenario.test.expected_error
        try:
            self._take()
        except _RefusedError as refused:
            if expected is None or expected.word is None:
                raise
            if expected.word.text not in refused.failure.message:
                raise _StopError(expected.span, refused.failure.message) from None
            self.failures += _unreached(self.scenario.test.steps[self.taken :])
            return
        if expected is not None:
            raise _StopError(expected.span, f"expected an error, but `{self.policy.name}` accepts this")

    def _take(self) -> None:
        if not self.scenario.test.texts:
            self._check_without_tokens()
        for number, step in enumerate(self.scenario.test.steps):
            self.taken = number
            match step:
                case syn.Prompt():
                    self._prompt(step)
                case syn.Incoming():
                    for _ in range(step.times):
                        self._incoming(step)
                case syn.Turn():
                    self.last = self.text.end_turn()
                case syn.Expect() if step.what != "error":
                    self._expect(step)

    # -- tokens ------------------------------------------------------------------------------------------------------

    def _prompt(self, prompt: syn.Prompt) -> None:
        tokens = [token for token in prompt.tokens for _ in range(token.times)]
        layer = self._layer_of_prompt(len(tokens))
        keys, values = ([self._vectors(token, kind) for token in tokens] for kind in ("key", "value"))
        k, v = np.stack(keys, axis=1), np.stack(values, axis=1)
        given = self._given(tokens)
        if _brought(prompt.tokens[0], "attend") is None:
            q = np.stack([self._queries(token) for token in tokens], axis=1)
            self.last = layer.prefill(self.heads, q, k, v, given)
            return
        live = [head.live for head in self.heads]
        rows = [np.zeros((len(tokens), there + len(tokens))) for there in live]
        for place, token in enumerate(tokens):
            there = [before + place + 1 for before in live]
            for row, attention in zip(rows, self._attention(token, there, place), strict=True):
                row[place, : len(attention)] = attention
        self.last = layer.observe_rows(self.heads, rows, k, v, given)

    def _incoming(self, token: syn.Incoming) -> None:
        """Run a single token; the very first is a prompt."""
        if self.text.is_prompt(1):
            self._prompt(syn.Prompt(token.span, (replace(token, times=1),)))
        else:
            self._token(token)

    def _token(self, token: syn.Incoming) -> None:
        if self.heads[0].seen == 1 and self._has_a_ratio():
            message = f"`budget` of {self.policy.name} is a ratio of the prompt, but the prompt is a single token"
            raise _RefusedError(token.span, message)
        k, v, given = self._vectors(token, "key"), self._vectors(token, "value"), self._given([token])
        if _brought(token, "attend") is None:
            self.last = self.text.decoding.decode(self.heads, self._queries(token), k, v, given)
            return
        rows = self._attention(token, [head.live + 1 for head in self.heads])
        self.last = self.text.decoding.observe_row(self.heads, rows, k, v, given)

    def _has_a_ratio(self) -> bool:
        """Return whether the budget is a ratio of the prompt, which a cache refuses if the text arrives token by token."""
        defaults = {param.name: param.default for param in self.policy.params}
        if "budget" not in defaults:
            return False
        others = {name: value for name, default in defaults.items() if (value := value_of(default, {})) is not None}
        short, long = (value_of(defaults["budget"], others | {"@prompt": prompt}) for prompt in (1.0, _LONG))
        return short is not None and long is not None and short <= 1 < long

    def _layer_of_prompt(self, tokens: int) -> Layer:
        """Return the layer for a prompt of so many tokens."""
        try:
            layer = self.text.prompt(tokens)
        except ValueError as error:
            raise _RefusedError(self.scenario.test.title.span, str(error)) from None
        self._check_refusal(layer)
        return layer

    def _check_without_tokens(self) -> None:
        """Refuse what a cache refuses for every prompt: try the shortest and a very long one."""
        layers = [self._without_tokens().prompt(tokens) for tokens in (1, int(_LONG))]
        found = [refusal(self.policy, layer, self.scenario.key_dim) for layer in layers]
        if found[0] is not None and found[1] is not None:
            raise _RefusedError(self.scenario.test.title.span, found[1])

    def _check_refusal(self, layer: Layer) -> None:
        found = refusal(self.policy, layer, self.scenario.key_dim)
        if found is not None:
            raise _RefusedError(self.scenario.test.title.span, found)

    def _attention(self, token: syn.Incoming, there: list[int], ahead: int = 0) -> list[Array]:
        """Return the token's attention in each KV head, [there] each; `ahead` tokens of the same prompt came before it."""
        brought = _brought(token, "attend")
        assert brought is not None
        rows = []
        for head, count in enumerate(there):
            (row,) = of_head(brought.heads, head)
            if not row.fits(count):
                coming = self.heads[head].seen + np.arange(ahead + 1)
                tokens = positions_in_words(sorted([*self.heads[head].position, *coming]))
                message = f"expected {count} numbers, for the tokens {tokens}, not {len(row.values)}"
                raise _StopError(row.span, message + self._at_head(head))
            rows.append(np.array(row.of(count)))
        return rows

    def _queries(self, token: syn.Incoming) -> Array:
        """Return the token's query vectors, [heads, group, D]; zeros by default."""
        brought, scenario = _brought(token, "query"), self.scenario
        if brought is None:
            return np.zeros((scenario.heads, scenario.group, scenario.key_dim))
        return np.array([[row.values for row in of_head(brought.heads, head)] for head in range(scenario.heads)])

    def _vectors(self, token: syn.Incoming, kind: str) -> Array:
        """Return the token's keys or values, [heads, D]; zeros by default."""
        brought, scenario = _brought(token, kind), self.scenario
        if brought is None:
            return np.zeros((scenario.heads, scenario.key_dim if kind == "key" else scenario.value_dim))
        return np.array([of_head(brought.heads, head)[0].values for head in range(scenario.heads)])

    def _given(self, tokens: list[syn.Incoming]) -> dict[str, Array]:
        """Return the given values of tokens, [heads, tokens] by name, with defaults for missing ones."""
        heads = range(self.scenario.heads)
        given = {"turn": np.full((len(heads), len(tokens)), float(self.text.turns))}
        for one in self.policy.given:
            if one.name in given:
                continue
            brought = [next((b for b in token.brought if b.name and b.name.text == one.name), None) for token in tokens]
            rows = [[one.default if b is None else of_head(b.heads, h)[0].values[0] for b in brought] for h in heads]
            given[one.name] = np.array(rows, dtype=np.float64)
        return given

    # -- expectations ------------------------------------------------------------------------------------------------

    def _expect(self, step: syn.Expect) -> None:
        for head in range(self.scenario.heads):
            row = of_head(step.heads, head)
            if isinstance(row, syn.Places):
                same, expected, found = self._compare_positions(row, sorted(_POSITIONS[step.what](self, head)))
            else:
                same, expected, found = self._compare_numbers(row, self._numbers(step, head))
            if not same:
                what = step.what if step.word is None else step.word.text
                message = f"{what}{self._at_head(head)}: expected {expected}, found {found}"
                self.failures.append(Failure(step.span, message, table(self.policy, self.last[head])))

    def _compare_positions(self, places: syn.Places, found: list[int]) -> tuple[bool, str, str]:
        expected = sorted({position for low, high in places.ranges for position in range(low, high + 1)})
        return expected == found, positions_in_words(expected), positions_in_words(found)

    def _compare_numbers(self, row: syn.Row, found: Array) -> tuple[bool, str, str]:
        expected = row.of(len(found)) if row.fits(len(found)) else row.values
        same = len(found) == len(expected) and np.allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)
        return same, numbers_in_words(expected), numbers_in_words(found)

    def _numbers(self, step: syn.Expect, head: int) -> Array:
        """Return the actual numbers of an expectation: one per token, in the order of the text, or `live`."""
        found = self.last[head]
        if step.what == "live":
            return np.array([float(self.heads[head].live)])
        values = found.score if step.what == "score" else found.attn
        if step.what == "state":
            assert step.word is not None
            values = found.columns[step.word.text]
        assert values is not None
        return values[np.argsort(found.position)]

    def _at_head(self, head: int) -> str:
        return f" in KV head {head}" if self.scenario.heads > 1 else ""


def _selected(run: _Run, head: int) -> Iterator[int]:
    return (int(position) for position in run.last[head].picked)


def _sketch(run: _Run, head: int) -> Iterator[int]:
    sketch = run.heads[head].sketch
    return iter(()) if sketch is None else (int(dim) for dim in sketch)


_POSITIONS: dict[str, Callable[[_Run, int], Iterator[int]]] = {
    "evicted": lambda run, head: (int(position) for position in run.last[head].evicted),
    "kept": lambda run, head: (int(position) for position in run.heads[head].position),
    "protected": lambda run, head: (int(position) for position in run.last[head].position[run.last[head].protected]),
    "selected": _selected,
    "sketch": _sketch,
}


def _brought(token: syn.Incoming, kind: str) -> syn.Brought | None:
    return next((one for one in token.brought if one.kind == kind), None)


def refusal(policy: Policy, layer: Layer, key_dim: int) -> str | None:
    """Return why a cache would refuse a layer's numbers, once prompt and vectors are known; None if it would not."""
    found = (_refusal(policy, machine.numbers, key_dim) for machine in layer.machines)
    return next((text for text in found if text is not None), None)


def _refusal(policy: Policy, numbers: Numbers, key_dim: int) -> str | None:
    if policy.sketch is not None and numbers.sketch_dims > key_dim:
        return f"the sketch has {numbers.sketch_dims:g} dims, but the vectors have {key_dim}"
    kept = at_ends(policy, numbers.value)
    if kept > numbers.budget:
        return f"{kept:g} tokens are kept first and last, but the budget holds {numbers.budget:g}"
    if numbers.takes_over:
        chooser = numbers.chooser
        return f"layer {numbers.layer} uses the selection of layer {chooser}, but a test runs one layer: `set layer = {chooser}`"
    return None


def of_head(brought: Sequence[T], head: int) -> T:
    """Return a KV head's part; a single part holds for all heads."""
    return brought[head if len(brought) > 1 else 0]
