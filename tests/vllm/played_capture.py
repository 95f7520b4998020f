"""Capture and replay of whole decode steps, as vLLM's second runner does on GPUs, played on a CPU.

vLLM's own functions prepare what is captured and choose what is replayed. A tape stands for the part of a CUDA graph that is one layer's
attention: it holds the operations and kernel launches of one call with their arguments. Replaying runs these, and no Python of kvdsl's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import kvdsl.runtime.gpu.backend as gpu
from kvdsl.integrations.vllm.step import EveryOne
from tests.triton.waits import COPIES, READ

SIZES = (2, 4)
"""Rows of the steps that are captured: steps of one and of three requests are padded."""


class Tape(TorchDispatchMode):
    """One call's operations and launches, with their arguments.

    Raises:
        AssertionError: if the host reads a tensor meanwhile, which ends a capture.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__()
        self._done: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        launch = gpu.launch

        def launched(*arguments: Any) -> None:
            with _disable_current_modes(), mock.patch.multiple(Tensor, **here):
                launch(*arguments)
            self._done.append((launch, arguments, {}, []))

        here = {name: getattr(Tensor, name) for name in COPIES}
        with self, mock.patch.object(gpu, "launch", launched), mock.patch.multiple(Tensor, **dict.fromkeys(COPIES, _read)):
            call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READ:
            _read()
        found = func(*args, **(kwargs or {}))
        self._done.append((func, args, kwargs or {}, [x for x in tree_leaves(found) if isinstance(x, Tensor)]))
        return found

    def replay(self) -> None:
        """Run everything again; results go to where they were."""
        for func, args, kwargs, before in self._done:
            now = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for there, new in zip(before, now, strict=True):
                if there.data_ptr() != new.data_ptr():  # no view, and nothing in place
                    there.copy_(new)


def _refresh(builder: Any) -> None:
    """Replace a builder's buffers."""
    for name, one in vars(builder).items():
        if isinstance(one, Tensor):
            setattr(builder, name, one.clone())
        elif isinstance(one, EveryOne):
            setattr(builder, name, EveryOne(one.pages.clone(), one.real.clone()))


def _read(*_: Any) -> Any:
    raise AssertionError("the host reads what the device has")


class Graphs:
    """A graph of decode steps of each of `SIZES`, and their replays.

    Args:
        stale: have the builders fill other tensors than those that were captured, which must be noticed.

    Attributes:
        replayed: by size and by requests: how many steps.
    """

    def __init__(self, llm: Any, *, stale: bool = False) -> None:
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, prepare_inputs_to_capture

        self._runner = runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        self._layers = {
            name: one for name, one in runner.compilation_config.static_forward_context.items() if hasattr(one, "impl")
        }
        self.replayed: dict[tuple[int, int], int] = {}
        self._tapes: dict[tuple[int, str], tuple[tuple[Tensor, ...], Tape]] = {}
        self._metadata: dict[int, Any] = {}
        for size in reversed(SIZES):  # as vLLM does
            for captures in (False, True):  # it warms up before
                self._metadata[size], _ = prepare_inputs_to_capture(
                    size, size, runner.model_state, runner.input_buffers, runner.block_tables, runner.attn_groups,
                    runner.kv_cache_config, full_cudagraph=True, max_query_len=1,
                )  # fmt: skip
                with torch.inference_mode():
                    for name in self._layers:
                        self._capture(size, name, captures=captures)
        for groups in runner.attn_groups if stale else ():
            for group in groups:
                _refresh(group.get_metadata_builder())
        manager, dispatch = runner.cudagraph_manager, runner.cudagraph_manager.dispatch

        def dispatched(num_reqs: int, num_tokens: int, uniform_token_count: int | None, *more: Any, **named: Any) -> Any:
            size = next((size for size in SIZES if size >= num_reqs), None)
            if uniform_token_count != 1 or size is None:
                return dispatch(num_reqs, num_tokens, uniform_token_count, *more, **named)
            self.replayed[size, num_reqs] = self.replayed.get((size, num_reqs), 0) + 1
            return BatchExecutionDescriptor(CUDAGraphMode.FULL, size, size, 1)

        manager.dispatch, manager.run_fullgraph = dispatched, self._replay

    def _capture(self, size: int, name: str, *, captures: bool) -> None:
        """Call a layer's attention with nobody's tokens, and keep the call."""
        layer = self._layers[name]
        impl, cache = layer.impl, layer.kv_cache
        heads = (impl.num_heads, impl.num_kv_heads, impl.num_kv_heads, impl.num_heads)
        tensors = tuple(torch.randn(size, count, impl.head_size) for count in heads)
        live = cache[1:].view(torch.uint8)
        before = live.clone()

        def call() -> None:
            impl.forward(layer, *tensors[:3], cache, self._metadata[size][name], tensors[3])

        if captures:
            self._tapes[size, name] = tensors, Tape(call)
        else:
            call()
        assert not captures or torch.equal(before, live), "nobody's tokens change a block"

    def _replay(self, desc: Any) -> Tensor:
        """Run the model with the layers' tapes in place of their attention."""
        from vllm.forward_context import set_forward_context

        runner, size = self._runner, desc.num_tokens
        buffers = runner.input_buffers

        def forward(impl: Any, layer: Any, *given: Any, output: Tensor, **more: Any) -> Tensor:
            tensors, tape = self._tapes[size, layer.layer_name]
            for own, new in zip(tensors[:3], given[:3], strict=True):
                own.copy_(new.view_as(own))
            tape.replay()
            return output.copy_(tensors[3].view_as(output))

        (kind,) = {type(layer.impl) for layer in self._layers.values()}
        with (
            mock.patch.object(kind, "forward", forward),
            set_forward_context(self._metadata[size], runner.vllm_config, num_tokens=size),
        ):
            found: Tensor = runner.model(input_ids=buffers.input_ids[:size], positions=buffers.positions[:size])
        return found
