"""How vLLM's scheduler counts blocks where requests share prompts.

A request has the blocks of its prompt, which vLLM hashes and shares as usual. Behind them come one block for the policy's state and the
blocks of the answer's slots. These belong to the request alone, and their number does not grow.

    | prompt: ceil(P / size) blocks | state: 1 block | answer: ceil(slots / size) blocks |
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import CircularBufferSpec, FullAttentionSpec, SlidingWindowSpec, replace_as

from kvdsl.errors import KvdslError

STATE_BLOCKS = 1

_REMEMBERED = 100_000
"""How many prompt lengths are stored: more than there can be requests that wait to be resumed."""


@dataclass(frozen=True, kw_only=True)
class PageSpec(CircularBufferSpec):  # type: ignore[misc]
    """One block a request and layer: slots, positions and state columns.

    As in `CircularBufferSpec`, a request takes one block, no token has a place of its own in it, and prefixes are not shared. With
    `tokens_per_state=-1` the block's size does not depend on tokens.

    Attributes:
        non_causal: makes vLLM pass prompts whole, if a step has room for any. vLLM cuts prompts in parts even then. In its release for
            CPUs a part of a request with a seed ends the engine, under any attention.
    """

    non_causal: bool = True


@dataclass(frozen=True, kw_only=True)
class AnswerSpec(FullAttentionSpec):  # type: ignore[misc]
    """A layer's cache.

    Attributes:
        slots: tokens of an answer that a KV head holds at most, the newest included.
    """

    slots: int

    @classmethod
    def of(cls, spec: Any, slots: int) -> AnswerSpec:
        """From vLLM's spec of full attention."""
        found: AnswerSpec = replace_as(spec, cls, slots=slots)
        assert {field.name for field in fields(spec)} < {field.name for field in fields(found)}
        return found

    @classmethod
    def merge(cls, specs: list[AnswerSpec]) -> AnswerSpec:
        """The spec of all layers, which have equally many slots."""
        assert len({spec.slots for spec in specs}) == 1
        plain = FullAttentionSpec.merge([replace_as(spec, FullAttentionSpec, drop=("slots",)) for spec in specs])
        return cls.of(plain, specs[0].slots)

    @property
    def behind(self) -> int:
        """Blocks of an answer: its state's, and its slots'."""
        return STATE_BLOCKS + cdiv(self.slots, self.block_size)

    def blocks(self, prompt: int, tokens: int) -> int:
        """Count the blocks of a request with so many tokens. From its prompt's end on it has all blocks of its answer."""
        return cdiv(min(prompt, tokens), self.block_size) + (self.behind if tokens >= prompt else 0)

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        return int(super().max_num_blocks_per_req(vllm_config, max_len)) + self.behind

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """The bytes of a request with the longest prompt."""
        longest = vllm_config.model_config.max_model_len
        return self.blocks(longest, longest) * int(self.page_size_bytes)


class AnswerManager(FullAttentionManager):  # type: ignore[misc]
    """Counts a request's blocks by `AnswerSpec`. The rest (hits, sharing, the order of eviction) is vLLM's.

    vLLM counts blocks by tokens. It gets the number of tokens that would take these blocks under full attention.
    """

    def __init__(self, kv_cache_spec: AnswerSpec, **more: Any) -> None:
        super().__init__(kv_cache_spec, **more)
        self._prompts: OrderedDict[str, int] = OrderedDict()

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Store the prompt's length: vLLM passes it here, before it counts blocks. Nothing is skipped.

        Raises:
            KvdslError: for a prompt that has grown behind an answer: vLLM calls that streamed input.
        """
        if num_prompt_tokens is not None:
            if self.req_to_blocks.get(request_id) and self._prompts.get(request_id, num_prompt_tokens) != num_prompt_tokens:
                raise KvdslError(
                    "a prompt that goes on behind an answer is not served where prompts are shared: make it a new request"
                )
            self._prompts[request_id] = num_prompt_tokens
            if len(self._prompts) > _REMEMBERED:
                self._prompts.popitem(last=False)

    def _as_many(self, request_id: str, tokens: int) -> int:
        """Tokens that take so many blocks under full attention. An unknown request has not begun: it has only its prompt."""
        return int(self.kv_cache_spec.blocks(self._prompts.get(request_id, tokens), tokens)) * int(self.block_size)

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **more: Any) -> int:
        return int(super().get_num_blocks_to_allocate(request_id, self._as_many(request_id, num_tokens), *args, **more))

    def allocate_new_blocks(self, request_id: str, num_tokens: int, num_tokens_main_model: int) -> list[Any]:
        found: list[Any] = super().allocate_new_blocks(
            request_id, self._as_many(request_id, num_tokens), num_tokens_main_model
        )
        return found

    def cache_blocks(
        self, request: Any, num_tokens: int, retention_interval: int | None = None, *, replay_boundaries: Sequence[int]
    ) -> None:
        """Share full blocks of the prompt."""
        tokens = _of_the_prompt(request, num_tokens, self.block_pool)
        super().cache_blocks(request, tokens, retention_interval, replay_boundaries=replay_boundaries)


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):  # type: ignore[misc]
    """The cache of a layer with a window, beside layers that see the whole text."""

    @classmethod
    def of(cls, spec: Any) -> WindowSpec:
        """From vLLM's spec of it."""
        found: WindowSpec = replace_as(spec, cls)
        return found


class WindowManager(SlidingWindowManager):  # type: ignore[misc]
    """vLLM's, which shares prompts only: those of the other layers end there."""

    def cache_blocks(
        self, request: Any, num_tokens: int, retention_interval: int | None = None, *, replay_boundaries: Sequence[int]
    ) -> None:
        """See `AnswerManager`."""
        tokens = _of_the_prompt(request, num_tokens, self.block_pool)
        super().cache_blocks(request, tokens, retention_interval, replay_boundaries=replay_boundaries)


def _of_the_prompt(request: Any, tokens: int, pool: Any) -> int:
    """How many of a request's first tokens may be shared: those of its prompt. Stop hashing behind them.

    Otherwise a request that lost its blocks could find blocks of another prompt that contains its own answer. Those hold what full
    attention makes of it. vLLM calls this before a request has generated anything.
    """
    prompt = int(request.num_prompt_tokens)
    request._block_hasher = None
    del request.block_hashes[prompt // pool.hash_block_size :]
    return min(tokens, prompt)
