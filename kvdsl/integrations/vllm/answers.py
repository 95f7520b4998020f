"""Attention where requests share prompts: prompts lie whole in vLLM's own blocks; kvdsl's kernels keep the answer, under the policy, in
blocks behind them. `blocks` says which.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from vllm.config import get_current_vllm_config, get_current_vllm_config_or_none
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import AttentionCGSupport, AttentionImpl, AttentionMetadataBuilder, AttentionType
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.backend import OwnBackend
from kvdsl.integrations.vllm.blocks import AnswerSpec
from kvdsl.integrations.vllm.page import State, page
from kvdsl.integrations.vllm.refusals import refuse_answers, refuse_configuration, refuse_layer
from kvdsl.integrations.vllm.releases import ANSWERS
from kvdsl.integrations.vllm.settings import Plan
from kvdsl.runtime.backends import choose
from kvdsl.runtime.cpu.answers import Answers
from kvdsl.runtime.cpu.backend import CpuBackend
from kvdsl.runtime.cpu.prepared import DecodeArgs, point, strides_of


class AnswerBackend(OwnBackend):
    """Attention to a whole prompt and to what a policy keeps of the answer."""

    @staticmethod
    def get_name() -> str:
        return ANSWERS

    @staticmethod
    def get_impl_cls() -> type[AnswerAttention]:
        return AnswerAttention

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Blocks as vLLM has them, and those of an answer behind.

        Raises:
            KvdslError: if what is remembered of an answer does not fit into a block.
        """
        refuse_layer(spec, FullAttentionSpec)
        plan = Plan.of(get_current_vllm_config_or_none()) or AnswerAttention.plan
        assert plan is not None
        state = _state(plan, spec.num_kv_heads, spec.head_size, spec.dtype)
        state.check_fits(spec.block_size, spec.num_kv_heads * 2 * spec.head_size * spec.dtype.itemsize)
        return AnswerSpec.of(spec, state.slots)


def _state(plan: Plan, kv_heads: int, dim: int, dtype: torch.dtype) -> State:
    return State.beside(page(plan.settings, kv_heads, dim, dtype, layers=plan.layers, longest=plan.longest))


@dataclass(frozen=True)
class Part:
    """The part of a request's prompt that this step reads.

    Attributes:
        first, last: its rows among the step's tokens, from `first` to before `last`.
        before: tokens of the prompt that have been read before, by this request or by another one.
        request: its row of the table.
    """

    first: int
    last: int
    before: int
    request: int


@dataclass(frozen=True)
class Generated:
    """One token of each of several requests, behind their prompts; int64 [tokens] each.

    Attributes:
        row: where they are among the step's tokens. request: their rows of the table. place: their places in the texts.
        prompt: how many tokens the prompts have.
    """

    row: Tensor
    request: Tensor
    place: Tensor
    prompt: Tensor

    @classmethod
    def of(cls, found: list[tuple[int, int, int, int]]) -> Generated:
        """From tuples of these."""
        return cls(*torch.tensor(found, dtype=torch.int64).T.contiguous())


@dataclass(frozen=True)
class Step:
    """What a step's tokens are.

    Attributes:
        parts: of prompts.
        rows, block, offset: of all tokens in these: where they are among the step's, and where their keys and values go, int64 [tokens].
        generated: the first tokens behind prompts, then the second ones, and so on. A request has several where vLLM reads its answer
            again after a preemption.
        table: int32 [requests, blocks].
    """

    parts: list[Part]
    rows: Tensor
    block: Tensor
    offset: Tensor
    generated: list[Generated]
    table: Tensor


class StepBuilder(AttentionMetadataBuilder[Step]):  # type: ignore[misc]
    """Sorts a step's tokens."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        assert AnswerAttention.plan is not None
        refuse_configuration(vllm_config, AnswerAttention.plan.settings.spec)
        refuse_answers(vllm_config)
        self._size = kv_cache_spec.block_size
        # See `backend.StepBuilder`: so vLLM tells how long prompts are.
        vllm_config.model_config.model_arch_config.rswa_window = vllm_config.model_config.max_model_len

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Step | None:
        """None for what vLLM makes up to compile or to warm up: there prompts have no lengths."""
        known = common_attn_metadata
        if known.rswa_prefix_lens is None:
            return None
        starts, lengths, ends = known.query_start_loc_cpu.tolist(), known.seq_lens.tolist(), known.rswa_prefix_lens.tolist()
        parts: list[Part] = []
        generated: dict[int, list[tuple[int, int, int, int]]] = defaultdict(list)
        for request, (first, last, length, end) in enumerate(zip(starts, starts[1:], lengths, ends, strict=False)):
            before = length - (last - first)
            behind = max(first, min(last, first + end - before))  # the first row behind the prompt
            if behind > first:
                parts.append(Part(first, behind, before, request))
            for number, row in enumerate(range(behind, last)):
                generated[number].append((row, request, before + row - first, end))
        table = known.block_table_tensor
        assert table.stride(1) == 1 and table.dtype == torch.int32
        return Step(parts, *_places(parts, table, self._size), list(map(Generated.of, generated.values())), table)


def _places(parts: list[Part], table: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of all tokens in these: their rows, their blocks, and their places in those."""
    nothing = [torch.zeros(0, dtype=torch.int64)]
    rows = torch.cat(nothing + [torch.arange(part.first, part.last) for part in parts])
    places = torch.cat(nothing + [torch.arange(part.before, part.before + part.last - part.first) for part in parts])
    owners = torch.cat(nothing + [torch.full((part.last - part.first,), part.request) for part in parts])
    return rows, table[owners, places // size].long(), places % size


class AnswerAttention(AttentionImpl):  # type: ignore[misc]
    """See vLLM's `AttentionImpl`.

    Raises:
        KvdslError: for attention other than causal attention to the whole text, or a policy without C++.
    """

    plan: ClassVar[Plan | None] = None
    """Of this process: vLLM asks for the cache's size where no configuration is set."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None, kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        more = {
            "a bias by distance": alibi_slopes, "a sliding window": sliding_window, "a cap of its logits": logits_soft_cap or None,
            "keys of another layer": kv_sharing_target_layer_name, "sinks": sinks,
            "attention to what follows": None if attn_type == AttentionType.DECODER else attn_type,
        }  # fmt: skip
        found = [what for what, value in more.items() if value is not None]
        if found:
            raise KvdslError(
                f"a layer has {found[0]}, which is not served where prompts are shared: serve a policy with a budget in tokens (h2o, roco)"
            )
        config = get_current_vllm_config()
        plan = Plan.of(config)
        if plan is None or not plan.settings.answers:
            raise KvdslError(
                "this is kvdsl's attention over shared prompts, and no policy for it is asked for: make an engine right behind its "
                "configuration"
            )
        AnswerAttention.plan = self._plan = plan
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.scale, self.kv_cache_dtype = float(scale), kv_cache_dtype
        self._dtype = config.model_config.dtype
        backend = choose(plan.settings.spec, "cpu", torch.device("cpu"), self._dtype)
        assert isinstance(backend, CpuBackend)
        self._kernel = backend.kernel
        self._told: Answers | None = None

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Step | None,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of a step's tokens, [tokens, heads, dim] each; `output` gets it."""
        step = attn_metadata
        if step is None:  # vLLM tries out how much memory a step takes, or compiles
            return output.zero_()
        if self._told is None:
            self._told = self._tell(extract_layer_index(layer.layer_name), kv_cache)
        if step.parts:
            self._blocks[step.block, :, 0, step.offset] = key[step.rows]
            self._blocks[step.block, :, 1, step.offset] = value[step.rows]
        for part in step.parts:
            self._read(part, step.table, query, key, value, output)
        for generated in step.generated:
            self._decode(generated, step.table, query, key, value, output)
        return output

    def _tell(self, layer: int, cache: Tensor) -> Answers:
        """Return the call of the kernel, with what does not change between steps."""
        count, heads, size, width = cache.shape
        assert cache.is_contiguous() and (heads, width) == (self.num_kv_heads, 2 * self.head_size)
        self._blocks = cache.view(count, heads, 2, size, self.head_size)
        self._lies = _state(self._plan, heads, self.head_size, self._dtype)
        state = self._plan.settings.state(layer, self._plan.layers)
        state.column_index.ring_sizes = self._lies.ring_sizes
        self._rings, self._numbers = state.column_index.ring_rows(), state.settings.resolve(torch.ones(1)).contiguous()
        args = DecodeArgs(
            batch=1, kv_heads=heads, group=self.num_heads // heads, key_dim=self.head_size, value_dim=self.head_size,
            slots=self._lies.slots, tokens=1, **strides_of(self._numbers), layer=layer,
            head_offset=get_tensor_model_parallel_rank() * heads, seed=state.seed & 0xFFFFFFFF, threads=1, scale=self.scale,
        )  # fmt: skip
        point(args, ring_rows=self._rings, params=self._numbers)
        return Answers(self._kernel, args, self._blocks, self._lies.places)

    def _read(self, part: Part, table: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> None:
        """Attend from a part of a prompt to itself and to the blocks before it, whichever request filled these."""
        rows = slice(part.first, part.last)
        q, k, v = (x[rows].transpose(0, 1)[None] for x in (query, key, value))
        mask = None
        if part.before:
            length = part.before + part.last - part.first
            blocks = self._blocks[table[part.request, : cdiv(length, self._blocks.shape[3])].long()]
            k, v = (blocks[:, :, one].transpose(0, 1).flatten(1, 2)[None, :, :length] for one in (0, 1))
            mask = torch.ones(part.last - part.first, length, dtype=torch.bool).tril(part.before)
        found = scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, scale=self.scale, enable_gqa=True)
        output[rows] = found[0].transpose(0, 1)

    def _decode(self, generated: Generated, table: Tensor, *vectors: Tensor) -> None:
        """Attend from the tokens and update the policy's state, in one call of C++."""
        assert self._told is not None
        which = (generated.row, generated.request, generated.place, generated.prompt)
        self._told.decode_rows(table, which, *vectors)

    def held(self, blocks: list[int], prompt: int) -> Tensor:
        """The places of the tokens that an answer holds, int32 [kv_heads, slots], -1 where there is none.

        Args:
            blocks: the request's.
            prompt: tokens of its prompt.
        """
        state = self._blocks[blocks[cdiv(prompt, self._blocks.shape[3])]].flatten().view(torch.uint8)
        at, count = self._lies.places["position"], self.num_kv_heads * self._lies.slots
        return state[at : at + 4 * count].view(torch.int32).view(self.num_kv_heads, -1).clone()
