"""Programs of `choose` that share a KV head's slots or pages: whatever their number and their order, the same are chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.gpu import backend, select
from kvdsl.runtime.gpu.sizes import MAX_CHOOSERS, Sizes
from tests.differential.test_selecting import PAGED, SELECTS, WATCHED, Shape, Twins, selecting
from tests.quick import few

pytestmark = pytest.mark.usefixtures("small_blocks")

DOT = WATCHED + SELECTS["dot"]
BODIES = {
    "slots": DOT,
    "first": DOT + "\nkeep first 9",
    "ends": DOT + "\nkeep first 3\nkeep last 9",
    "pages": PAGED["pages by bounds"].replace("16", "4"),
    "evicting": "param budget = 40\nscore random()\nkeep last 5\nlet watched = sum(attn)\nkeep top 9 by watched\n"
    + SELECTS["dot"],
}
SMALL = Shape(prompt=50, pad=9, dim=32)


class Scaled(Twins):
    """Keys and queries of another size, to the bit: their products lie between the levels, or beyond them."""

    scale = 1.0

    def call(self, tokens: int, real: torch.Tensor | None = None) -> AttentionCall:
        call, scale = super().call(tokens, real), self.scale
        scaling = call.scaling / scale**2
        return AttentionCall(call.query * scale, call.key * scale, call.value, real, scaling, window=call.window)


def twins(body: str, shape: Shape, tokens: int, scale: float = 1.0) -> Twins:
    kind = type("Scaled", (Scaled,), {"scale": scale})
    return kind(selecting(BODIES[body]), shape, backends=("triton", "torch"), t=tokens)


def check(pair: Twins, steps: int = 2) -> None:
    for _ in range(steps):
        pair.step()
    pair.step(1, torch.arange(pair.shape.batch)[:, None] == 0)  # the other row gets padding
    pair.step()
    assert not tensors(pair)["arrived"].any()


def tensors(pair: Twins) -> dict[str, torch.Tensor]:
    return pair.states[0].workspace.tensors  # type: ignore[attr-defined,no-any-return]


@pytest.fixture
def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is one slot or page."""
    monkeypatch.setattr(Sizes, "choose_block", lambda sizes, pages: 1)


@pytest.mark.parametrize(
    ("body", "processors"), few([*((body, 12) for body in BODIES), ("pages", 1), ("ends", 999)], ("pages", 12))
)
def test_any_number_of_programs(body: str, processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sizes, "choose_block", lambda sizes, pages: 4 if pages else 8)
    monkeypatch.setattr(backend, "_PROCESSORS_IN_THE_INTERPRETER", processors)
    pair = twins(body, SMALL, 17)
    check(pair)
    programs = pair.states[0].workspace.choosers  # type: ignore[attr-defined]
    assert programs == {1: 1, 12: 3}.get(
        processors, min(MAX_CHOOSERS, -(-pair.states[0].slots // (4 if body == "pages" else 8)))
    )


@pytest.mark.usefixtures("one_by_one")
@pytest.mark.parametrize(
    ("body", "inputs"), few([("slots", "ties"), ("ends", "equal"), ("pages", "nan"), ("pages", "ties")], ("ends", "equal"))
)
def test_a_slot_for_each_program(body: str, inputs: str) -> None:
    check(twins(body, Shape(prompt=14, pad=3, dim=32, inputs=inputs), 12))


@pytest.mark.parametrize(
    ("body", "tokens", "inputs"),
    few([
        ("slots", 40, "ties"), ("slots", 40, "equal"), ("slots", 40, "nan"), ("slots", 1, "ties"), ("slots", 500, "ties"),
        ("pages", 4, "ties"), ("pages", 4, "equal"), ("pages", 500, "nan"),
    ], ("slots", 40, "ties")),
)  # fmt: skip
def test_equals_of_several_programs(body: str, tokens: int, inputs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few, most and all of them are chosen."""
    monkeypatch.setattr(Sizes, "choose_block", lambda sizes, pages: 4 if pages else 8)
    check(twins(body, replace(SMALL, inputs=inputs, batch=1, window=45), tokens))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("body", "keeps"),
    [
        ("slots", "keep last 64"),
        ("slots", "keep first 30\nkeep last 31"),
        ("pages", "keep first 60"),
        ("pages", "keep first 24"),
    ],
)
def test_all_are_protected(body: str, keeps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or nearly all, or, as whole pages, more than are wanted."""
    monkeypatch.setitem(BODIES, "protected", f"{BODIES[body]}\n{keeps}")
    check(twins("protected", replace(SMALL, window=48), 29 if keeps == "keep first 24" else 64))


@pytest.mark.nightly
@pytest.mark.parametrize(("body", "scale"), [("ends", 2.0**-9), ("pages", 2.0**-3), ("ends", 2.0**9)])
def test_products_beyond_the_levels(body: str, scale: float) -> None:
    """All of them are candidates then."""
    check(twins(body, SMALL, 12, scale))


@pytest.mark.nightly
def test_few_are_candidates() -> None:
    """Those that are chosen, and those of the last one's level."""
    tokens, prompt = 20, 400
    pair = twins("slots", Shape(prompt=prompt, pad=0, batch=1, dim=32), tokens)
    check(pair, 1)
    candidates, heads = tensors(pair)["listed"].sum(-1), tensors(pair)["found"]
    assert heads.min() >= tokens - 1
    assert candidates.max() < 4 * tokens


@triton.jit
def find_levels(grades, levels, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(levels + i, select.level(tl.load(grades + i)))


def levels_of(scores: torch.Tensor) -> torch.Tensor:
    bits = scores.view(torch.int32)
    grades = bits ^ ((bits >> 31) & (2**31 - 1))
    levels = torch.empty_like(grades)
    find_levels[(1,)](grades, levels, len(grades))
    return levels


def test_levels_are_in_the_order_of_grades() -> None:
    """From that of NaN to that of what is protected; 0 is that of what is not seen alone."""
    make = torch.Generator().manual_seed(1)
    drawn = torch.randint(-(2**31) + 1, 2**31, (1 << 12,), generator=make).tolist()
    ordered = sorted({-(2**31) + 1, -(2**31) + 2, -1, 0, 1, 2**31 - 2, 2**31 - 1, *drawn})[: 1 << 11]
    grades = torch.tensor([-(2**31), *ordered][: 1 << 11], dtype=torch.int32)
    levels = torch.empty_like(grades)
    find_levels[(1,)](grades, levels, len(grades))
    assert levels[0] == 0 and levels[1] == 1
    assert (levels.diff() >= 0).all()


def test_levels_are_fine_where_scores_are() -> None:
    """Eight of each power of two."""
    size = 2.0 ** torch.arange(-4, 12) * (1 + torch.arange(8)[:, None] / 8)
    x = torch.cat([-size.flatten(), size.flatten()]).sort().values
    assert levels_of(x).tolist() == [1, *range(1, 255), 254]


@pytest.mark.parametrize(
    ("mean", "deviation", "candidates"),
    [(0, 1, 800), (0, 100, 800), (20, 5, 800), (-20, 5, 800), (100, 20, 2700), (3, 0.1, 1 << 15)],
)
def test_how_many_of_normal_scores_are_candidates(mean: float, deviation: float, candidates: int) -> None:
    scores = mean + deviation * torch.randn(1 << 15, generator=torch.Generator().manual_seed(1))
    levels = levels_of(scores)
    assert (levels >= levels.sort(descending=True).values[511]).sum() <= candidates
