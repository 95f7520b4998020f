"""Generated C++ does what generated torch code does, statement by statement; and many policies fit into one library."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from kvdsl.build.cxx import kernel_library
from kvdsl.compiler import compile_file
from kvdsl.runtime.backends import choose
from kvdsl.runtime.call import AttentionCall
from kvdsl.runtime.spec import PolicySpec
from kvdsl.runtime.state.order import FREE
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.torch import rings
from tests.texts import spec_of

STEPS, DIM, HEADS, GROUP = 20, 8, 2, 2

STATEMENTS = {
    "ema": "score ema(attn, 0.75)",
    "ema with a param": "param d = 0.5\nscore ema(attn * age, 1 - d / 2) + ema(attn, d)",
    "sum of a ring": "score sum(attn over last 4 queries)",
    "mean of a ring": "score mean(attn over last 4 queries)",
    "deviation of a ring": "score std(logit over last 5 queries) - var(attn over last 5 queries)",
    "extremes of a ring": "score max(attn over last 3 queries) + min(logit over last 7 queries)",
    "two rings and columns": "score sum(attn over last 4 queries) * norm1(v) + sum(attn)\nkeep top 3 by mean(logit over last 2 queries)",
    "a ring by the prompt": "score sum(attn over last prompt / 2 queries) - sum(logit over last 3 queries)",
    "a ring of one": "score sum(attn over last prompt / 100 queries)",
    "a ring of queries": "score sum(dot(q, k) over last 3 queries)",
    "a ring over slots": "score sum(attn over last 4 queries) - age * mean(sum(attn over last 4 queries) over slots)",
    "a ring as a condition": "score sum(attn)\nkeep where max(attn over last 2 queries) > 0.2",
    "layers that evict": "score sum(attn)\nlayers ..1",
    "layers that do not": "score sum(attn over last 4 queries)\nlayers 2..",
    "when prefill": "when prefill\nscore max_pool(sum(attn over last 4 queries), 3)",
    "when decode": "when decode\nscore sum(attn)\nkeep last 3",
    "blocks": "score sum(attn over last 4 queries)\nprefill blocks of 5",
    "staged": "score sum(attn over last 4 queries)\ntrigger overflow >= 4\nslack 3\nmax_drop 2",
    "budgets of layers": "score sum(attn)\nkeep last budget / 2",
}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("name", STATEMENTS)
def test_cpp_does_what_torch_does(name: str, window: int | None) -> None:
    spec = spec_of(f"param budget = 6 in 1..100\n{STATEMENTS[name]}")
    ours, theirs = (Run(spec, backend, window) for backend in ("cpu", "torch"))
    for tokens in (12, *[1] * STEPS, 3):
        assert torch.allclose(ours.forward(tokens), theirs.forward(tokens), atol=1e-5), f"outputs at {ours.state.seen}"
        assert torch.equal(ours.state.position, theirs.state.position), f"kept sets at {ours.state.seen}"
        held = ours.holds()
        assert torch.allclose(ours.state.columns[held], theirs.state.columns[held], atol=1e-5), (
            f"columns at {ours.state.seen}"
        )


class Run:
    """One layer under one backend; every run gets the same calls. The second row's prompt is shorter by four."""

    def __init__(self, spec: PolicySpec, backend: str, window: int | None) -> None:
        self.state = SlotState(spec, {}, layer=1, layers=4)
        self.backend = choose(spec, backend, torch.device("cpu"), torch.float32)
        self.window = window
        self.random = torch.Generator().manual_seed(0)

    def holds(self) -> torch.Tensor:
        """Where the columns say something: not in free slots, and not in a ring's places that no query in the window wrote."""
        found = (self.state.position != FREE).expand_as(self.state.columns).clone()
        sizes, newest = self.state.settings.per_head(self.state.numbers), (self.state.seen - 1).view(-1, 1, 1)
        for name, places in self.state.rings(found).items():
            places &= rings.valid(len(places), sizes[rings.size_name(name)], newest, self.state.position, self.window)
        return found

    def forward(self, tokens: int) -> torch.Tensor:
        query = torch.randn(2, HEADS * GROUP, tokens, DIM, generator=self.random) * 2
        key, value = torch.randn(2, 2, HEADS, tokens, DIM, generator=self.random)
        if self.state.allocated:
            return self.backend.decode(self.state, AttentionCall(query, key, value, None, 0.5, window=self.window))
        real = torch.arange(tokens) >= torch.tensor([[0], [4]])
        return self.backend.prefill(self.state, AttentionCall(query, key, value, real, 0.5, window=self.window))


def test_many_policies_in_one_library(tmp_path: Path) -> None:
    """Each under a prefix of its own; policies of one name lie in namespaces of their own as well."""
    units = {stem: compile_file(stem, {}).files["kernels_cpu.cpp"] for stem in ("roco", "h2o", "scissorhands_window")}
    units["again"] = f"namespace again {{\n{units['roco']}}}\n"
    file = tmp_path / "many.cpp"
    defined = (f"#define KVDSL_ENTRY(name) {prefix}_##name\n{unit}#undef KVDSL_ENTRY\n" for prefix, unit in units.items())
    file.write_text("\n".join(defined), encoding="utf-8")
    library = ctypes.CDLL(str(kernel_library(file, "many")))
    assert all(hasattr(library, f"{prefix}_decode_{dtype}") for prefix in units for dtype in ("f32", "bf16", "f16"))
    assert not hasattr(library, "kvdsl_abi")
