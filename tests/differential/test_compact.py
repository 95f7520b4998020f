"""Compact positions in the decode step: what turns meets, in caches of many slots, texts of any length and every rotation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from kvdsl.runtime.angles import NEAR_TURNS, Angles, angles
from kvdsl.runtime.backend import AttentionCall, Backend
from kvdsl.runtime.backends import choose
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.order import FREE, ranks
from kvdsl.runtime.state.slots import SlotState
from tests.differential.traces import OUT_TOLERANCE
from tests.quick import few
from tests.texts import spec_of

BATCH, HEADS, DIM = 2, 2, 64
COLUMN_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-4, torch.float16: 1e-4}
"""How far a state column of one step lies from torch's."""
BACKENDS = ("torch", "cpu")
STREAMING = "param budget = 8\nscore position\nkeep first 5\npositions compact"
HEAVY = "param budget = 8\nscore sum(attn)\nkeep last budget / 2\npositions compact"
STAGED = f"{HEAVY}\ntrigger overflow >= 9\nslack 6\nmax_drop 5"
CAPPED = f"{HEAVY}\ncap hard"


def rope_of(dim: int, pairing: str = "half", offset: int = 0, base: float = 1e4) -> Rope:
    pairs = (dim - 2 * offset) // 2
    return Rope(base ** -(torch.arange(pairs, dtype=torch.float64) / pairs), pairing, offset)  # type: ignore[arg-type]


class Random:
    """Calls with random queries, keys and values."""

    def __init__(self, group: int, dim: int, dtype: torch.dtype, rope: Rope | None) -> None:
        self.make = torch.Generator().manual_seed(0)
        self.group, self.dim, self.dtype, self.rope = group, dim, dtype, rope

    def call(self, tokens: int, real: Tensor | None = None) -> AttentionCall:
        query = torch.randn(BATCH, HEADS * self.group, tokens, self.dim, generator=self.make)
        key, value = torch.randn(2, BATCH, HEADS, tokens, self.dim, generator=self.make)
        given = (x.to(self.dtype) for x in (query, key, value))
        return AttentionCall(*given, real, self.dim**-0.5, rope=self.rope)


def backend(spec: PolicySpec, name: str, dtype: torch.dtype = torch.float32) -> Backend:
    return choose(spec, name, torch.device("cpu"), dtype)


def copied(state: SlotState) -> SlotState:
    """The same, in tensors of its own."""
    return copy.deepcopy(state)


def check_ranks(state: SlotState) -> None:
    if state.spec.compact:
        assert torch.equal(state.rank, ranks(state.position)), "ranks are the order of the positions"


# -- both backends, from the same state ------------------------------------------------------------------------------------

ROPES = {
    "half": lambda dim: rope_of(dim),
    "interleaved": lambda dim: rope_of(dim, "interleaved"),
    "partial": lambda dim: rope_of(dim, "half", dim // 8),
    "partial, interleaved": lambda dim: rope_of(dim, "interleaved", dim // 4),
    "backwards": lambda dim: Rope(-rope_of(dim).inv_freq, "half"),
    "none": lambda dim: None,
}


def compare(
    body: str, given: Random, *, budget: float, prompt: int, steps: int, at_once: int = 1, fused: str = "cpu"
) -> SlotState:
    """Torch and a backend with kernels make the same steps from the same states; the last one's."""
    spec = spec_of(body)
    real = torch.arange(prompt) >= torch.tensor([[0], [7]])
    state = SlotState(spec, {"budget": float(budget)})
    backend(spec, "torch").prefill(state, given.call(prompt, real))
    check_ranks(state)
    for _ in range(steps):
        call, other = given.call(at_once), copied(state)
        outs = [backend(spec, name, given.dtype).decode(s, call) for name, s in (("torch", state), (fused, other))]
        torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=OUT_TOLERANCE[given.dtype])
        assert torch.equal(other.position, state.position)
        live = state.position >= 0
        torch.testing.assert_close(
            other.columns[:, live], state.columns[:, live], rtol=1e-5, atol=COLUMN_TOLERANCE[given.dtype]
        )
        check_ranks(state)
        check_ranks(other)
        state = other
    return state


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DIMS = (64, 80, 16)


ROTATIONS = [(rope, dtype, dim) for rope in ROPES for dtype in DTYPES for dim in DIMS]
EACH_ONCE = [(rope, DTYPES[number % 3], DIMS[number // 2 % 3]) for number, rope in enumerate(ROPES)]


@pytest.mark.parametrize(("rope", "dtype", "dim"), few(ROTATIONS, *EACH_ONCE), ids=str)
def test_every_rotation(rope: str, dtype: torch.dtype, dim: int) -> None:
    given = Random(2, dim, dtype, ROPES[rope](dim))
    compare(HEAVY, given, budget=70, prompt=200, steps=8)


@pytest.mark.parametrize("group", few([1, 3, 8], 3))
@pytest.mark.parametrize("body", [STREAMING, HEAVY, STAGED, CAPPED], ids=["streaming", "heavy", "staged", "capped"])
def test_many_slots(body: str, group: int) -> None:
    """Several chunks of slots: blocks that stand where they stood, blocks that moved together, blocks of all sorts."""
    given = Random(group, DIM, torch.float32, rope_of(DIM))
    compare(body, given, budget=600, prompt=900, steps=20)


def test_many_sinks_move_together() -> None:
    """Whole blocks of sinks have one shift: then the query is turned, not the keys."""
    body = STREAMING.replace("first 5", "first 70").replace("= 8", "= 200")
    for dtype in (torch.float32, torch.bfloat16):
        given = Random(4, DIM, dtype, rope_of(DIM, "interleaved"))
        compare(body, given, budget=200, prompt=1000, steps=5)


@pytest.mark.parametrize("body", [STREAMING, STAGED, CAPPED], ids=["streaming", "staged", "capped"])
def test_several_tokens_in_one_call(body: str) -> None:
    given = Random(2, DIM, torch.float32, rope_of(DIM))
    compare(body, given, budget=40, prompt=60, steps=8, at_once=7)


def test_the_oldest_leaves_beside_free_slots() -> None:
    """A row with less budget than another has some, which a gap in the ranks does not move."""
    given = Random(1, DIM, torch.float32, rope_of(DIM))
    compare("param budget = 8\nscore position\npositions compact", given, budget=0.5, prompt=60, steps=3)


STATISTICS = (
    "param budget = 8\nscore mean(attn) + 0.01 * mean(logit) + max(attn)\nkeep top budget / 4 by std(attn)\nkeep last 1"
)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("body", [HEAVY, STATISTICS], ids=["compact", "statistics"])
def test_threads_share_a_head(body: str, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        given = Random(2, DIM, torch.float32, rope_of(DIM))
        compare(body, given, budget=700, prompt=1000, steps=4)
    finally:
        torch.set_num_threads(before)


def test_a_long_text() -> None:
    """Turns of a hundred thousand positions: the tables grow, and angles stay as exact as float32 lets a turn be."""
    given = Random(2, DIM, torch.float32, rope_of(DIM))
    spec = spec_of(STREAMING)
    state = SlotState(spec, {"budget": 40.0})
    backend(spec, "torch").prefill(state, given.call(60))
    for length in (1_000, 20_000, 130_000):
        moved = length - int(state.seen[0])
        state.position[state.position >= 5] += moved  # as if that many had come and gone
        state.seen += moved
        call, other = given.call(1), copied(state)
        ours, theirs = (backend(spec, name).decode(s, call) for name, s in (("cpu", other), ("torch", state)))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


def test_backends_may_take_turns() -> None:
    """The ranks are part of the state, whoever makes the next step."""
    given, spec = Random(2, DIM, torch.float32, rope_of(DIM)), spec_of(STAGED)
    state = SlotState(spec, {"budget": 20.0})
    backend(spec, "torch").prefill(state, given.call(50))
    for step in range(40):
        backend(spec, BACKENDS[step % 2]).decode(state, given.call(1))
        check_ranks(state)
    state.select_rows(torch.tensor([1, 1]))
    check_ranks(state)
    assert "rank" in state.declared


def test_ranks_follow_the_cache_when_it_grows() -> None:
    given, spec = (
        Random(1, DIM, torch.float32, rope_of(DIM)),
        spec_of(f"{HEAVY}\ntrigger overflow >= 0"),
    )
    state = SlotState(spec, {"budget": 20.0})
    backend(spec, "torch").prefill(state, given.call(50))
    for _ in range(4):
        backend(spec, "cpu").decode(state, given.call(4))
    assert state.slots == 128  # 64 after the prompt
    check_ranks(state)


# -- tables ----------------------------------------------------------------------------------------------------------------


def test_tables_hold_the_angles_of_every_turn() -> None:
    rope = rope_of(32)
    tables = Angles(rope, 1000)
    assert tables.reach >= 1000
    for by in (0, 1, NEAR_TURNS - 1, NEAR_TURNS, 999):
        (near_cos, near_sin), (far_cos, far_sin) = tables.near[by % NEAR_TURNS], tables.far[by // NEAR_TURNS]
        torch.testing.assert_close(
            far_cos * near_cos - far_sin * near_sin, (by * rope.inv_freq).cos().float(), rtol=0, atol=3e-7
        )
        torch.testing.assert_close(
            far_sin * near_cos + far_cos * near_sin, (by * rope.inv_freq).sin().float(), rtol=0, atol=3e-7
        )


def test_tables_are_shared_and_grow() -> None:
    rope = rope_of(32)
    first = angles(rope, 10)
    assert angles(rope, first.reach) is first
    longer = angles(rope, first.reach + 1)
    assert longer.reach == 2 * first.reach
    assert angles(rope, 10) is longer


# -- EQUIP's theorem: the order of the slots does not matter ----------------------------------------------------------------


@pytest.mark.parametrize("window", few([None, 9], 9))
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("rope", "tolerance"), [(None, 1e-6), (rope_of(DIM), 1e-5)], ids=["sdpa", "rope"])
def test_in_place_equals_shift_and_append(
    rope: Rope | None,
    tolerance: float,
    name: str,
    padded: bool,
    window: int | None,
) -> None:
    """Theorem 1: overwriting the victim's slot permutes keys, values and mask alike, which attention does not see.

    The reference moves what is left together and appends the new token, as the papers' codes do, recomputes every key's rotation
    for its place in the row, and runs torch's attention with a mask.
    """
    spec = spec_of(HEAVY)
    given = Random(2, DIM, torch.float32, None)
    state = SlotState(spec, {"budget": 12.0})
    real = torch.arange(30) >= torch.tensor([[0], [7 if padded else 0]])
    rotated = _Rotating(rope, window)
    backend(spec, "torch").prefill(state, rotated(given.call(30, real), torch.where(real, real.cumsum(1) - 1, 0)))
    shifted = _Shifted(state, rope, window)
    for _ in range(40):
        new = real[:, :1] if padded and bool(torch.rand(1, generator=given.make) < 0.3) else None
        call = given.call(1, new)
        expected = shifted.step(call)
        out = backend(spec, name).decode(state, rotated(call, state.seen[:, None]))
        torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
        shifted.keep(state.position)
    slots = state.position[0, 0]
    assert not torch.equal(slots[slots >= 0].sort().values, slots[slots >= 0]), "the slots should not be in order"


class _Rotating:
    """The model: rotates queries and keys at their places in the text, [batch, tokens]."""

    def __init__(self, rope: Rope | None, window: int | None) -> None:
        self.rope, self.window = rope, window

    def __call__(self, call: AttentionCall, position: Tensor) -> AttentionCall:
        query, key = call.query, call.key
        if self.rope is not None:
            query, key = (self.rope.rotate(x, position[:, None]) for x in (query, key))
        return call._replace(query=query, key=key, rope=self.rope, window=self.window)


class _Shifted:
    """Shift and append, head by head, in float64: keys before any rotation, values and positions in the order of the text."""

    def __init__(self, state: SlotState, rope: Rope | None, window: int | None) -> None:
        self.rope, self.window = rope, window
        self.heads = {}
        for b in range(BATCH):
            for h in range(HEADS):
                position = state.position[b, h]
                slots = (position >= 0).nonzero()[:, 0][position[position >= 0].argsort()]
                keys = self._turn(state.keys[b, h, slots], -position[slots])
                self.heads[b, h] = keys.double(), state.values[b, h, slots].double(), position[slots]
        self.seen = state.seen.clone()

    def _turn(self, x: Tensor, by: Tensor) -> Tensor:
        return x if self.rope is None else self.rope.rotate(x, by)

    def step(self, call: AttentionCall) -> Tensor:
        """Append the new token and attend: [batch, 1, query_heads, dim]; a padding token gives zeros."""
        real = torch.ones(BATCH, dtype=torch.bool) if call.real is None else call.real[:, 0]
        group = call.query.shape[1] // HEADS
        out = torch.zeros(BATCH, 1, HEADS * group, DIM)
        for (b, h), (keys, values, position) in self.heads.items():
            if not real[b]:
                continue
            keys, values = torch.cat([keys, call.key[b, h].double()]), torch.cat([values, call.value[b, h].double()])
            position = torch.cat([position, self.seen[b : b + 1]])
            self.heads[b, h] = keys, values, position
            places = torch.arange(len(position))
            query = self._turn(call.query[b, h * group : (h + 1) * group, 0], places[-1:])
            mask = position > self.seen[b] - (self.window or 10**6)
            attended = torch.nn.functional.scaled_dot_product_attention(
                query.double(), self._turn(keys, places).double(), values, mask.expand(group, -1), scale=call.scaling
            )
            out[b, 0, h * group : (h + 1) * group] = attended.float()
        self.seen += real
        return out

    def keep(self, position: Tensor) -> None:
        """Compact what the policy kept, [batch, kv_heads, slots]."""
        for (b, h), (keys, values, own) in self.heads.items():
            kept = torch.isin(own, position[b, h][position[b, h] != FREE])
            self.heads[b, h] = keys[kept], values[kept], own[kept]
