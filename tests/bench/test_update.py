"""Updates in place and by shifting leave the same cache; and the figures of their race."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.cli import main
from kvdsl.runtime.backends import choose
from kvdsl_lab.bench import baselines, update
from kvdsl_lab.bench.baselines import Shifting
from kvdsl_lab.bench.update import Shape
from tests.cli.harness import run

SHAPE = Shape(batch=2, heads=3, head_dim=16, live=40, evict=7, dtype="fp32")
LARGE = Shape(batch=1, heads=48, head_dim=64, live=400, evict=7, dtype="fp32")
"""More than a core's cache holds, which C++ writes past."""

BACKENDS = ("torch", "cpu")


def tokens() -> list[tuple[Tensor, Tensor]]:
    return update.new_tokens(SHAPE, 0)


def a_cache() -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(2)
    keys, values = torch.randn(2, SHAPE.batch, SHAPE.heads, SHAPE.live, SHAPE.head_dim, generator=make)
    return keys, values


def compacted(x: Tensor, leaving: Tensor, new: Tensor) -> Tensor:
    """Head by head and token by token: what stays, then what is new."""
    made = torch.empty_like(x)
    for b in range(x.shape[0]):
        for h in range(x.shape[1]):
            gone = set(leaving[b, h].tolist())
            stays = [x[b, h, i] for i in range(x.shape[2]) if i not in gone]
            made[b, h] = torch.stack([*stays, *new[b, h]])
    return made


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm"])
def test_shifting_moves_what_stays_together(policy: str) -> None:
    expected = a_cache()
    shifting = Shifting(*expected, SHAPE.evict)
    leaving = update.victims(kvdsl.load(policy).spec, SHAPE, 0)
    assert all((victims.first is None) == (policy == "h2o") for victims in leaving)
    run = update.shift_and_append(shifting, leaving, tokens())
    for index in range(6):
        victims, new = leaving[index % len(leaving)], tokens()[index % len(tokens())]
        if victims.first is None:
            stay = torch.ones(expected[0].shape[:3], dtype=torch.bool).scatter_(2, victims.places, False)
            fresh = baselines.gather_in_fresh_memory(*expected, stay, new)
        else:
            fresh = baselines.shift_in_fresh_memory(*expected, victims.first, new)
        run()
        expected = tuple(compacted(x, victims.places, one) for x, one in zip(expected, new, strict=True))
        for ours, freshly, wanted in zip(shifting.content(), fresh, expected, strict=True):
            assert torch.equal(ours, wanted)
            assert torch.equal(freshly, wanted)
    shifting.copy()
    shifting._now = 1 - shifting._now
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(shifting.content(), expected, strict=True))


@pytest.mark.parametrize("shape", [SHAPE, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("policy", ["h2o", "streaming_llm", "equip_h2o"])
def test_in_place_holds_what_shifting_holds(policy: str, name: str, shape: Shape) -> None:
    """The same tokens, in the order of their positions."""
    spec = kvdsl.load(policy).spec
    state, leaving = update.full_cache(spec, shape, 0), update.victims(spec, shape, 0)[:1]
    live, given = slice(0, shape.live), update.new_tokens(shape, 0)
    wanted = [
        compacted(x[:, :, live], leaving[0].places, new) for x, new in zip((state.keys, state.values), given[0], strict=True)
    ]
    backend = choose(spec, name, torch.device("cpu"), torch.float32)
    where = state.keys.data_ptr()
    update.in_place(backend, state, leaving, given[:1])()
    assert state.keys.data_ptr() == where
    assert bool(((state.position >= 0).sum(-1) == shape.live).all())
    order = state.position[:, :, live].argsort(-1)[..., None].expand(-1, -1, -1, shape.head_dim)
    for x, expected in zip((state.keys, state.values), wanted, strict=True):
        assert torch.equal(x[:, :, live].gather(2, order), expected)


def test_victims_of_different_updates_are_different() -> None:
    for policy in ("h2o", "streaming_llm"):
        places = [one.places for one in update.victims(kvdsl.load(policy).spec, SHAPE, 3)]
        together = torch.cat(places, -1)
        assert all(len(set(head.tolist())) == together.shape[-1] for head in together.flatten(0, 1))
    sinks = update.victims(kvdsl.load("streaming_llm").spec, SHAPE, 3)
    assert min(int(one.places.min()) for one in sinks) == 4


@pytest.mark.parametrize("policy", ["h2o", "streaming_llm"])
def test_figures(policy: str) -> None:
    found = update.bench_update(kvdsl.load(policy).spec, SHAPE, backend="torch", repeats=4, warmup=1)
    for key in ("ms", "shift_ms", "speedup", "copy_ms", "copy_gbps", "shift_of_copy", "fresh_ms", "speedup_over_fresh"):
        assert 0 < found[f"{key}_q1"] <= found[key] <= found[f"{key}_q3"]
    assert found["bytes"] == 2 * 2 * 3 * 40 * 16 * 4
    assert (found["policy"], found["live"], found["evict"]) == (policy, 40, 7)


def test_figures_follow_from_the_rounds() -> None:
    times = {"ours": [1.0, 2.0], "shift": [10.0, 30.0], "copy": [5.0, 15.0], "fresh": [100.0, float("nan")]}
    found = update.figures(times, SHAPE)
    assert (found["ms"], found["shift_ms"], found["speedup"], found["shift_of_copy"]) == (1.5, 20.0, 12.5, 0.5)
    assert found["speedup_over_fresh"] == 100


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = "--live 32 --evict 4 --repeats 3 --backend torch --json"
    found = run(capsys, *f"bench update --policy h2o --batch 1 --heads 2 --head-dim 16 {sizes}".split(), code=0).json()
    assert found["format_version"] == "1.0" and found["environment"]["dtype"] == "fp32"
    assert {"ms", "shift_ms", "speedup"} <= set(found)
    monkeypatch.setattr(update, "EQUIP_SHAPES", ((1, 2, 8), (2, 1, 16)))
    rows = run(capsys, *f"bench update --policy streaming_llm --equip {sizes}".split(), code=0).json()["rows"]
    assert [(row["batch"], row["heads"], row["head_dim"]) for row in rows] == [(1, 2, 8), (2, 1, 16)]


@pytest.mark.parametrize(
    ("words", "message"),
    [("--evict 64 --live 64", "evict fewer than"), ("--set budget=3", "--live"), ("--backend triton", "needs a GPU")],
)
def test_mistakes(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "update", *words.split()]) in (1, 2)
    shown = capsys.readouterr()
    assert not shown.out
    assert message in " ".join(shown.err.split()) and "Traceback" not in shown.err
