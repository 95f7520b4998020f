"""Texts without an end, and caches without number: does anything grow, drift or stay behind?"""

from __future__ import annotations

import copy
import gc
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kvdsl
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.hf.versions import with_cache
from kvdsl.runtime.state.layers import slot_state
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch.backend import TorchBackend, one_by_one
from scripts.torture.registry import Counts, Progress, attack

BUDGET, STRETCH = 64, 1_000
ALONE, TOGETHER = 0.1, 50
"""The share of a stretch that the model is given token by token, as `generate` does, and the tokens of a forward of the rest."""

GROWTH = 8 << 20
"""Bytes of memory that a process may take more of than it took after the first stretch: allocators are not tidy."""

DRIFT = 1e-3
"""How far a column may lie from its recomputation in float64, relatively, after any number of queries."""

OFF = 1e-3
"""How far the logits of two backends may, which see the same cache."""


def resident() -> int:
    """Bytes of memory that the process holds."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def one_thread() -> Iterator[None]:
    """So little is computed for a token that threads would mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Shadow:
    """RoCo's two columns of one layer in float64, beside the backend's, from the same keys, queries and evictions."""

    def __init__(self, backend: Any, state: SlotState) -> None:
        self.backend, self.state = backend, state
        columns = state.column_index.single(state.columns)
        self.sums, self.squares = (columns[name][0].double().numpy() for name in ("sum_attn", "sum_attn_squared"))

    def decode(self, state: SlotState, call: AttentionCall) -> Tensor:
        """The backend's steps, token by token, and each query once more in float64."""
        return torch.cat([self._decode_one(state, one) for one in one_by_one(call)], 1)

    def _decode_one(self, state: SlotState, call: AttentionCall) -> Tensor:
        """The query sees what the backend finds, and its own token."""
        keys, held = state.keys[0].double().numpy().copy(), (state.position[0] >= 0).numpy().copy()
        free = (~held).argmax(1)  # where the token goes
        heads = np.arange(len(free))
        keys[heads, free], held[heads, free] = call.key[0, :, 0].double().numpy(), True
        query = call.query[0, :, 0].double().numpy().reshape(len(free), -1, keys.shape[-1])
        logit = np.where(held[:, None], query @ keys.swapaxes(1, 2) * call.scaling, -np.inf)
        weight = np.exp(logit - logit.max(-1, keepdims=True))
        attn = (weight / weight.sum(-1, keepdims=True)).mean(1)
        for column in (self.sums, self.squares):
            column[heads, free] = 0
        self.sums += attn
        self.squares += attn**2
        return self.backend.decode(state, call)  # type: ignore[no-any-return]

    def drift(self) -> float:
        """How far the backend's columns lie from these, relatively, at most."""
        columns, held = self.state.column_index.single(self.state.columns), (self.state.position[0] >= 0).numpy()
        pairs = ((columns["sum_attn"], self.sums), (columns["sum_attn_squared"], self.squares))
        far = [np.abs(column[0].double().numpy() - exact)[held] / exact[held] for column, exact in pairs]
        return float(np.max(far))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)


def _words(tokenizer: Any) -> Iterator[Tensor]:
    """The book that comes with kvdsl, token by token, again and again."""
    from kvdsl_lab.assets import book_text

    ids = tokenizer(book_text(), return_tensors="pt", verbose=False).input_ids
    return cycle(ids[0].view(-1, 1, 1))


class Talk:
    """A model that goes through a text without an end, with a cache of a few tokens."""

    def __init__(self, policy: str) -> None:
        from kvdsl_lab.assets import load_reference_model

        self.model, tokenizer = load_reference_model()
        self.policy, self.text, self.seen = policy, _words(tokenizer), 2 * BUDGET
        self.cache = kvdsl.load(policy)(self.model, budget=BUDGET, backend="cpu")
        self.say(torch.cat(list(islice(self.text, self.seen)), 1))
        first = self.cache.layers[0]
        self.shadow = Shadow(first.backend, first.state) if policy == "roco" else None
        if self.shadow is not None:
            first.backend = self.shadow

    def say(self, ids: Tensor, cache: Any = None) -> Tensor:
        """What the model says behind the last of these tokens."""
        with torch.no_grad():
            return self.model(ids, **with_cache(self.cache if cache is None else cache)).logits[0, -1]  # type: ignore[no-any-return]

    def go_on(self) -> None:
        """A stretch of the text, most of it several tokens a forward; its last token is said on the torch backend as well.

        Raises:
            AssertionError: if anything is not as it should be.
        """
        self.seen += STRETCH
        largest = torch.zeros(())
        alone = max(1, int(ALONE * STRETCH))
        rest = islice(self.text, STRETCH - alone)
        with self.cache.one_by_one():
            while some := list(islice(rest, TOGETHER)):
                largest = torch.maximum(largest, self.say(torch.cat(some, 1)).abs().max())
        for ids in islice(self.text, alone - 1):
            largest = torch.maximum(largest, self.say(ids).abs().max())
        assert bool(largest.isfinite()), "logits are no numbers"
        last, other = next(self.text), copy.deepcopy(self.cache)
        for layer in other.layers:
            layer.backend = TorchBackend()
        expected, got = self.say(last, other), self.say(last)
        off = float((got - expected).abs().max())
        assert off < OFF, f"logits of two backends differ by {off:.2g}"
        self._check_kept()

    def _check_kept(self) -> None:
        for layer in self.cache.layers:
            for places in layer.state.position[0]:
                kept = sorted(places[places >= 0].tolist())
                assert len(kept) == BUDGET and kept[-1] == self.seen - 1, f"holds {len(kept)} tokens, the newest {kept[-1]}"
                if self.policy == "streaming_llm":
                    assert kept == [*range(4), *range(self.seen - BUDGET + 4, self.seen)], f"holds {kept}"


@one_thread()
def _talk(policy: str, count: int, progress: Progress) -> Counts:
    """`count` tokens through the model; a stretch of them is a trial."""
    counts, talk, first, begun, drift = Counts(), Talk(policy), 0, time.perf_counter(), 0.0
    for _ in range(max(1, count // STRETCH)):
        with counts.trial(f"{policy}, tokens from {talk.seen:,} on"):
            talk.go_on()
            gc.collect()
            first = first or resident()
            assert resident() < first + GROWTH, f"{(resident() - first) >> 20} MiB more than after the first stretch"
            if talk.shadow is not None:
                drift = max(drift, talk.shadow.drift())
                assert drift < DRIFT, f"columns lie {drift:.2g} from float64"
        for _ in range(min(STRETCH, count)):
            progress()
    took = (time.perf_counter() - begun) / (talk.seen - 2 * BUDGET) * 1e3
    counts.note(f"{talk.seen:,} tokens seen, {ALONE:.0%} one by one, the others {TOGETHER} a forward; {took:.1f} ms each")
    counts.note(f"{(resident() - first) / 2**20:+.1f} MiB since the first {STRETCH:,}")
    if talk.shadow is not None:
        counts.note(f"columns of the first layer lie within {drift:.1e} of float64, relatively")
    return counts


@attack(
    "long run, roco", f"tokens through RoCo at a budget of {BUDGET}; {STRETCH:,} are a trial", count=200_000, quick=STRETCH
)
def long_roco(seed: int, count: int, progress: Progress) -> Counts:
    return _talk("roco", count, progress)


@attack(
    "long run, streaming_llm", f"tokens through StreamingLLM at a budget of {BUDGET}; {STRETCH:,} are a trial",
    count=200_000, quick=STRETCH,
)  # fmt: skip
def long_streaming(seed: int, count: int, progress: Progress) -> Counts:
    return _talk("streaming_llm", count, progress)


@attack(
    "long run, kernels alone",
    f"tokens through RoCo's C++ without a model; {STRETCH:,} are a trial",
    count=200_000,
    quick=2 * STRETCH,
)
@one_thread()
def long_kernels(seed: int, count: int, progress: Progress) -> Counts:
    """Keys of few words with some noise, so that some tokens stay for long and get much."""
    spec, make = kvdsl.load("roco").spec, torch.Generator().manual_seed(seed)
    state, backend = slot_state(spec, {"budget": float(BUDGET)}), choose(spec, "cpu", torch.device("cpu"), torch.float32)

    def call(tokens: int) -> AttentionCall:
        query, key, value = torch.randn(3, 1, 2, tokens, 16, generator=make)
        return AttentionCall(query, 2 * key, value, None, 0.25)

    backend.prefill(state, call(2 * BUDGET))
    state.decoding = True
    shadow, counts, first, drift = Shadow(backend, state), Counts(), 0, 0.0
    for number in range(max(1, count // STRETCH)):
        with counts.trial(f"tokens from {number * STRETCH:,} on"):
            for _ in range(STRETCH):
                shadow.decode(state, call(1))
            drift, first = max(drift, shadow.drift()), first or resident()
            assert drift < DRIFT, f"columns lie {drift:.2g} from float64"
            assert resident() < first + GROWTH, f"{(resident() - first) >> 20} MiB more than after the first stretch"
        for _ in range(min(STRETCH, count)):
            progress()
    oldest = int(state.position[state.position >= 0].min())
    counts.note(f"columns lie within {drift:.1e} of float64, relatively; the oldest token stands at {oldest:,}")
    counts.note(f"{(resident() - first) / 2**20:+.1f} MiB since the first {STRETCH:,}")
    return counts


@attack("caches made and dropped", "each is given a prompt and three tokens; nothing may stay", count=1_000, quick=30)
def dropped_caches(seed: int, count: int, progress: Progress) -> Counts:
    from kvdsl_lab.assets import load_reference_model

    model, tokenizer = load_reference_model()
    text, policies = _words(tokenizer), ("roco", "streaming_llm", "h2o", "adakv")
    counts, first, threads = Counts(), 0, 0
    for number in range(count):
        policy, backend = policies[number % len(policies)], ("cpu", "torch")[number // len(policies) % 2]
        with counts.trial(f"cache {number}, {policy} on {backend}"), torch.no_grad():
            cache = kvdsl.load(policy)(model, budget=BUDGET, backend=backend)
            for tokens in (2 * BUDGET, 1, 1, 1):
                model(torch.cat(list(islice(text, tokens)), 1), **with_cache(cache))
            gone = [weakref.ref(cache), *(weakref.ref(layer.state) for layer in cache.layers)]
            del cache
            gc.collect()
            assert not any(one() is not None for one in gone), "it is still there"
            if number == min(20, count // 2):
                first, threads = resident(), _threads()
            assert not first or resident() < first + GROWTH, f"{(resident() - first) >> 20} MiB more than after the first"
            assert not threads or _threads() <= threads, f"{_threads() - threads} threads more than after the first"
        progress()
    counts.note(
        f"{(resident() - first) / 2**20:+.1f} MiB and {_threads() - threads:+d} threads since cache {min(20, count // 2)}"
    )
    return counts


def _threads() -> int:
    """Of the process, those of libraries included."""
    return len(os.listdir("/proc/self/task"))
