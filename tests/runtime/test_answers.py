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
POLICIES = ("h2o_answer", "roco_easykv", "random_answer", "recent_answer")
CPU = torch.device("cpu")


def _given(policy: str) -> dict[str, int]:
    return {"generated" if policy == "roco_easykv" else "budget": KEPT}


class Blocks:
    """A layer's answers in blocks."""

    aligned = False

    def __init__(self, policy: str, blocks: torch.Tensor) -> None:
        settings = Settings(policy, tuple(_given(policy).items()))
        assert settings.answers
        found = page(settings, HEADS, DIM, blocks.dtype, layers=1, longest=100, aligned=self.aligned)
        self.lies = State.beside(found)
        self.lies.check_fits(SIZE, HEADS * 2 * DIM * blocks.dtype.itemsize)
        self.blocks = blocks
        self.make(settings)

    def make(self, settings: Settings) -> None:
        """Make what serves."""
        state = settings.state(0, 1)
        self.numbers = state.settings.resolve(torch.ones(1)).contiguous()
        args = DecodeArgs(
            batch=1, kv_heads=HEADS, group=GROUP, key_dim=DIM, value_dim=DIM, slots=self.lies.slots, tokens=1,
            **strides_of(self.numbers), seed=state.seed, threads=1, scale=DIM**-0.5,
        )  # fmt: skip
        point(args, params=self.numbers)
        backend = CpuBackend(settings.spec, CPU, self.blocks.dtype)
        self.answers = Answers(backend.kernel, args, self.blocks, self.lies.places)

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
    """That two requests, the second of which begins its answer later, are what each is in a cache of its own.

    The first two blocks are both prompts'.
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
    assert max(len(head) for head in kept) == KEPT


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
