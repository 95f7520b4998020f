"""Find a text on which two policies keep or select different tokens, by running both on the reference interpreter.

Texts start small, with a few tokens, a small budget and one-digit numbers, so that a person can follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from kvdsl.interp.evaluate import Array, Indices
from kvdsl.interp.step import Step
from kvdsl.interp.text import Text
from kvdsl.ir.nodes import Param, Policy
from kvdsl.passes.columns import add_columns
from kvdsl.scenarios.draw import DIMS, Drawn, Form
from kvdsl.scenarios.run import refusal

Variant = Callable[[Mapping[str, str]], Policy | None]
"""Returns a policy with params set, ignoring those it does not have; None if it is refused."""

NOTHING_SET: Mapping[str, str] = MappingProxyType({})

SIZES = (2, 3, 4, 6, 8, 12, 16, 24, 34, 40)
"""The budgets to try."""
LONGEST = 2048
"""The largest budget to try if the user has set one."""
TEXTS = 6
"""The number of texts to try with each choice of params and layer."""
LARGE = 4
"""Params above this are also tried with smaller values."""

Kept = tuple[tuple[int, ...], ...]
"""Positions per KV head."""


@dataclass(frozen=True)
class Witness:
    """A text that tells two policies apart.

    Attributes:
        policies: both, with params set.
        settings: these params.
        layer, layers: the layer, counted from 0, and the number of layers.
        text: the input, where only the first `tokens` matter.
        rows: each token's attention to the live tokens and, last, itself, per head; empty if vectors determine it.
        vectors: the text's vectors that matter.
        what: `kept` or `selected`.
        found: the positions kept or selected by each policy.
    """

    policies: tuple[Policy, Policy]
    settings: dict[str, str]
    layer: int
    layers: int
    text: Drawn
    tokens: int
    rows: list[list[Array]]
    vectors: tuple[str, ...]
    what: str
    found: tuple[Kept, Kept]


@dataclass(frozen=True)
class Search:
    """The result of a search: a witness, or None after `tried` texts; `why_not` explains why none was tried."""

    witness: Witness | None
    tried: int
    why_not: str = ""


def find_witness(a: Variant, b: Variant, fixed: Mapping[str, str] = NOTHING_SET) -> Search:
    """Search for the first text, from small to large, that tells two policies apart.

    Not for policies that read tensors of files, which have a model's sizes, or whose layers share a budget.

    Args:
        fixed: values of params that the user has set; they take precedence.
    """
    whole = [policy for one in (a, b) if (policy := one(fixed)) is not None]
    if any(policy.tensors for policy in whole):
        return Search(None, 0, "tensors of files have a model's sizes, not those of small texts")
    if any(policy.across_layers is not None for policy in whole):
        return Search(None, 0, "layers that share a budget need several layers, and a test has one")
    form, random, tried = Form(whole), np.random.default_rng(0), 0
    for size, tried_out in _choices(whole, fixed):
        settings = tried_out | {name: value.removeprefix("+") for name, value in fixed.items()}
        policies = a(settings), b(settings)
        if policies[0] is None or policies[1] is None:
            continue
        pair = add_columns(policies[0]), add_columns(policies[1])
        for layer, layers in form.layers * TEXTS:
            tried += 1
            text = form.draw(random, size)
            runs = [_Run(policy, text, form, layer, layers) for policy in pair]
            found = _compare(*runs)
            if found is not None:
                tokens, what, kept = found
                vectors, rows = form.vectors, runs[0].rows[:tokens]
                return Search(Witness(pair, settings, layer, layers, text, tokens, rows, vectors, what, kept), tried)
    return Search(None, tried, "" if tried else "their protected tokens or budgets fit no small text")


def _choices(policies: list[Policy], fixed: Mapping[str, str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield sizes with matching values of params: small budgets first, with large params made small, then as they are.

    Texts of the largest size are as long as a budget that the user has set.
    """
    params = [param for policy in policies for param in policy.params]
    defaults: dict[str, list[str]] = {}
    for param in params:
        defaults.setdefault(param.name, []).append(param.default.model_dump_json())
    # Different defaults of a param may be the only difference.
    large = [name for name in dict.fromkeys(one.name for one in params if _is_large(one)) if len(set(defaults[name])) == 1]
    shared = [name for name in large if len(defaults[name]) == len(policies)]
    seen: list[tuple[int, dict[str, str]]] = []
    for size in (*SIZES, *_beyond(fixed.get("budget"))):
        given = {"budget": str(size)} if "budget" in defaults else {}
        small = dict.fromkeys(large, "2")
        for settings in (given | small, given | small | dict.fromkeys(shared, str(size)), given):
            if (size, settings) not in seen:
                seen.append((size, settings))
                yield size, settings


def _beyond(budget: str | None) -> Iterator[int]:
    """Yield a budget larger than the sizes, if it is a number of tokens."""
    tokens = float(budget or 0)
    if SIZES[-1] < tokens <= LONGEST and tokens.is_integer():
        yield int(tokens)


def _is_large(param: Param) -> bool:
    return param.name != "budget" and param.default.kind == "number" and param.default.value > LARGE


class _Run:
    """A policy on a text. `rows` has, for each token, its attention to the slots of each head and itself."""

    def __init__(self, policy: Policy, text: Drawn, form: Form, layer: int, layers: int) -> None:
        self.policy, self.text = policy, text
        self.state = Text(policy, {}, layer, layers, heads=form.heads, key_dim=DIMS, value_dim=DIMS)
        self.last: list[Step] = []
        self.rows: list[list[Array]] = []

    def steps(self) -> Iterator[int]:
        """Run the prompt, then token by token; yield the number of tokens. Ends at once if a cache would refuse the numbers."""
        if self._prompt():
            yield self.text.prompt
            for token in range(self.text.prompt, self.text.tokens):
                self._token(token)
                yield token + 1

    def _prompt(self) -> bool:
        text, part = self.text, slice(0, self.text.prompt)
        layer, heads = self.state.prompt(text.prompt), self.state.heads
        if refusal(self.policy, layer, DIMS) is not None:
            return False
        given = {name: values[:, part] for name, values in text.given.items()}
        if text.attend is None:
            self.last = layer.prefill(heads, text.query[:, part], text.key[:, part], text.value[:, part], given)
        else:
            self.rows = [[rows[token, : token + 1] for rows in text.attend] for token in range(text.prompt)]
            self.last = layer.observe_rows(
                heads, list(text.attend[:, part, part]), text.key[:, part], text.value[:, part], given
            )
        return True

    def _token(self, token: int) -> None:
        text, heads, layer = self.text, self.state.heads, self.state.decoding
        key, value = text.key[:, token], text.value[:, token]
        given = {name: values[:, token : token + 1] for name, values in text.given.items()}
        if text.attend is None:
            self.last = layer.decode(heads, text.query[:, token], key, value, given)
        else:
            rows = [_among(text.attend[index, token], head.position, token) for index, head in enumerate(heads)]
            self.rows.append(rows)
            self.last = layer.observe_row(heads, rows, key, value, given)

    @property
    def kept(self) -> Kept:
        """The positions of cached tokens."""
        return tuple(_sorted(head.position) for head in self.state.heads)

    @property
    def selected(self) -> Kept:
        """The positions that the last token selected."""
        return tuple(_sorted(step.picked) for step in self.last)


def _among(row: Array, there: Indices, token: int) -> Array:
    """Return a token's attention to the live tokens and, last, itself, which also gets the share of evicted tokens."""
    given = row[there]
    return np.array([*given, round(1 - float(given.sum()), 2)])


def _sorted(positions: Indices) -> tuple[int, ...]:
    return tuple(sorted(int(position) for position in positions))


def _compare(a: _Run, b: _Run) -> tuple[int, str, tuple[Kept, Kept]] | None:
    """Return the number of tokens after which the policies differ, in what, and how; None if they never do."""
    selects = a.policy.select is not None or b.policy.select is not None
    for tokens, _ in zip(a.steps(), b.steps(), strict=False):
        if selects and tokens > a.text.prompt and a.selected != b.selected:
            return tokens, "selected", (a.selected, b.selected)
        if a.kept != b.kept:
            return tokens, "kept", (a.kept, b.kept)
    return None
