"""vLLM's configuration as on an H100, which is played: what attention it takes, as JSON.

TRITON_INTERPRET=1 python -m tests.vllm.played_gpu [POLICY [ATTENTION]]
"""

from __future__ import annotations

import json
import sys
import types
from typing import Any
from unittest import mock

import torch
import vllm.platforms

import kvdsl.integrations.vllm.attention as attention
from kvdsl.integrations.vllm import answers_on_gpus, backend, register  # noqa: F401 - before a GPU is played, see `hopper`
from tests.vllm import conftest  # noqa: F401 - how the engine runs


def hopper() -> Any:
    """A platform that says of itself what an H100 would. kvdsl's modules come first: for GPUs vLLM would want more of its own kernels."""
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")  # a release for CPUs has none
    from vllm.platforms.cuda import CudaPlatform
    from vllm.platforms.interface import DeviceCapability

    says = {"capability": DeviceCapability(9, 0), "name": "NVIDIA H100", "total_memory": 80 << 30}
    methods = {f"get_device_{name}": staticmethod(lambda device_id=0, said=said: said) for name, said in says.items()}
    return type("Hopper", (CudaPlatform,), methods | {"device_count": staticmethod(lambda: 1)})()


def chosen(policy: str | None, named: str | None) -> dict[str, Any]:
    """The attention's classes for layers of several kinds, and what serves a layer's pages."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.selector import get_attn_backend

    from kvdsl_lab.assets import reference_model_path

    asked = {} if policy is None else {"kvdsl": {"policy": policy}}
    wanted = EngineArgs(
        str(reference_model_path()), dtype="bfloat16", max_model_len=256, additional_config=asked, attention_backend=named
    )
    with set_current_vllm_config(wanted.create_engine_config()):
        kinds = ((sink, window) for sink in (False, True) for window in (False, True))
        found = {
            get_attn_backend(64, torch.bfloat16, "auto", has_sink=sink, has_sliding_window=window) for sink, window in kinds
        }
        ours = all(one.__module__.startswith("kvdsl.") for one in found)
        served = _layer(next(iter(found)).get_impl_cls()) if ours else None
    return {"attention": sorted(one.__name__ for one in found), "ours": ours, "served": served}


def _layer(cls: type[Any]) -> list[str]:
    """A layer is made where tensors are made on the device, whose tensors can be neither read nor seen here."""
    with torch.device("meta"), mock.patch.object(attention, "get_tensor_model_parallel_rank", lambda: 0):
        made = cls(8, 64, 0.125, 4)
    return [type(made._backend).__name__, type(made.caches if hasattr(made, "caches") else made.room).__name__]


if __name__ == "__main__":
    vllm.platforms._current_platform = attention.current_platform = hopper()
    register()
    register()
    policy, named, *_ = *sys.argv[1:], None, None
    try:
        print("told:", json.dumps(chosen(policy, named)))
    except ValueError as error:  # KvdslErrors, and those that pydantic wraps
        print("told:", json.dumps({"refused": str(error)}))
