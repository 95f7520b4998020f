"""Answers in blocks behind prompts that they share: the kernels do there what C++ does in a cache of its own, and wait for nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvdsl.integrations.vllm.settings import Settings
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.gpu.answers import Answers, Room
from kvdsl.runtime.gpu.backend import TritonBackend
from kvdsl.runtime.gpu.lent import Behind
from tests.quick import few
from tests.runtime.test_answers import CPU, DIM, HEADS, POLICIES, Blocks, compare, misplace

from .waits import Waits

pytestmark = pytest.mark.usefixtures("small_blocks")


class OnGpus(Blocks):
    """The same by Triton's kernels. Behind the requests of a step comes nobody, as in a captured graph."""

    aligned = True

    def make(self, settings: Settings) -> None:
        self.room = Room(3)
        state, lies = settings.state(0, 1), self.lies
        backend = TritonBackend(settings.spec, CPU, self.blocks.dtype)
        self.answers = Answers(backend, state, self.blocks, lies.places, lies.slots, lies.ring_sizes, self.room)
        before = self.blocks.clone()
        self.answers.make_ready(_call(*(torch.zeros(1, n, DIM, dtype=self.blocks.dtype) for n in (HEADS * 3, HEADS, HEADS))))
        assert torch.equal(self.blocks.nan_to_num(), before.nan_to_num())

    def decode(
        self, table: Tensor, request: Tensor, place: Tensor, prompt: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        table = torch.cat([table, torch.zeros_like(table[:1])])
        request, place, prompt = (
            torch.cat([x, x.new_tensor([last])]) for x, last in ((request, len(table) - 1), (place, 0), (prompt, 0))
        )
        q, k, v = (torch.cat([x, torch.full_like(x[:1], torch.nan)]) for x in (q, k, v))
        found, lse = map(torch.stack, zip(*(self._of_prompt(table[r], int(n), one) for r, n, one in zip(request, prompt, q, strict=True)),
                                          strict=True))  # fmt: skip
        behind = Behind(found.to(q.dtype), lse, table, request.int(), place.int(), prompt.int())
        out = self.decoded(_call(q, k, v), behind)[:, 0]
        assert not out[-1].any()
        return out[:-1]

    def decoded(self, call: AttentionCall, behind: Behind) -> Tensor:
        return self.answers.decode(call, behind, check=True)

    def _of_prompt(self, blocks: Tensor, tokens: int, query: Tensor) -> tuple[Tensor, Tensor]:
        """Attention to a prompt, and its log-sum-exps."""
        if not tokens:
            return torch.full_like(query, torch.nan), query.new_full(query.shape[:1], torch.nan, dtype=torch.float32)
        keys, values = self.blocks[blocks].permute(2, 1, 0, 3, 4).flatten(2, 3)[:, :, :tokens].double()
        logits = query.double().view(HEADS, -1, DIM) @ keys.mT * DIM**-0.5
        return (logits.softmax(-1) @ values).flatten(0, 1), logits.logsumexp(-1).flatten().float()


def _call(query: Tensor, key: Tensor, value: Tensor) -> AttentionCall:
    query, key, value = (x.unsqueeze(2) for x in (query, key, value))
    return AttentionCall(query, key, value, None, DIM**-0.5)


@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16, torch.float16], torch.float32), ids=str)
@pytest.mark.parametrize("policy", few(POLICIES, "recent_answer"))
def test_answers_behind_shared_prompts_are_those_of_caches_of_their_own(policy: str, dtype: torch.dtype) -> None:
    compare(policy, dtype, OnGpus)


def test_an_answer_that_is_not_where_it_should_be_is_refused() -> None:
    with pytest.raises(RuntimeError, match="do not hold its earlier tokens"):
        misplace(OnGpus)


class Watched(OnGpus):
    """Notes where the host waits for the device in a step."""

    lines: list[str]

    def decoded(self, call: AttentionCall, behind: Behind) -> Tensor:
        there = (*call[:3], *behind, self.blocks, *self.answers._state.tensors().values())
        with pytest.MonkeyPatch.context() as patch, torch.no_grad(), Waits(patch, there) as waits:
            out = super().decoded(call, behind)
        assert not waits.lines, "\n".join(waits.lines)
        return out


@pytest.mark.nightly
def test_a_step_never_waits() -> None:
    compare("recent_answer", torch.float32, Watched)
