"""Budgets that differ between the KV heads of a layer, as a tensor of a file tells: what each head holds, and in how many slots."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.hf import KVCache
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.state.flat import Flat
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.undo import UndoLog

LAYERS, HEADS, DIMS = 3, 2, 16
SINKS, RECENT = 2, 6
STREAMING = torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 0.2]])
BACKENDS = ["torch", pytest.param("cpu", marks=pytest.mark.nightly)]
POLICY = f"""kv 1

policy Duo {{
  "Streaming heads hold sinks and recent tokens, the others as many as the prompt has."
  param sinks  = {SINKS}
  param recent = {RECENT}
  tensor streaming [layers, heads] from "duo.safetensors"
  budget where(streaming > 0.5, sinks + recent, prompt)
  score position
  keep first sinks
}}
"""


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": HEADS, "head_dim": DIMS}
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=32, **sizes)).eval()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("duo")
    save_file({"streaming": STREAMING}, folder / "duo.safetensors")
    (folder / "duo.kv").write_text(POLICY)
    (folder / "growing.kv").write_text(POLICY.replace("Duo", "Growing").replace("recent, prompt", "recent, everything"))
    (folder / "blocks.kv").write_text(POLICY.replace("Duo", "Blocks").replace("  score", "  storage blocks 4\n  score"))
    return folder / "duo.kv"


def tokens(count: int, rows: int = 2, seed: int = 1) -> Tensor:
    return torch.randint(0, 61, (rows, count), generator=torch.Generator().manual_seed(seed))


def read(model: LlamaForCausalLM, cache: KVCache, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """The logits of the last of some tokens."""
    with torch.inference_mode():
        return model(ids, **with_cache(cache), attention_mask=mask).logits[:, -1]


def expected(layer: int, head: int, seen: int, prompt: int) -> list[int]:
    """The places of what a head holds of so many tokens."""
    most = SINKS + RECENT if STREAMING[layer, head] > 0.5 else prompt
    return list(range(seen)) if seen <= most else [*range(SINKS), *range(seen - most + SINKS, seen)]


def check(cache: KVCache, seen: list[int], prompts: list[int]) -> None:
    for layer in range(LAYERS):
        for row, (count, prompt) in enumerate(zip(seen, prompts, strict=True)):
            for head in range(HEADS):
                held = cache.positions(layer)[row, head]
                assert sorted(held[held >= 0].tolist()) == expected(layer, head, count, prompt), (layer, row, head)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_head_holds_its_budget(model: LlamaForCausalLM, policy: Path, backend: str) -> None:
    """After a prompt in rows of two lengths, while decoding, and after a second prompt, of which the text is longer."""
    cache = kvdsl.load(policy)(model, backend=backend)
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1, :9] = 0
    read(model, cache, tokens(40), mask)
    check(cache, [40, 31], [40, 31])
    for step in range(4):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        read(model, cache, tokens(1, seed=step), mask)
        check(cache, [41 + step, 32 + step], [40, 31])
    mask = torch.nn.functional.pad(mask, (0, 5), value=1)
    read(model, cache, tokens(5), mask)
    held = cache.positions(0)[0, 0]
    assert sorted(held[held >= 0].tolist()) == [0, 1, *range(6, 49)]  # 49 tokens would fit, but some had left
    assert sorted(cache.positions(1)[1, 1].tolist()) == [-1, 0, 1, *range(34, 40)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_head_takes_what_its_own_budget_needs(model: LlamaForCausalLM, policy: Path, backend: str) -> None:
    """Keys and values lie flat, and stay where they are; what is beside them has as many slots as the largest head of the layer."""
    cache = kvdsl.load(policy)(model, backend=backend)
    read(model, cache, tokens(40))
    small, large = SINKS + RECENT + 1, 41
    assert [layer.state.slots for layer in cache.layers] == [large, small, large]
    assert [len(layer.state.layout.key_pool) for layer in cache.layers] == [
        2 * (large + small),
        4 * small,
        2 * (large + small),
    ]
    where = [layer.state.layout.key_pool.data_ptr() for layer in cache.layers]
    for step in range(20):
        read(model, cache, tokens(1, seed=step))
    assert [layer.state.layout.key_pool.data_ptr() for layer in cache.layers] == where


def test_a_head_may_keep_everything(model: LlamaForCausalLM, policy: Path) -> None:
    """Its layer grows; a layer whose heads all stream does not."""
    cache = kvdsl.load(policy.with_name("growing.kv"))(model, backend="torch")
    read(model, cache, tokens(40))
    for step in range(30):
        read(model, cache, tokens(1, seed=step))
    check(cache, [70, 70], [70, 70])
    small = SINKS + RECENT + 1
    assert [layer.state.room.limit for layer in cache.layers] == [None, small, None]
    assert all(layer.state.slots >= 70 for layer in (cache.layers[0], cache.layers[2]))
    assert len(cache.layers[0].state.layout.key_pool) == 2 * (cache.layers[0].state.slots + small)


def test_copies_pickles_and_beams(model: LlamaForCausalLM, policy: Path) -> None:
    cache = kvdsl.load(policy)(model, backend="torch")
    read(model, cache, tokens(40))
    loaded = pickle.loads(pickle.dumps(cache))
    loaded.attach(model)
    same = [copy.deepcopy(cache), loaded]
    cache.reorder_cache(torch.tensor([1, 0]))
    swapped = read(model, cache, tokens(1).flip(0))
    for one in same:
        assert torch.equal(read(model, one, tokens(1)).flip(0), swapped)
        check(one, [41, 41], [40, 40])


def test_what_is_protected_must_fit_into_every_head(model: LlamaForCausalLM, policy: Path) -> None:
    with pytest.raises(KvdslError, match=r"protects 9 tokens .* but its budget holds 8"):
        kvdsl.load(policy)(model, sinks=8, recent=0, backend="torch")


def test_a_process_reads_the_budgets_of_its_heads(policy: Path) -> None:
    """Under tensor parallelism a layer's second head may be the first of a process."""
    spec: Any = kvdsl.load(policy).spec
    held = []
    for offset in range(HEADS):
        state = slot_state(spec, dict.fromkeys(spec.params), layer=0, layers=LAYERS, head_offset=offset)
        state.processes = HEADS
        key = torch.randn(1, 1, 20, DIMS)
        backend = choose(spec, "torch", key.device, key.dtype)
        backend.prefill(state, AttentionCall(key, key, key, None, 1.0, None, None, None, None))
        assert state.numbers.shape == (1, 1, len(spec.numbers))
        held.append(int((state.position >= 0).sum()))
    assert held == [20, SINKS + RECENT]


class Run:
    """A layer whose first head is large, after a prompt of two rows, one of them padded."""

    def __init__(self, policy: Path, backend: str) -> None:
        spec = kvdsl.load(policy).spec
        self.state = slot_state(spec, dict.fromkeys(spec.params), layer=0, layers=LAYERS)
        self.backend = choose(spec, backend, torch.device("cpu"), torch.float32)
        self.out = [self.backend.prefill(self.state, self.call(40, 0, torch.arange(40) >= torch.tensor([[0], [13]])))]

    def call(self, tokens: int, seed: int, real: Tensor | None = None) -> AttentionCall:
        make = torch.Generator().manual_seed(seed)
        key, value = torch.randn(2, 2, HEADS, tokens, DIMS, generator=make)
        query = torch.randn(2, HEADS * 2, tokens, DIMS, generator=make)
        return AttentionCall(query, key, value, real, 0.25)

    def steps(self, *seeds: int) -> None:
        for seed in seeds:
            real = torch.tensor([[True], [seed % 5 != 0]])
            self.out.append(self.backend.decode(self.state, self.call(1, seed, real)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["duo", "growing", "blocks"])
def test_steps_that_are_taken_back(policy: Path, name: str, backend: str) -> None:
    """Also where the arrays grow meanwhile."""
    ours, never = (Run(policy.with_name(f"{name}.kv"), backend) for _ in range(2))
    for run in (ours, never):
        run.steps(1, 2)
    log = UndoLog(60)
    for seed in range(3, 53):
        log.note(ours.state)
        ours.steps(seed)
    log.take_back(ours.state, 50)
    del ours.out[3:]
    for run in (ours, never):
        run.steps(*range(60, 75))
    slots = never.state.slots
    live = never.state.position >= 0
    assert torch.equal(ours.state.position[..., :slots], never.state.position)
    assert torch.equal(ours.state.keys[:, :, :slots][live], never.state.keys[live])
    assert all(torch.equal(*outs) for outs in zip(ours.out, never.out, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_a_compiled_step_is_an_eager_one(model: LlamaForCausalLM, policy: Path, backend: str) -> None:
    torch._dynamo.reset()
    ours, theirs = (kvdsl.load(policy)(model, backend=backend) for _ in range(2))
    compiled = torch.compile(model.forward, fullgraph=True, dynamic=False, backend="eager")
    for cache in (ours, theirs):
        read(model, cache, tokens(40))
    for step in range(6):
        ids = tokens(1, seed=step)
        with torch.no_grad():
            found = compiled(ids, **with_cache(ours)).logits
            torch.testing.assert_close(found, model(ids, **with_cache(theirs)).logits)
    for layer in range(LAYERS):
        assert torch.equal(ours.positions(layer), theirs.positions(layer))
    torch._dynamo.reset()


def test_a_head_has_room_when_the_longest_has_shrunk(tmp_path: Path) -> None:
    """A budget that reads the data lets the longest row shrink, while the others, whose room grew with it, go on."""
    save_file({"flag": torch.zeros(HEADS)}, tmp_path / "measured.safetensors")
    text = """kv 1

policy Measured {
  "Everything of a short text, four tokens of a longer one."
  tensor flag [heads] from "measured.safetensors"
  budget where(seen > 100, 4, seen) at most where(flag > 0.5, 8, everything)
  score position
}
"""
    (tmp_path / "measured.kv").write_text(text)
    spec = kvdsl.load(tmp_path / "measured.kv").spec
    states = [make(spec, {}, layer=0, layers=1) for make in (slot_state, SlotState)]
    assert isinstance(states[0].layout, Flat)
    backend, make = choose(spec, "torch", torch.device("cpu"), torch.float32), torch.Generator().manual_seed(0)
    for step in range(100):
        tokens = 60 if step == 0 else 1
        key, value = torch.randn(2, 2, HEADS, tokens, DIMS, generator=make)
        real = torch.arange(tokens) >= torch.tensor([[0], [50]]) if step == 0 else None
        call = AttentionCall(torch.randn(2, HEADS * 2, tokens, DIMS, generator=make), key, value, real, 0.25)
        serve = backend.prefill if step == 0 else backend.decode
        flat, padded = (serve(state, call) for state in states)
        assert torch.equal(flat, padded), step
