"""What one decode step launches and moves, counted from what the kernels do; and which tensors the backend takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.runtime.interpreter as interpreter

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.gpu import backend as triton_backend
from kvdsl.runtime.gpu import launch as launching
from kvdsl.runtime.gpu import prompt
from kvdsl.runtime.gpu.sizes import MAX_SPLITS, Sizes
from kvdsl.runtime.state.slots import SlotState
from kvdsl_lab.bench.decode import Shape, new_tokens, rotation, steady_state
from tests.texts import spec_of
from tests.triton.interpreter import let_programs_wait

CPU = torch.device("cpu")
SHAPE = Shape(batch=1, kv_heads=2, group=4, head_dim=128, live=1500, dtype="fp16")


class Traffic:
    """Bytes that kernels load and store, by the name of the tensor; launches in order."""

    def __init__(self) -> None:
        self.loads: Counter[str] = Counter()
        self.stores: Counter[str] = Counter()
        self.launches: list[tuple[int, ...]] = []
        self._tensors: dict[str, tuple[int, int]] = {}

    def clear(self) -> None:
        """Count anew."""
        self.loads.clear(), self.stores.clear(), self.launches.clear()

    def note(self, grid: tuple[int, ...], given: dict[str, Any]) -> None:
        self.launches.append(grid)
        tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor) and x.numel()}
        self._tensors = {name: (x.data_ptr(), x.data_ptr() + x.nbytes) for name, x in tensors.items()}

    def name_of(self, address: int) -> str:
        return next(name for name, (begin, end) in self._tensors.items() if begin <= address < end)

    def add(self, counted: Counter[str], pointers: np.ndarray, mask: np.ndarray, size: int) -> None:
        moved = np.broadcast_to(pointers, mask.shape)[mask.astype(bool)]
        if len(moved):
            counted[self.name_of(int(moved.flat[0]))] += moved.size * size


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    seen, real, launch = Traffic(), interpreter._interpreter, triton_backend.launch

    def load(pointers: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        seen.add(seen.loads, pointers, mask, dtype.itemsize)
        return real.load(pointers, mask, other, dtype)

    def store(pointers: np.ndarray, value: np.ndarray, mask: np.ndarray) -> Any:
        seen.add(seen.stores, pointers, mask, value.dtype.itemsize)
        return real.store(pointers, value, mask)

    def noting(kernel: Any, grid: tuple[int, ...], given: dict[str, Any], options: dict[str, int]) -> None:
        seen.note(grid, given)
        launch(kernel, grid, given, options)

    monkeypatch.setattr(interpreter, "_interpreter", SimpleNamespace(load=load, store=store, atomic_rmw=real.atomic_rmw))
    monkeypatch.setattr(triton_backend, "launch", noting)
    yield seen


@pytest.mark.parametrize(
    ("policy", "share", "launches"),
    [
        ("full", 0.07, 2), ("h2o", 0.145, 2), ("tova", 0.145, 2), ("roco", 0.185, 2), ("streaming_llm", 0.1, 2),
        ("h2o", 0.08, 1), ("roco", 0.12, 1),
    ],
)  # fmt: skip
def test_keys_and_values_are_read_once(
    policy: str, share: float, launches: int, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch or two; of keys and values every byte once, and besides them little: a slot has 512 bytes of both. Scores are stored only
    where `keep top` asks for them. Where positions are compact, the four first keys turn, and they alone are read twice. One launch stores
    no logits.
    """
    if launches == 1:
        let_programs_wait(monkeypatch)
        monkeypatch.setattr("kvdsl.runtime.gpu.sizes.AT_ONCE_PER_PROCESSOR", 1)
        monkeypatch.setattr(triton_backend, "_processors_at_once", lambda _: 99)
    spec = kvdsl.load(policy).spec
    state = steady_state(spec, SHAPE)
    server = choose(spec, "triton", CPU, torch.float16)
    rope = rotation(SHAPE.head_dim) if spec.compact else None
    tokens = new_tokens(SHAPE)
    if spec.compact:
        server.decode(state, AttentionCall(*tokens[0], None, 0.125, rope=rope))  # now something was evicted
        traffic.clear()
    cached = int((state.position >= 0).sum())
    server.decode(state, AttentionCall(*tokens[1], None, 0.125, rope=rope))
    splits = state.workspace.splits  # type: ignore[attr-defined]
    pieces = state.workspace.pieces  # type: ignore[attr-defined]
    assert traffic.launches == [(splits, 2, 1), (pieces + 1, 2, 1)][:launches]
    assert bool(traffic.stores["logits"]) == (launches == 2 and spec.reads_attention)
    row = SHAPE.head_dim * 2
    free = SHAPE.batch * SHAPE.kv_heads  # which a head may have one of among those that are taken, and which is read, too
    turned = 4 * free if spec.compact else 0
    read = traffic.loads["key_pool"]
    assert (cached + turned) * row <= read == traffic.loads["value_pool"] <= (cached + turned + free) * row
    assert traffic.stores["key_pool"] == traffic.stores["value_pool"] == SHAPE.batch * SHAPE.kv_heads * row  # the new token
    whole = 2 * cached * row
    rest = sum(traffic.loads.values()) + sum(traffic.stores.values()) - whole
    assert rest < share * whole
    assert not traffic.stores["kept"] and bool(traffic.stores["work"]) == (policy == "roco")
    assert spec.compact == (traffic.loads["angles"] > 0)


def test_a_selection_reads_little(traffic: Traffic) -> None:
    """Four launches; of keys the chosen rows (gathered once a sketch over its dims), of values the chosen rows.

    Of SparCas with the newest token always among them, so that it is known how many rows come from slots.
    """
    body = "sketch top dims dims by abs(q) every 64 queries\n  select top tokens by dot(q, k over sketch)\n  keep last 1"
    text = f'kv 1\npolicy Newest {{\n  "A test."\n  param tokens = 2048\n  param dims = 16\n  {body}\n}}\n'
    spec, chosen, dims = kvdsl.compile(text).spec, 64, 4
    state = steady_state(spec, SHAPE, tokens=chosen, dims=dims)
    server = choose(spec, "triton", CPU, torch.float16)
    tokens = new_tokens(SHAPE)
    server.decode(state, AttentionCall(*tokens[0], None, 0.125))
    cached = int((state.position >= 0).sum())
    first, pairs, item = traffic.loads["key_pool"], SHAPE.batch * SHAPE.kv_heads, 2
    rows = pairs * (chosen - 1) * SHAPE.head_dim * item  # the new token is one of them, and in no slot yet
    gathered = (cached - pairs) * dims * item
    assert first == rows + gathered and traffic.loads["value_pool"] == rows
    traffic.clear()
    server.decode(state, AttentionCall(*tokens[1], None, 0.125))
    splits = state.workspace.splits  # type: ignore[attr-defined]
    pieces = state.workspace.pieces  # type: ignore[attr-defined]
    choosers = state.workspace.choosers  # type: ignore[attr-defined]
    assert traffic.launches == [(splits, 2, 1), (choosers, 2, 1), (splits, 2, 1), (pieces + 1, 2, 1)]
    assert traffic.loads["key_pool"] == traffic.loads["value_pool"] == rows
    assert traffic.loads["sketch_keys"] == cached * dims * item


def test_nothing_is_allocated_after_the_first_step() -> None:
    spec = kvdsl.load("roco").spec
    state = steady_state(spec, SHAPE)
    server = choose(spec, "triton", CPU, torch.float16)
    made = []
    for query, key, value in new_tokens(SHAPE, count=2):
        server.decode(state, AttentionCall(query, key, value, None, 0.125))
        made.append(state.workspace)
    assert made[0] is made[1] is not None


@pytest.mark.parametrize("slots", [1, 16, 17, 513, 4096, 100_001])
@pytest.mark.parametrize(
    "sizes", [Sizes(4, 128, 128, 2), Sizes(4, 128, 128, 2, hopper=True), Sizes(1, 64, 64, 4), Sizes(8, 256, 80, 4)]
)
def test_splits_cover_the_slots(sizes: Sizes, slots: int) -> None:
    splits, per_split = sizes.splits(slots)
    assert per_split % sizes.attend_block == 0
    assert (splits - 1) * per_split < slots <= splits * per_split
    assert 1 <= splits <= MAX_SPLITS


def test_launches_go_to_the_tensors_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current device and its stream, which is another one where a model lies on several."""
    current: list[torch.device] = []
    launched: list[torch.device] = []
    real, spec = triton_backend.launch, kvdsl.load("h2o").spec

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def launch(*arguments: Any) -> None:
        launched.append(current[-1])
        real(*arguments)

    monkeypatch.setattr(triton_backend, "on", on)
    monkeypatch.setattr(triton_backend, "launch", launch)
    monkeypatch.setattr(prompt, "launch", launch)
    server, state = choose(spec, "triton", CPU, torch.float16), SlotState(spec, {"budget": 8})
    for tokens, serve in ((12, server.prefill), (2, server.decode)):
        query, key, value = (torch.randn(1, heads, tokens, 16).half() for heads in (4, 2, 2))
        serve(state, AttentionCall(query, key, value, None, 0.25))
    assert launched == [CPU] * 6  # what the prompt's queries give, and who leaves; attend and settle, twice


def test_the_current_device_is_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        chosen.append(device)
        yield

    monkeypatch.setattr(torch.cuda, "device", current)
    for device in (torch.device("cuda", 1), CPU):
        with launching.on(device):
            pass
    assert chosen == [torch.device("cuda", 1)]


def test_who_is_served() -> None:
    roco = kvdsl.load("roco").spec
    assert choose(roco, "triton", CPU, torch.bfloat16).name == "triton"
    assert choose(roco, "auto", CPU, torch.bfloat16).name == "cpu"
    with pytest.raises(KvdslError, match="float32, bfloat16 and float16"):
        choose(roco, "triton", CPU, torch.float64)
    layers = spec_of("param budget = 8\nscore position\nvictims shared by layers")
    with pytest.raises(KvdslError, match="no Triton kernels"):
        choose(layers, "triton", CPU, torch.float32)
    state = steady_state(roco, SHAPE)
    query, key, value = (x.float() for x in new_tokens(SHAPE)[0])
    with pytest.raises(KvdslError, match="another dtype"):
        choose(roco, "triton", CPU, torch.float32).decode(state, AttentionCall(query, key, value, None, 0.125))
