"""A page: its size, and that nothing in it or beside it is of a request that had it before. This needs no vLLM."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvdsl.integrations.vllm.caches import InBlocks, Vectors
from kvdsl.integrations.vllm.page import page
from kvdsl.integrations.vllm.settings import Settings
from kvdsl.integrations.vllm.step import Decoded, Prompt
from kvdsl.memory import KV_DTYPES
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.state.slots import SlotState
from kvdsl.runtime.state.tensors import EMPTY

PACKED = (*KV_DTYPES[1:], "int8/int4")
HEADS, DIM = 2, 16
LONGEST = 4096
ROPE = Rope((10_000.0 ** -(torch.arange(0, DIM, 2) / DIM)).double(), "half")


def call(tokens: int, generator: torch.Generator) -> AttentionCall:
    query, key, value = (torch.randn(1, HEADS, tokens, DIM, generator=generator) for _ in range(3))
    return AttentionCall(query, key, value, None, DIM**-0.5, rope=ROPE)


def read(settings: Settings, seed: int) -> tuple[SlotState, torch.Generator]:
    """A prompt."""
    generator = torch.Generator().manual_seed(seed)
    state = settings.state(0, 1)
    state.reserve()
    choose(settings.spec, "auto", torch.device("cpu"), torch.float32).prefill(state, call(40, generator))
    return state, generator


def answers(settings: Settings, state: SlotState, generator: torch.Generator) -> list[Tensor]:
    backend = choose(settings.spec, "auto", torch.device("cpu"), torch.float32)
    return [backend.decode(state, call(1, generator)).clone() for _ in range(6)]


@pytest.mark.parametrize(("policy", "numbers"), [("h2o", 1), ("tova", 1), ("streaming_llm", 1), ("roco", 2), ("window", 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("budget", "heads", "dim"), [(256, 3, 64), (2048, 8, 128)])
def test_a_page_is_as_large_as_the_page_of_docs_says(
    policy: str, numbers: int, dtype: torch.dtype, budget: int, heads: int, dim: int
) -> None:
    found = page(Settings(policy, (("budget", budget),)), heads, dim, dtype, layers=1, longest=LONGEST)
    formula = heads * (budget + 1) * (2 * dim * dtype.itemsize + 4 + 4 * numbers)
    assert formula <= found.bytes < formula + 1024


@pytest.mark.parametrize("kv_dtype", PACKED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_page_in_few_bits_is_as_large_as_the_page_of_docs_says(kv_dtype: str, dtype: torch.dtype) -> None:
    """Whatever the model's dtype is."""
    settings = Settings("h2o", (("budget", 256),), kv_dtype=kv_dtype)
    found = page(settings, 3, 64, dtype, layers=1, longest=LONGEST)
    size = {"int8": 64 + 2, "fp8": 64 + 2, "int4": 32 + 4}
    key, _, value = kv_dtype.partition("/")
    formula = 3 * 257 * (size[key] + size[value or key] + 8)
    assert formula <= found.bytes < formula + 1024


@pytest.mark.parametrize(
    ("policy", "given", "of_a_slot"),
    [("full", {}, 0), ("snapkv", {"budget": 256}, 0), ("quest", {}, 2 * DIM * 4 / 16), ("sparcas", {"dims": 5}, 5 * 4)],
)
def test_a_page_for_the_longest_text(policy: str, given: dict[str, float], of_a_slot: float) -> None:
    """What it has more of a slot than key, value and position: what it searches by."""
    found = page(Settings(policy, tuple(given.items())), HEADS, DIM, torch.float32, layers=1, longest=LONGEST)
    formula = HEADS * LONGEST * (2 * DIM * 4 + 4 + of_a_slot)
    assert formula <= found.bytes < formula + 1024


def test_no_page_has_more_slots_than_the_longest_text() -> None:
    budget = (("budget", 8192.0),)
    assert page(Settings("h2o", budget), HEADS, DIM, torch.float32, layers=1, longest=LONGEST).slots == LONGEST


@pytest.mark.parametrize(
    "settings",
    [
        Settings("equip_h2o", (("budget", 12),), rope="cached"),
        *(Settings("roco", (("budget", 12),), kv_dtype=kv_dtype) for kv_dtype in PACKED),
        Settings("sparcas", (("dims", 4), ("tokens", 16)), kv_dtype="int8"),
        *(Settings(policy, (("budget", 12),)) for policy in ("streaming_llm", "h2o")),
        Settings("snapkv", (("budget", 36),)), Settings("quest", (("tokens", 16),)), Settings("sparcas", (("dims", 4), ("tokens", 16))),
        Settings("keydiff_blocks", (("budget", 12), ("block", 32))),  # of 40 tokens 12 and the 8 of an unfinished block are left
    ],
    ids=lambda settings: f"{settings.policy} {settings.kv_dtype or ''}",
)  # fmt: skip
def test_a_page_is_of_the_request_that_has_it(settings: Settings) -> None:
    found = page(settings, HEADS, DIM, torch.float32, layers=1, longest=LONGEST)
    blocks, state = torch.zeros(3, found.bytes, dtype=torch.uint8), settings.state(0, 1)
    found.adopt(state, found.views(blocks[1]))
    for seed in (1, 2, 3):
        alone, generator = read(settings, seed)
        found.fill(blocks, torch.tensor([1]), [state], alone)
        tokens = generator.get_state()
        expected = answers(settings, alone, generator)
        generator.set_state(tokens)
        got = answers(settings, state, generator)
        assert all(torch.equal(ours, wanted) for ours, wanted in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("policy", "budget", "kv_dtype"),
    [
        ("h2o", 12, "model"), ("h2o", 400, "model"), ("streaming_llm", 12, "model"), ("equip_h2o", 12, "model"), ("snapkv", 36, "model"),
        ("h2o", 12, "int8"), ("streaming_llm", 12, "int4"),
    ],
)  # fmt: skip
def test_a_prompt_is_laid_into_its_page(policy: str, budget: int, kv_dtype: str) -> None:
    """Where nothing else lies there than what the prompt's end writes anew; of what was there before nothing is seen."""
    rope = "cached" if policy == "equip_h2o" else None
    settings = Settings(policy, (("budget", budget),), rope=rope, kv_dtype=kv_dtype)
    found = page(settings, HEADS, DIM, torch.float32, layers=1, longest=LONGEST)
    blocks, state = torch.full((3, found.bytes), 255, dtype=torch.uint8), settings.state(0, 1)  # numbers that are none
    found.adopt(state, found.views(blocks[1]))
    alone, generator = read(settings, 5)
    lent = settings.state(0, 1)
    found.lend(lent, blocks[1])
    backend = choose(settings.spec, "auto", torch.device("cpu"), torch.float32)
    backend.prefill(lent, call(40, torch.Generator().manual_seed(5)))
    assert (lent.layout.key_pool.data_ptr() == state.layout.key_pool.data_ptr()) == (policy != "snapkv")
    found.fill(blocks, torch.tensor([1]), [state], lent)
    tokens = generator.get_state()
    expected = answers(settings, alone, generator)
    generator.set_state(tokens)
    got = answers(settings, state, generator)
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(got, expected, strict=True))


@pytest.mark.parametrize("kv_dtype", PACKED)
def test_a_page_in_few_bits_forgets_wrong_guesses(kv_dtype: str) -> None:
    """Two guesses behind a token are taken back, and what comes instead is as if they had never been."""
    settings = Settings("roco", (("budget", 12),), kv_dtype=kv_dtype)
    found = page(settings, HEADS, DIM, torch.float32, layers=1, longest=LONGEST)
    backend = choose(settings.spec, "auto", torch.device("cpu"), torch.float32)
    alone, generator = read(settings, 7)

    def of_tokens(query: Tensor, key: Tensor, value: Tensor) -> AttentionCall:
        return AttentionCall(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), None, DIM**-0.5, rope=ROPE)

    caches = InBlocks(backend, found, lambda: settings.state(0, 1), of_tokens, None, LONGEST, guesses=3)
    blocks, one = torch.zeros(3, found.bytes, dtype=torch.uint8), Decoded.of([(1, 0, None)])
    caches.meet(Prompt(0, 40, 1, begins=True, ends=True), blocks, drawn(generator))
    caches.put(torch.tensor([1]), blocks, alone)

    def decode(place: int, vectors: Vectors) -> Tensor:
        out = torch.zeros(1, HEADS, DIM)
        caches.decode(one, place, vectors, out)
        return out

    kept = [drawn(generator) for _ in range(4)]
    got = [decode(0, kept[0])]
    before = blocks.clone()
    for place in (1, 2):
        decode(place, drawn(generator))
    assert not torch.equal(before, blocks)
    caches.take_back(1, 2)
    got += [decode(0, vectors) for vectors in kept[1:]]
    expected = [backend.decode(alone, of_tokens(*(x[None] for x in vectors)))[0] for vectors in kept]
    assert all(torch.equal(ours, wanted) for ours, wanted in zip(got, expected, strict=True))


def drawn(generator: torch.Generator) -> Vectors:
    """A token's vectors."""
    query, key, value = (torch.randn(1, HEADS, DIM, generator=generator) for _ in range(3))
    return query, key, value


@pytest.mark.parametrize("policy", ["sparcas", "quest"])
def test_what_steps_of_an_accelerator_keep_has_its_place_in_a_page(policy: str) -> None:
    """Else it would be made beside the pages, for all of them, in memory that vLLM has given to them."""
    pytest.importorskip("triton", reason="steps of an accelerator are Triton's")
    from kvdsl.runtime.gpu.rows import Rows

    settings = Settings(policy, ())
    found = page(settings, HEADS, DIM, torch.float32, layers=1, longest=LONGEST, aligned=True)
    blocks, state = torch.zeros(3, found.bytes, dtype=torch.uint8), settings.state(0, 1)
    found.adopt(state, found.spread(blocks, state))
    kept = {name: tensor for name, tensor in state.tensors().items() if name in EMPTY and tensor.numel()}
    assert kept
    Rows(NoBackend(), state)  # type: ignore[arg-type]
    assert all(getattr(state, name) is tensor for name, tensor in kept.items())


class NoBackend:
    """Serves nothing."""
