"""Selection in the C++ decode step, over caches of many slots: the very slots that torch chooses, whatever the ties.

Keys and queries are small whole numbers: every product is exact in every dtype and every order of summation, and most are equal.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.slots import SlotState
from tests.differential.traces import OUT_TOLERANCE
from tests.quick import few, paired, thinned
from tests.texts import spec_of

HEADS, LAYERS = 2, 4
WATCHED = "param budget = 1000000\nwhen prefill\nscore sum(attn)\n"
"""Evicts nothing, and remembers in a column what every slot was given: what was chosen shows."""

SELECTS = {
    "dot": "select top t by dot(q, k)",
    "dot, group maximum": "group max\nselect top t by dot(q, k)",
    "dot, group sum": "group sum\nselect top t by dot(k, q)",
    "expression": "select top t by dot(q, k) - floor(age / 7)",
    "random": "select top t by random()",
    "sketch": "sketch top 8 dims by abs(q) every 3 queries\nselect top t by dot(q, k over sketch)",
    "sketch, group maximum": "group max\nsketch top 8 dims by abs(q) every 3 queries\nselect top t by dot(q, k over sketch)",
    "sketch, always": "sketch top 5 dims by abs(q) every 1 queries\nselect top t by dot(q, k over sketch)\nkeep first 3\nkeep last 9",
    "sketch of keys": "sketch top 8 dims by abs(q) + abs(mean(k over slots)) every 2 queries\nselect top t by dot(q, k over sketch)",
    "sketch by the prompt": "sketch top prompt / 150 dims by abs(q) every 4 queries\nselect top t by dot(q, k over sketch)",
    "sketch in an expression": "sketch top 6 dims by max(k over slots) - min(k over slots) every 2 queries\n"
    "select top t by sum(max(q * k, 0) over sketch) + max(k over sketch)",
}  # fmt: skip
PAGED = {
    "pages by bounds": "pages 16\nkeep last 16\n"
    "select top t by sum(max(q * min(k over page), q * max(k over page)) over dims)",
    "pages by bounds, turned round": "pages 7\ngroup max\nkeep first 9\n"
    "select top t by sum(max(max(k over page) * q, min(k over page) * q) over dims)",
    "pages by tokens": "pages 5\nselect top t by dot(q, k)",
    "pages by tokens of a sketch": "pages 16\nsketch top 8 dims by abs(q) every 3 queries\nselect top t by dot(q, k over sketch)",
}  # fmt: skip


def selecting(body: str) -> PolicySpec:
    return spec_of(f"param t = 64\n{body}")


@dataclass(frozen=True)
class Shape:
    group: int = 2
    dim: int = 32
    batch: int = 2
    prompt: int = 700  # three of the kernels' chunks, the last of them not full
    pad: int = 70
    dtype: torch.dtype = torch.float32
    window: int | None = None
    inputs: str = "ties"


class Twins:
    """One state under two backends, which get the same calls."""

    def __init__(
        self, spec: PolicySpec, shape: Shape, *, layer: int = 2, backends: tuple[str, str] = ("cpu", "torch"), **given: float
    ) -> None:
        self.shape = shape
        self.make = torch.Generator().manual_seed(1)
        self.states = [SlotState(spec, given, layer=layer, layers=LAYERS) for _ in backends]
        self.backends = [choose(spec, name, torch.device("cpu"), shape.dtype) for name in backends]
        real = torch.arange(shape.prompt) >= torch.arange(shape.batch)[:, None] * shape.pad
        prompt = self.call(shape.prompt, real)
        for state, backend in zip(self.states, self.backends, strict=True):
            backend.prefill(state, prompt)

    def call(self, tokens: int, real: Tensor | None = None) -> AttentionCall:
        shape = self.shape
        query = self._whole(HEADS * shape.group, tokens)
        key, value = self._whole(HEADS, tokens), self._whole(HEADS, tokens)
        if shape.inputs == "nan":
            key[..., 0] = torch.where(torch.rand(key.shape[:-1], generator=self.make) < 0.05, torch.nan, key[..., 0])
        if shape.inputs == "equal":
            key = torch.ones_like(key)
        given = (x.to(shape.dtype) for x in (query, key, value))
        return AttentionCall(*given, real, 0.01, window=shape.window)

    def _whole(self, heads: int, tokens: int) -> Tensor:
        size = (self.shape.batch, heads, tokens, self.shape.dim)
        return torch.randint(-2, 3, size, generator=self.make).float()

    def step(self, tokens: int = 1, real: Tensor | None = None) -> None:
        """A forward of both, and what they must have in common."""
        call = self.call(tokens, real)
        ours, theirs = (b.decode(s, call) for s, b in zip(self.states, self.backends, strict=True))
        self.check(ours, theirs)

    def check(self, ours: Tensor, theirs: Tensor) -> None:
        mine, other = self.states
        assert torch.equal(mine.position, other.position)
        assert torch.equal(mine.columns > 0, other.columns > 0), "other slots were chosen"
        assert torch.allclose(mine.columns, other.columns, atol=1e-5, equal_nan=True)
        if mine.spec.sketches:
            assert torch.equal(mine.sketch, other.sketch)
        tolerance = OUT_TOLERANCE[self.shape.dtype]
        assert torch.allclose(ours.float(), theirs.float(), atol=2 * tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("tokens", few([1, 16, 17, 64, 330], 330))
@pytest.mark.parametrize("name", SELECTS)
def test_chooses_what_torch_chooses(name: str, tokens: int) -> None:
    tokens = max(tokens, 12) if "keep" in SELECTS[name] else tokens
    twins = Twins(selecting(WATCHED + SELECTS[name]), Shape(), t=tokens)
    for _ in range(5):
        twins.step()
    twins.step(3)
    twins.step(1, torch.tensor([[True], [False]]))


@pytest.mark.nightly
@pytest.mark.parametrize("shape", [
    Shape(inputs="nan"), Shape(inputs="equal"), Shape(window=400), Shape(window=30), Shape(dtype=torch.bfloat16, group=4),
    Shape(dtype=torch.float16, group=1), Shape(dim=20, dtype=torch.bfloat16), Shape(prompt=3, pad=1),
    Shape(group=8, dim=128, batch=1, prompt=5000),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("name", ["dot, group sum", "expression", "random", "sketch, always", "sketch in an expression"])
def test_whatever_the_inputs_are(name: str, shape: Shape) -> None:
    twins = Twins(selecting(WATCHED + SELECTS[name]), shape, t=90)
    for _ in range(4):
        twins.step()


PAGES = paired(list(PAGED), [16, 31, 100, 705], [
    Shape(), Shape(inputs="nan"), Shape(inputs="equal"), Shape(window=405), Shape(window=16), Shape(dtype=torch.bfloat16, group=4),
    Shape(prompt=3, pad=1), Shape(batch=1, prompt=1010),
])  # fmt: skip


@pytest.mark.parametrize(("name", "tokens", "shape"), thinned(PAGES, 8), ids=str)
def test_chooses_the_pages_that_torch_chooses(name: str, tokens: int, shape: Shape) -> None:
    """Without a budget no column shows what was chosen; values differ from slot to slot."""
    twins = Twins(selecting(PAGED[name]), shape, t=tokens)
    for _ in range(20 if shape.batch == 1 else 4):
        twins.step()


EACH = {
    "dot": SELECTS["dot"],
    "expression": SELECTS["expression"],
    "sketch": "sketch top 8 dims by max(abs(k) over slots) every 2 queries\nselect top t by dot(q, k over sketch)",
    "pages by bounds": PAGED["pages by bounds"],
    "pages by tokens": PAGED["pages by tokens"],
    "of what is left": "param budget = 300\nscore position % 7\nkeep first 3\nselect top t by dot(q, k)",
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "shape",
    [
        Shape(group=5, inputs="nan"), Shape(inputs="equal"), Shape(window=30, group=3), Shape(dtype=torch.bfloat16, group=4),
        Shape(prompt=3, pad=1), Shape(group=8, dim=128, batch=1, prompt=5000),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", EACH)
def test_each_query_head_chooses_what_it_chooses_in_torch(name: str, shape: Shape) -> None:
    """Nothing is remembered of what was chosen; values differ from slot to slot."""
    twins = Twins(selecting(f"group each\n{EACH[name]}"), shape, t=40)
    for _ in range(3):
        twins.step()
    twins.step(3)
    if shape.batch == 2:
        twins.step(1, torch.tensor([[True], [False]]))


@pytest.mark.nightly
@pytest.mark.parametrize("name", EACH)
def test_alone_in_its_group_a_query_head_chooses_as_a_group_does(name: str) -> None:
    """To the bit, whatever the group is said to do."""
    found = []
    for group in ("mean", "each"):
        twins = Twins(selecting(f"group {group}\n{EACH[name]}"), Shape(group=1), backends=("cpu", "torch"), t=40)
        calls = [twins.call(1) for _ in range(3)]
        backends, states = twins.backends, twins.states
        found.append([[b.decode(s, call) for call in calls] for b, s in zip(backends, states, strict=True)])
    assert all(torch.equal(*pair) for backend in zip(*found, strict=True) for pair in zip(*backend, strict=True))


@pytest.mark.parametrize("name", few(["sketch", "sketch of keys", "dot", "expression", "random"], "sketch"))
def test_what_was_evicted_is_not_chosen(name: str) -> None:
    """Slots are freed and used again, in the sketch as well."""
    evicting = "param budget = 300\nscore random()\nkeep last 5\ntrigger overflow >= 3\nlet watched = sum(attn)\nkeep top 9 by watched\n"
    twins = Twins(selecting(evicting + SELECTS[name]), Shape(), t=50)
    for _ in range(12):
        twins.step()
    assert int((twins.states[0].position < 0).sum()) > 0


def test_all_that_there_is_equals_dense_attention() -> None:
    """To the bit: it is the same code."""
    twins = Twins(selecting(SELECTS["sketch"]), Shape(), backends=("cpu", "cpu"), t=10**6)
    full = kvdsl.load("full").spec
    dense = choose(full, "cpu", torch.device("cpu"), torch.float32)
    other = SlotState(full, {}, layer=2, layers=LAYERS)
    other.layout = copy.deepcopy(twins.states[0].layout)
    for name in ("position", "columns", "seen", "numbers"):
        setattr(other, name, getattr(twins.states[0], name).clone())
    other.numbers = other.numbers[:, :0]
    other.allocated = other.room.grows = True
    other.room.filled = twins.states[0].room.filled
    for _ in range(3):
        call = twins.call(1)
        assert torch.equal(twins.backends[0].decode(twins.states[0], call), dense.decode(other, call))


def test_all_dims_choose_as_the_whole_product_does() -> None:
    whole = "sketch top 32 dims by abs(q) every 2 queries\nselect top t by dot(q, k over sketch)"
    shape = Shape()
    sketched, exact = (Twins(selecting(WATCHED + body), shape, t=100) for body in (whole, SELECTS["dot"]))
    assert torch.equal(sketched.states[0].columns, exact.states[0].columns)
    for _ in range(4):
        call = sketched.call(1)
        ours, oracle = (twins.backends[0].decode(twins.states[0], call) for twins in (sketched, exact))
        assert torch.equal(ours, oracle)
        assert torch.equal(sketched.states[0].columns, exact.states[0].columns)


def test_more_dims_than_keys_have_are_refused() -> None:
    with pytest.raises(KvdslError, match="sketches 33 dims, but keys have 32"):
        Twins(selecting("sketch top 33 dims by abs(q) every 2 queries\nselect top t by dot(q, k over sketch)"), Shape())


# -- storage ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [SELECTS["sketch"], PAGED["pages by bounds"]])
def test_growth_copies_only_when_it_is_full(body: str) -> None:
    twins = Twins(selecting(body), Shape(prompt=50, pad=0))
    twins.step()
    state = twins.states[0]

    def where() -> list[int]:
        by_row = ("seen", "numbers", "prompt", "sketch")
        return [tensor.data_ptr() for name, tensor in state.tensors().items() if name not in by_row and tensor.numel()]

    moves = 0
    for _ in range(20):
        before = where()
        twins.step()
        moves += before != where()
    assert state.slots == 128  # 64 after the prompt
    assert moves == 1


@pytest.mark.parametrize("body", [SELECTS["sketch"], PAGED["pages by bounds"], PAGED["pages by tokens of a sketch"]])
def test_rows_move_with_what_is_kept_beside_their_keys(body: str) -> None:
    """Beams: rows change places between refreshes, multiply and are copied."""
    twins = Twins(selecting(body), Shape(batch=3, pad=20))
    twins.step()
    for rows in ([2, 0, 0], [1, 1, 2], [0]):
        for state in twins.states:
            state.select_rows(torch.tensor(rows))
        twins.shape = replace(twins.shape, batch=len(rows))
        twins.step()
    for state in twins.states:
        state.select_rows(torch.tensor([0, 0]))
    twins.shape = replace(twins.shape, batch=2)
    twins.step()
    shared = twins.states[0].spec
    kept = copy.deepcopy(twins.states, {id(shared): shared})
    twins.step()
    twins.states = kept
    twins.step()


def test_backends_may_take_turns() -> None:
    """What torch places, the kernels find."""
    twins = Twins(selecting(SELECTS["sketch"]), Shape())
    twins.step()
    twins.backends.reverse()
    twins.step()
    twins.backends.reverse()
    twins.step()


def test_a_dense_layer_keeps_nothing_beside_its_keys() -> None:
    twins = Twins(selecting(f"{SELECTS['sketch']} in layers 3.."), Shape(), layer=2)
    for _ in range(4):
        twins.step()
    assert twins.states[0].sketch_keys.numel() == 0


@pytest.mark.nightly
@pytest.mark.parametrize(
    "body",
    [
        SELECTS["sketch"],
        SELECTS["expression"],
        PAGED["pages by bounds"],
        PAGED["pages by tokens"],
        f"group each\n{EACH['dot']}",
        f"group each\n{EACH['pages by bounds']}",
    ],
)
@pytest.mark.parametrize("threads", [2, 3, 5])
def test_the_number_of_threads_does_not_matter(body: str, threads: int) -> None:
    before = torch.get_num_threads()
    twins = Twins(selecting(body), Shape(batch=1), backends=("cpu", "cpu"))
    try:
        for _ in range(4):
            call, outs = twins.call(1), []
            for state, backend, count in zip(twins.states, twins.backends, (1, threads), strict=True):
                torch.set_num_threads(count)
                outs.append(backend.decode(state, call))
            assert torch.equal(*outs)
    finally:
        torch.set_num_threads(before)
