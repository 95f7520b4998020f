"""Answers in blocks behind prompts that they share, as a server has them: a policy does there what it does in a cache of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.page import State, page
from kvdsl.integrations.vllm.settings import Settings
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.cpu.answers import Answers
from kvdsl.runtime.cpu.backend import CpuBackend
from kvdsl.runtime.cpu.prepared import DecodeArgs, point, strides_of
from kvdsl.runtime.state.layers import slot_state

HEADS, GROUP, DIM, SIZE, KEPT = 2, 3, 40, 8, 6
PROMPTS = (21, 16)
"""Tokens of two prompts, of which the first 16 are the same."""

TOKENS, LATER = 20, 5
POLICIES = ("h2o_answer", "keydiff_answer", "lazy_answer", "random_answer", "recent_answer", "rkv_answer", "roco_easykv")
CPU = torch.device("cpu")


def _given(policy: str) -> dict[str, int]:
    more = {"lazy_answer": {"window": 2}, "rkv_answer": {"window": 2, "buffer": 2}}.get(policy, {})
    return {"generated" if policy == "roco_easykv" else "budget": KEPT, **more}


class Blocks:
    """A layer's answers in blocks."""

    aligned = False

    def __init__(self, policy: str, blocks: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        settings = Settings(policy, tuple(_given(policy).items()))
        assert settings.answers
        size, dim = blocks.shape[3:]
        found = page(settings, HEADS, dim, blocks.dtype, layers=1, longest=100, aligned=self.aligned)
        self.lies = State.beside(found)
        self.lies.check_fits(size, HEADS * 2 * dim * blocks.dtype.itemsize)
        self.blocks, self.sinks = blocks, sinks
        self.make(settings)

    def make(self, settings: Settings) -> None:
        """Make what serves."""
        dim = self.blocks.shape[4]
        state = settings.state(0, 1)
        state.column_index.ring_sizes = self.lies.ring_sizes
        self.numbers, self.rings = state.settings.resolve(torch.ones(1)).contiguous(), state.column_index.ring_rows()
        args = DecodeArgs(
            batch=1, kv_heads=HEADS, group=GROUP, key_dim=dim, value_dim=dim, slots=self.lies.slots, tokens=1,
            **strides_of(self.numbers), seed=state.seed, threads=1, scale=dim**-0.5,
        )  # fmt: skip
        point(args, ring_rows=self.rings, params=self.numbers)
        backend = CpuBackend(settings.spec, CPU, self.blocks.dtype)
        self.answers = Answers(backend.kernel, args, self.blocks, self.lies.places, self.sinks)

    def decode(
        self, table: Tensor, request: Tensor, place: Tensor, prompt: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Decode a token of each of these requests: [requests, query_heads, dim]."""
        out = torch.empty_like(q)
        self.answers.decode_rows(table, (torch.arange(len(q)), request, place, prompt), q, k, v, out)
        return out

    def held(self, block: int) -> list[list[int]]:
        """The places in the text that each KV head holds of an answer."""
        state = self.blocks[block].flatten().view(torch.uint8)
        at, count = self.lies.places["position"], HEADS * self.lies.slots
        position = state[at : at + 4 * count].view(torch.int32).view(HEADS, -1)
        return [sorted(head[head >= 0].tolist()) for head in position]


def compare(policy: str, dtype: torch.dtype, served_by: type[Blocks]) -> None:
    """Assert that two requests get what each gets in a cache of its own. They share their first two blocks.

    The second request begins its answer later.
    """
    torch.manual_seed(1)
    blocks = torch.full((12, HEADS, 2, SIZE, DIM), torch.nan, dtype=dtype)
    table = torch.tensor([[3, 1, 9, 7, 2, 4], [3, 1, 5, 10, 6, 0]], dtype=torch.int32)  # of the first: prompt, state, answer
    vectors = [torch.randn(2, 3, HEADS, PROMPTS[0] + TOKENS, DIM, dtype=torch.float64).to(dtype) for _ in range(2)]
    keys, values = (torch.stack([vectors[0][r, n] for r in range(2)]) for n in (0, 1))
    for x in (keys, values):
        x[1, :, :16] = x[0, :, :16]
    queries = torch.randn(2, HEADS * GROUP, PROMPTS[0] + TOKENS, DIM, dtype=torch.float64).to(dtype)
    served = served_by(policy, blocks)
    spec = kvdsl.load(policy).spec
    alone, caches = CpuBackend(spec, CPU, dtype), []
    for request, prompt in enumerate(PROMPTS):
        caches.append(slot_state(spec, dict.fromkeys(spec.params) | _given(policy)))
        q, k, v = queries[request, :, :prompt], keys[request, :, :prompt], values[request, :, :prompt]
        alone.prefill(caches[-1], AttentionCall(q[None], k[None], v[None], None, DIM**-0.5))
        for place in range(prompt):
            block = blocks[table[request, place // SIZE]]
            block[:, 0, place % SIZE], block[:, 1, place % SIZE] = k[:, place], v[:, place]
    for step in range(TOKENS):
        asked = torch.arange(2 if step >= LATER else 1)
        prompt = torch.tensor(PROMPTS)[asked]
        place = prompt + step - LATER * asked
        q, k, v = (torch.stack([x[r, :, place[r]] for r in asked]) for x in (queries, keys, values))
        out = served.decode(table, asked, place, prompt, q, k, v)
        for r in asked.tolist():
            call = AttentionCall(q[r, None, :, None], k[r, None, :, None], v[r, None, :, None], None, DIM**-0.5)
            expected = alone.decode(caches[r], call)[0, 0]
            assert torch.allclose(out[r].float(), expected.float(), atol=1e-6 if dtype == torch.float32 else 2e-2)
            kept = [sorted(head[head >= PROMPTS[r]].tolist()) for head in caches[r].position[0]]
            assert served.held(int(table[r, -(-PROMPTS[r] // SIZE)])) == kept
    assert max(len(head) for head in kept) in (KEPT, KEPT + 1)  # one more may wait for the next prune


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("policy", POLICIES)
def test_answers_behind_shared_prompts_are_those_of_caches_of_their_own(policy: str, dtype: torch.dtype) -> None:
    compare(policy, dtype, Blocks)


def test_an_answer_that_is_not_where_it_should_be_is_refused() -> None:
    with pytest.raises(KvdslError):
        misplace(Blocks)


def misplace(served_by: type[Blocks]) -> None:
    """Have an answer's fifth token read without those before it."""
    served = served_by("recent_answer", torch.zeros(5, HEADS, 2, SIZE, DIM))
    q, k = torch.zeros(1, HEADS * GROUP, DIM), torch.zeros(1, HEADS, DIM)
    request, place, prompt = (torch.tensor([number]) for number in (0, 9, 5))
    served.decode(torch.tensor([[1, 2, 3, 4]], dtype=torch.int32), request, place, prompt, q, k, k)


def test_a_block_that_is_too_small_names_one_that_is_not() -> None:
    lies = State(100, (), {}, 5000)
    with pytest.raises(KvdslError, match="say --block-size 32"):
        lies.check_fits(16, 160)
    lies.check_fits(32, 160)
    with pytest.raises(KvdslError, match="of 16 tokens has 2560"):
        lies.check_fits(16, 160)


LONG = (300, 290, 271, 141, 128, 5)
"""Lengths of prompts. The first five share 128 tokens, and the first three share 256."""


@pytest.mark.parametrize("sinks", [None, 0.5], ids=["", "sinks"])
@pytest.mark.parametrize(("size", "dim"), [(16, 64), (64, 64), (48, 32), (32, 40), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_prompts_that_share_blocks_are_read_together(dtype: torch.dtype, size: int, dim: int, sinks: float | None) -> None:
    """Exact attention, in float32 with the same bits as alone; what lies behind a prompt's end is not read."""
    torch.manual_seed(2)
    blocks_of = [-(-prompt // size) for prompt in LONG]
    blocks = torch.full((sum(blocks_of) + 20, HEADS, 2, size, dim), torch.nan, dtype=dtype)
    table, free = torch.zeros(len(LONG), max(blocks_of) + 3, dtype=torch.int32), iter(range(len(blocks)))
    text = torch.randn(2, HEADS, max(LONG), dim).to(dtype)
    keys, values = [], []
    for request, prompt in enumerate(LONG):
        shared = [256, 256, 256, 128, 128, 0][request] // size
        own = torch.randn(2, HEADS, prompt, dim).to(dtype)
        own[:, :, : shared * size] = text[:, :, : shared * size]
        table[request, :shared] = table[0, :shared]
        for number in range(shared if request else 0, blocks_of[request] + 2):
            table[request, number] = next(free)
        for place in range(prompt):
            blocks[table[request, place // size], :, :, place % size] = own[:, :, place].transpose(0, 1)
        keys.append(own[0])
        values.append(own[1])
    served = Blocks("recent_answer", blocks, None if sinks is None else torch.full((HEADS * GROUP,), sinks))
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    q, k, v = (torch.randn(len(LONG), heads, dim).to(dtype) for heads in (HEADS * GROUP, HEADS, HEADS))
    place = torch.tensor(LONG)

    def read(tokens: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q)
        served.answers.decode_rows(table, (tokens, tokens, place[tokens], place[tokens]), q, k, v, out)
        return out[tokens]

    together = read(order)
    alone = torch.cat([read(order[n : n + 1]) for n in range(len(order))])
    near = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    for n, request in enumerate(order.tolist()):
        every, them = (
            torch.cat([x[request].double(), y[request, :, None].double()], 1) for x, y in ((keys, k), (values, v))
        )
        logits = q[request].double().view(HEADS, GROUP, dim) @ every.mT * dim**-0.5
        if sinks is not None:
            logits = torch.cat([logits, torch.full((HEADS, GROUP, 1), sinks)], -1)
        weights = logits.softmax(-1)[..., : every.shape[1]]
        assert (together[n].double() - (weights @ them).flatten(0, 1)).abs().max() < near
    if dtype == torch.float32:
        assert torch.equal(together, alone)
    assert (together.double() - alone.double()).abs().max() < near
