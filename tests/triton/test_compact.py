"""Compact positions in the kernels, in Triton's interpreter, against torch from the same states: the twins of
`tests.differential.test_compact` at sizes for the interpreter, and what only GPUs have: lengths that a step leaves for the next,
angles in three digits, products of rounded keys.
"""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kvdsl.runtime.angles import DIGITS, digits
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.gpu import rotate
from kvdsl.runtime.gpu.sizes import Sizes
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.state.slots import SlotState
from tests.differential.test_compact import (
    CAPPED,
    DIM,
    HEAVY,
    ROPES,
    STAGED,
    STREAMING,
    Random,
    backend,
    check_ranks,
    compare,
    copied,
    rope_of,
)
from tests.differential.traces import OUT_TOLERANCE
from tests.quick import few
from tests.texts import spec_of

pytestmark = pytest.mark.usefixtures("small_blocks")


@pytest.mark.parametrize(
    ("rope", "dim", "group", "dtype"),
    [
        ("half", 80, 3, torch.float32),
        ("half", 64, 1, torch.bfloat16),
        ("interleaved", 80, 2, torch.float16),
        ("partial", 80, 2, torch.float32),
        ("partial, interleaved", 16, 3, torch.bfloat16),
        ("backwards", 16, 2, torch.float32),
        ("none", 16, 2, torch.float32),
    ],
    ids=str,
)
def test_every_rotation(rope: str, dim: int, group: int, dtype: torch.dtype) -> None:
    given = Random(group, dim, dtype, ROPES[rope](dim))
    compare(HEAVY, given, budget=20, prompt=45, steps=2, fused="triton")


class Windowed(Random):
    """Queries that see few tokens."""

    def call(self, tokens: int, real: torch.Tensor | None = None) -> AttentionCall:
        return super().call(tokens, real)._replace(window=30)


@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize(
    ("rope", "sinks", "dtype", "make"),
    few(
        [
            ("half", 5, torch.float16, Random),
            ("interleaved", 40, torch.bfloat16, Random),
            ("partial", 21, torch.bfloat16, Windowed),
            ("none", 5, torch.float16, Random),
        ],
        ("interleaved", 40, torch.bfloat16, Random),
    ),
    ids=str,
)
def test_where_few_turn(
    rope: str, sinks: int, dtype: torch.dtype, make: type[Random], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those alone are rotated, in blocks of their own, of another size, in one split or two; a free slot among the others holds NaN."""
    monkeypatch.setattr(Sizes, "attend_block", block)
    given = make(2, 32, dtype, ROPES[rope](32))
    body = STREAMING.replace("first 5", f"first {sinks}").replace("= 8", "= 60")
    state = compare(body, given, budget=sinks + 12, prompt=90, steps=2, fused="triton")
    free = state.position < 0
    assert free.any() and (~free & (state.position != state.rank)).any()
    state.layout.value_pool[free] = torch.nan
    spec, call, other = state.spec, given.call(1), copied(state)
    outs = [backend(spec, name, dtype).decode(s, call) for name, s in (("torch", state), ("triton", other))]
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=OUT_TOLERANCE[dtype])


@pytest.mark.parametrize("body", few([STREAMING, STAGED, CAPPED], STAGED), ids=["streaming", "staged", "capped"])
def test_several_tokens_in_one_call(body: str) -> None:
    given = Random(1, 16, torch.float32, rope_of(16))
    compare(body, given, budget=12, prompt=30, steps=1, at_once=10, fused="triton")


@pytest.mark.nightly
def test_many_gaps_are_closed_at_once() -> None:
    """A prompt may leave more than a prune does: ranks move across several blocks."""
    body = HEAVY + "\nwhen decode"
    given = Random(1, 16, torch.float32, rope_of(16))
    compare(body, given, budget=20, prompt=90, steps=1, fused="triton")


@pytest.mark.usefixtures("watched_overflow")
def test_a_long_text() -> None:
    """Turns of one, two and three digits; angles stay as exact as float32 lets a turn be."""
    given = Random(2, DIM, torch.float32, rope_of(DIM))
    spec = spec_of(STREAMING)
    state = SlotState(spec, {"budget": 20.0})
    backend(spec, "torch").prefill(state, given.call(40))
    for length in (100, 20_000, 500_000, 3_000_000):
        moved = length - int(state.seen[0])
        state.position[state.position >= 5] += moved  # as if that many had come and gone
        state.seen += moved
        call, other = given.call(1), copied(state)
        ours, theirs = (backend(spec, name).decode(s, call) for name, s in (("triton", other), ("torch", state)))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=OUT_TOLERANCE[torch.float32])


def test_backends_may_take_turns() -> None:
    """A length that one backend left is not what another one's steps have made of it."""
    given, spec = Random(1, 16, torch.float32, rope_of(16)), spec_of(HEAVY)
    state = SlotState(spec, {"budget": 12.0})
    backend(spec, "torch").prefill(state, given.call(30))
    for name in ("triton", "cpu", "triton", "torch", "triton"):
        call, other = given.call(1), copied(state)
        expected = backend(spec, "torch").decode(other, call)
        torch.testing.assert_close(backend(spec, name).decode(state, call), expected, rtol=0, atol=2e-5)
        check_ranks(state)
        if name == "triton":
            assert torch.equal(state.length, (state.position >= 0).sum(-1, keepdim=True, dtype=torch.int32))
        else:
            assert not state.length.numel()


@pytest.mark.nightly
def test_a_cache_that_grows() -> None:
    body = f"{HEAVY}\ntrigger overflow >= 0"
    given = Random(1, 16, torch.float32, rope_of(16))
    state = compare(body, given, budget=20, prompt=25, steps=1, at_once=8, fused="triton")
    assert state.slots == 64  # 32 after the prompt


def test_digits_of_a_turn() -> None:
    rope = rope_of(32)
    table = digits(rope, torch.device("cpu"))
    assert digits(rope, torch.device("cpu")) is table
    base, (near, far, beyond) = rope.inv_freq, table.split(list(DIGITS))
    units = (1, DIGITS[0], DIGITS[0] * DIGITS[1])
    for digit, part, unit in zip((5, 4095, 4000), (near, far, beyond), units, strict=True):
        torch.testing.assert_close(part[digit, 0], (digit * unit * base).cos().float(), rtol=0, atol=1e-7)
        torch.testing.assert_close(part[digit, 1], (digit * unit * base).sin().float(), rtol=0, atol=1e-7)
    assert units[-1] * DIGITS[-1] == 2**31, "every turn that an int32 can say"


@triton.jit
def _scores(out, q, k, by, angles, D: tl.constexpr, DOT: tl.constexpr):
    i = tl.arange(0, 16)
    q_first, q_second, q_other = rotate.parts(q, i, i < 16, D, D // 2, D // 2, 0, 0, False)
    k_first, k_second, k_other = rotate.parts(k, i, i < 16, D, D // 2, D // 2, 0, 0, False)
    found = rotate.scores(
        q_first,
        q_second,
        q_other,
        k_first,
        k_second,
        k_other,
        tl.load(by + i),
        angles,
        D // 2,
        D // 2,
        0,
        False,
        DOT,
    )
    tl.store(out + i[:, None] * 16 + i[None, :], found)


def test_products_of_half_precision_lose_nothing_by_the_turn() -> None:
    """A turned key is rounded to the model's dtype for the tensor cores, and what that took is multiplied as well."""
    rope, make = rope_of(64), torch.Generator().manual_seed(0)
    q, k = (torch.randn(16, 64, generator=make).half() for _ in range(2))
    by, out = torch.arange(16, dtype=torch.int32) * 37, torch.empty(16, 16)
    _scores[(1,)](out, q, k, by, digits(rope, torch.device("cpu")), D=64, DOT=tl.float16)
    exact = q.double() @ _rotated(rope, k, by).T
    assert (out - exact).abs().max() < 1e-4
    rounded = q.double() @ _rotated(rope, k, by).half().double().T
    assert (rounded - exact).abs().max() > 1e-3, "which can be seen"


def _rotated(rope: Rope, k: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return rope.rotate(k, by).double()
