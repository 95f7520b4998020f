"""Shared prompts and answers under a policy on GPUs: vLLM's own kernel attends to prompts, kvdsl's to answers, and merges the two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.answer_attention import AnswerAttention
from kvdsl.integrations.vllm.answer_step import Step
from kvdsl.integrations.vllm.answers import AnswerBackend, StepBuilder
from kvdsl.integrations.vllm.prompts_on_gpus import Prompts, Segments
from kvdsl.integrations.vllm.settings import traced
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose


class AnswerBackendOnGpus(AnswerBackend):
    """See `AnswerBackend`. Blocks have a size that vLLM's kernel reads."""

    @staticmethod
    def get_impl_cls() -> type[AnswersOnGpus]:
        return AnswersOnGpus

    @staticmethod
    def get_builder_cls() -> type[StepBuilderOnGpus]:
        return StepBuilderOnGpus

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[MultipleOf]:
        return [MultipleOf(16)]


@dataclass(frozen=True)
class Decoded:
    """A token of each of several requests.

    Attributes:
        rows: where they are among the step's tokens.
        asked: int32 [tokens], their requests' rows of the table. places, ends: int32 [tokens], see `Behind`.
        inside: bool [tokens, 1, 1], which are tokens of prompts; None if none is.
    """

    rows: Tensor | slice
    asked: Tensor
    places: Tensor
    ends: Tensor
    inside: Tensor | None = None


@dataclass(frozen=True)
class StepOnGpus:
    """What a step's tokens are, on the device.

    Attributes:
        segments: all of them, as they attend to prompts.
        tables: int32 [requests, blocks].
        decoded: the first tokens behind prompts, then the second ones, and so on.
        written: prompts' tokens: where they are among the step's, their blocks, and their places in these; None if there are none.
        sorted: the same on the host; None if each request has one token.
    """

    segments: Segments
    tables: Tensor
    decoded: list[Decoded]
    written: tuple[Tensor | slice, Tensor, Tensor] | None
    sorted: Step | None = None

    @classmethod
    def of(cls, step: Step, known: Any) -> StepOnGpus:
        """Any step."""
        device, tables = known.seq_lens.device, known.block_table_tensor.contiguous()
        found = [
            (part.first, part.last - part.first, part.request, part.before + part.last - part.first) for part in step.parts
        ]
        for one in step.generated:
            found += [(row, 1, request, prompt) for row, request, prompt in zip(
                one.row.tolist(), one.request.tolist(), one.prompt.tolist(), strict=True)]  # fmt: skip
        found.sort()
        firsts, lengths, owners, read = zip(*found, strict=True)
        starts, used = (torch.tensor(x, dtype=torch.int32).to(device) for x in ((*firsts, firsts[-1] + lengths[-1]), read))
        segments = Segments(starts, used, tables[torch.tensor(owners).to(device)], lengths, max(read))
        decoded = [
            Decoded(one.row.to(device), *(x.to(device, torch.int32) for x in (one.request, one.place, one.prompt)))
            for one in step.generated
        ]
        written = (step.rows.to(device), step.block.to(device), step.offset.to(device)) if step.parts else None
        return cls(segments, tables, decoded, written, step)


class StepBuilderOnGpus(StepBuilder):
    """See `StepBuilder`. vLLM captures steps in which each request has one token: what they read stays where it is."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        for name in layer_names:
            vllm_config.compilation_config.static_forward_context[name].impl.let_go()
        rows = vllm_config.scheduler_config.max_num_seqs
        self._asked = torch.arange(rows, dtype=torch.int32, device=device)
        self._numbers = torch.zeros(3, rows, dtype=torch.int32, device=device)
        self._written = torch.zeros(2, rows, dtype=torch.int64, device=device)
        self._inside = torch.zeros(rows, 1, 1, dtype=torch.bool, device=device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Without vLLM's kernel, in float32, each row of a graph would read as much as the longest prompt."""
        captures = vllm_config.use_v2_model_runner and kv_cache_spec.dtype != torch.float32
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE if captures else AttentionCGSupport.NEVER

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepOnGpus | None:
        """See `StepBuilder.build`. The host reads nothing in a step in which each request has one token."""
        known = common_attn_metadata
        if known.rswa_prefix_lens is None:
            return None
        if known.max_query_len == 1:
            return self._every_one(known, known.rswa_prefix_lens, prompts=bool(known.is_prefilling.any()))
        return StepOnGpus.of(self._sorter.sort(known), known)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> StepOnGpus:
        """Nobody's tokens: the table has no blocks."""
        known = common_attn_metadata
        return self._every_one(known, torch.zeros_like(known.seq_lens), prompts=True)

    def _every_one(self, known: Any, lengths: Tensor, *, prompts: bool) -> StepOnGpus:
        """A step in which each request has one token. Rows without a request have no blocks.

        Args:
            lengths: the prompts'.
            prompts: whether there may be tokens of prompts: the last one, where the rest was found in the cache.
        """
        tables, size = known.block_table_tensor, self.kv_cache_spec.block_size
        padded, count = len(tables), min(len(lengths), len(tables))
        tokens = known.seq_lens[:padded]
        places, ends, read = self._numbers[:, :padded]
        ends[:count].copy_(lengths[:count], non_blocking=True)
        ends[count:].zero_()
        torch.sub(tokens, 1, out=places).clamp_(min=0)
        torch.minimum(ends, tokens, out=read)
        inside, (block, offset) = self._inside[:padded], self._written[:, :padded]
        torch.lt(places, ends, out=inside[:, 0, 0])
        block.copy_(tables.gather(1, (places // size).long()[:, None])[:, 0]).mul_(inside[:, 0, 0])  # block 0 is nobody's
        offset.copy_(places % size)
        rows, tables = slice(count), tables[:count]
        segments = Segments(known.query_start_loc[: count + 1], read[rows], tables, [1] * count, known.max_seq_len)
        decoded = Decoded(rows, self._asked[rows], places[rows], ends[rows], inside[rows] if prompts else None)
        return StepOnGpus(segments, tables, [decoded], (rows, block[rows], offset[rows]) if prompts else None)


class AnswersOnGpus(AnswerAttention):
    """See `AnswerAttention`.

    Raises:
        KvdslError: also for guesses, traces, and layers with windows.

    Attributes:
        room: what the model's layers share.
    """

    aligned = True
    room: Any
    _prompts: Any
    _answers: Any

    def _make(self, config: Any, sliding_window: int | None) -> None:
        from kvdsl.runtime.gpu.answers import Room

        if self._guesses or sliding_window is not None or traced(config) is not None:
            raise KvdslError(
                "guesses, traces, and layers with windows beside others are not served in vLLM on GPUs yet: leave them out, or serve on "
                "CPUs"
            )
        device = torch.device(current_platform.device_type)
        self._backend: Any = choose(self._plan.settings.spec, "triton", device, self._dtype)
        others = (getattr(layer, "impl", None) for layer in config.compilation_config.static_forward_context.values())
        rooms = (one.room for one in others if isinstance(one, AnswersOnGpus))
        self.room = next(rooms, None) or Room(config.scheduler_config.max_num_seqs)
        self.let_go()

    def let_go(self) -> None:
        """Free what belongs to a cache: vLLM makes a small one to measure graphs, then the real one."""
        self._address, self._blocks, self._prompts, self._answers = 0, torch.empty(0), None, None
        self.room.shared.clear()

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: StepOnGpus | None,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of a step's tokens, [tokens, heads, dim] each; `output` gets it."""
        if attn_metadata is None:  # vLLM measures the memory of a step, or compiles
            return output.zero_()
        step = attn_metadata
        if kv_cache.data_ptr() != self._address:  # at first, or vLLM has made another cache
            self._take(extract_layer_index(layer.layer_name), kv_cache, self._call(query[:1], key[:1], value[:1]))
        if step.written is not None:
            rows, block, offset = step.written
            self._blocks[block, :, 0, offset], self._blocks[block, :, 1, offset] = key[rows], value[rows]
        tokens = step.segments.tokens
        found, lse = self._prompts.read(step.segments, query[:tokens])
        if step.written is not None:
            output[:tokens] = found if self._sinks is None else found * (lse - self._sinks).sigmoid()[..., None]
        for one in step.decoded:
            self._decode_on_device(one, step.tables, (query, key, value), found, lse, output)
        if step.sorted is not None:
            step.sorted.evictions.layer_is_done(kv_cache, self._counted, step.sorted)
        return output

    def _call(self, query: Tensor, key: Tensor, value: Tensor) -> AttentionCall:
        """The call for one token of each row, [rows, heads, dim]."""
        query, key, value = (x.unsqueeze(2) for x in (query, key, value))
        return AttentionCall(query, key, value, None, self.scale, self._cap or None, None, self._sinks)

    def _take(self, layer: int, cache: Tensor, call: AttentionCall) -> None:
        """Take the layer's blocks, and have the kernels ready before the first request: vLLM's first prompt is its own, to warm up."""
        from kvdsl.runtime.gpu.answers import Answers

        self._address = cache.data_ptr()
        self._find(layer, cache)
        self._prompts = Prompts(self._blocks, self.scale, self._cap)
        head_offset = get_tensor_model_parallel_rank() * self.num_kv_heads
        state = self._plan.settings.state(layer, self._plan.layers, head_offset)
        lies = self._lies
        self._answers = Answers(self._backend, state, self._blocks, lies.places, lies.slots, lies.ring_sizes, self.room)
        self._answers.make_ready(call)

    def _decode_on_device(
        self, one: Decoded, tables: Tensor, vectors: tuple[Tensor, Tensor, Tensor], found: Tensor, lse: Tensor, output: Tensor
    ) -> None:  # fmt: skip
        """Attend from the tokens and update the policy's state."""
        from kvdsl.runtime.gpu.lent import Behind

        behind = Behind(found[one.rows], lse[one.rows], tables, one.asked, one.places, one.ends)
        call = self._call(*(x[one.rows] for x in vectors))
        out = self._answers.decode(call, behind, check=self.number == 0)[:, 0]
        output[one.rows] = out if one.inside is None else out.where(~one.inside, output[one.rows])
