"""One layer's attention in vLLM. Short prompts are read together, others one by one, whole or in parts, and what they leave goes into
their pages. `caches` decodes tokens together.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from kvdsl.errors import KvdslError
from kvdsl.integrations.vllm.caches import Caches, InBlocks, InRows, Vectors
from kvdsl.integrations.vllm.page import page
from kvdsl.integrations.vllm.settings import Plan, traced
from kvdsl.integrations.vllm.step import EveryOne, Step
from kvdsl.integrations.vllm.texts import Texts
from kvdsl.runtime.backend import AttentionCall
from kvdsl.runtime.backends import choose, computed_in
from kvdsl.runtime.biases import bias_norm, bound
from kvdsl.runtime.rope import Rope
from kvdsl.runtime.state.slots import SlotState

if TYPE_CHECKING:
    from kvdsl.integrations.vllm.step import Batch
    from kvdsl.runtime.backend import Backend
    from kvdsl.runtime.spec import PolicySpec


class PolicyAttention(AttentionImpl):  # type: ignore[misc]
    """See vLLM's `AttentionImpl`.

    Raises:
        KvdslError: for attention that is not causal, or has a bias by distance.
    """

    plan: ClassVar[Plan | None] = None
    """This process's: vLLM reads the page's size where no configuration is set."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None, kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        if alibi_slopes is not None or attn_type != AttentionType.DECODER or kv_sharing_target_layer_name is not None:
            raise KvdslError("kvdsl serves causal attention of a layer to its own tokens, without a bias by distance")
        config = get_current_vllm_config()
        plan = Plan.of(config)
        if plan is None or plan.settings.answers:
            raise KvdslError(
                "this is kvdsl's attention under a budget in tokens, and the configuration names none: make an engine right after its "
                "configuration"
            )
        PolicyAttention.plan = plan
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.scale, self.kv_cache_dtype = float(scale), kv_cache_dtype
        self._settings, self._layers, self._longest = plan.layer(sliding_window), plan.layers, plan.longest
        settings = self._settings
        self._sinks = sinks
        self._more = (logits_soft_cap or None, sliding_window, sinks)
        text = config.model_config.hf_text_config
        self._head_offset = get_tensor_model_parallel_rank() * self.num_kv_heads
        self._rope = _rotation(text, head_size) if settings.spec.compact else None
        dtype = config.model_config.dtype
        self._page = page(
            settings, self.num_kv_heads, head_size, dtype, layers=plan.layers, longest=plan.longest,
            aligned=not current_platform.is_cpu(),
        )  # fmt: skip
        self._serves_policy = settings is plan.settings
        self._backend = _backend(settings.spec, dtype)
        self._computed_in = computed_in(settings.spec, dtype)
        self.caches = self._make_caches(config, of_one_kind=plan.windowed or sliding_window is None)
        self.reading: dict[int, SlotState] = {}
        """By page: prompts that may go on. Nothing is evicted before a prompt has ended, so these grow."""
        # On GPUs a count would wait for the device.
        self._counted = self._page.lies() if self._serves_policy and isinstance(self.caches, InBlocks) else None
        texts = Texts.of(config)
        self._tracing = texts.tracing if texts is not None and self._serves_policy else None
        self._layer: int | None = None
        """The layer's number, known from the first step on."""
        self.owner: Callable[[], nn.Module | None] = lambda: None
        """Returns the module whose keys these are, if they are rounded."""
        self._listening = None if settings.spec.kv_dtype == "model" else self._listen()

    def _listen(self) -> RemovableHandle:
        """Notice which module this attention becomes a part of: vLLM does not say."""

        def registered(module: nn.Module, name: str, part: Any) -> None:
            if getattr(part, "impl", None) is self and self.owner() is None:
                self.owner = weakref.ref(module)

        return register_module_module_registration_hook(registered)

    def key_bias(self) -> float:
        """Return the norm of the keys' bias if rounding would lose the rest of them, else 0. The weights have been loaded.

        Raises:
            KvdslError: if it cannot be found.
        """
        if self._listening is None:
            return 0.0
        self._listening.remove()
        owner = self.owner()
        norm = None if owner is None else bias_norm(owner, self.head_size)
        if norm is None:
            raise KvdslError(
                "kvdsl does not find what computes the model's keys, and `kv_dtype` rounds none that have a large bias: leave it out"
            )
        return norm if norm > bound(self.head_size) else 0.0

    def _make_caches(self, config: Any, *, of_one_kind: bool) -> Caches:
        """Make the caches of requests.

        Args:
            of_one_kind: whether only layers that the policy serves have pages. Others would lie in the same blocks.
        """
        guesses = config.speculative_config.num_speculative_tokens if config.speculative_config is not None else 0
        if self._backend.name == "triton":
            if guesses or not of_one_kind or traced(config) is not None:
                raise KvdslError(
                    "guesses, traces, and layers with windows beside others are not served in vLLM on GPUs yet: leave them out, or "
                    "serve on CPUs"
                )
            requests = config.scheduler_config.max_num_seqs
            return InRows(cast("Any", self._backend), self._page, self._state, self._call, requests, _works(config))
        return InBlocks(self._backend, self._page, self._state, self._call, self._sinks, self._longest, guesses)

    def forward(
        self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, attn_metadata: Step | EveryOne | None,
        output: Tensor, output_scale: Tensor | None = None, output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention of a step's tokens, [tokens, heads, dim] each; `output` gets it."""
        if attn_metadata is None:  # vLLM measures the memory of a step, or compiles
            return output.zero_()
        if self._layer is None:
            self._layer = extract_layer_index(layer.layer_name)
        found = output.to(self._computed_in)
        self._attend(attn_metadata, (query, key, value), kv_cache, found)
        return output if found is output else output.copy_(found)

    def _attend(self, step: Step | EveryOne, vectors: Vectors, kv_cache: Tensor, output: Tensor) -> None:
        """`forward`, in the dtype in which the backend computes."""
        vectors = cast("Vectors", tuple(x.to(self._computed_in) for x in vectors))
        blocks = kv_cache.view(len(kv_cache), -1).view(torch.uint8)
        if isinstance(step, EveryOne):
            assert isinstance(self.caches, InRows)  # only these have such steps
            self.caches.meet(None, blocks, vectors)
            self.caches.decode_every_one(step, vectors, output)
            return
        for prompt in step.prompts():
            self.caches.meet(prompt, blocks, vectors)
        for batch in step.batches:
            self._read(batch, vectors, output, blocks)
        for number, tokens in step.rejected:
            self.caches.take_back(number, tokens)
        for place, decoded in enumerate(step.decoded):
            self.caches.decode(decoded, place, vectors, output)
        step.evictions.layer_is_done(kv_cache, self._counted, step)
        if self._tracing is not None:
            assert self._layer is not None  # found by `forward`
            self._tracing.layer_is_done(self._layer, self._held, step)

    def _held(self, page: int) -> tuple[int, Tensor]:
        """See `Caches.held`; also for a prompt that is still being read."""
        if page not in self.reading:
            return self.caches.held(page)
        state = self.reading[page]
        return int(state.seen[0]), state.position[0]

    def _call(self, query: Tensor, key: Tensor, value: Tensor, real: Tensor | None = None) -> AttentionCall:
        """The call for vectors [requests, tokens, heads, dim]."""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        return AttentionCall(query, key, value, real, self.scale, *self._more, self._rope)

    def _state(self) -> SlotState:
        assert self._layer is not None
        return self._settings.state(self._layer, self._layers, self._head_offset)

    def _read(self, batch: Batch, vectors: Vectors, output: Tensor, blocks: Tensor) -> None:
        """Read prompts, or a part of one, into a state of their own. At a prompt's end its tensors move into the pages."""
        first = batch.prompts[0]
        state = self._state() if first.begins else self.reading[first.page]
        if len(batch.prompts) == 1 and first.begins and first.ends:
            self.caches.lend(state, first, blocks)
        for prompt in batch.prompts:  # the request that had the page before has gone, maybe amid its prompt
            self.reading.pop(prompt.page, None)
        query, key, value = map(batch.of_step, vectors)
        call = self._call(query, key, value, None if batch.real is None else batch.real.to(query.device))
        if first.token_values is not None and self._serves_policy:
            state.settings.turns = first.token_values.turns
            call = call._replace(supplied=first.token_values.of_call(self.num_kv_heads))
        out = self._backend.prefill(state, call._replace(goes_on=not first.ends))
        batch.into_step(out, output)
        if first.ends:
            self.caches.put(batch.pages, blocks, state)
        else:
            self.reading[first.page] = state


def _rotation(config: Any, head_size: int) -> Rope:
    """The rotation that a text model's configuration describes: all dims, the first half with the second.

    Raises:
        KvdslError: for any other.
    """
    told = getattr(config, "rope_parameters", None) or {}
    plain = told.get("rope_type", "default") == "default" and told.get("partial_rotary_factor", 1.0) == 1.0
    if config.model_type not in ("llama", "mistral", "qwen2", "qwen3") or not plain or "rope_theta" not in told:
        raise KvdslError(
            f"kvdsl does not know how {config.model_type} rotates its keys, and a policy with compact positions moves them: serve a policy "
            "that leaves them as they are (h2o, roco)"
        )
    dims = torch.arange(0, head_size, 2, dtype=torch.int64, device="cpu")  # vLLM's default device may be a GPU
    frequencies = 1.0 / told["rope_theta"] ** (dims.float() / head_size)
    return Rope(frequencies.double(), "half")


def _works(config: Any) -> dict[Any, Any]:
    """Return the work space that the model's layers share on a GPU, one after the other."""
    for layer in config.compilation_config.static_forward_context.values():
        caches = getattr(getattr(layer, "impl", None), "caches", None)
        if isinstance(caches, InRows):
            return caches.works
    return {}


def _backend(spec: PolicySpec, dtype: torch.dtype) -> Backend:
    """Choose the backend that serves the policy here.

    Raises:
        KvdslError: on GPUs for a policy without kernels: its pages would be read one by one.
    """
    device = torch.device(current_platform.device_type)
    return choose(spec, "auto" if device.type == "cpu" else "triton", device, dtype)
