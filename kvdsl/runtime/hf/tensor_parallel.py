"""Which of a layer's KV heads this process has, under transformers' tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedModel

from kvdsl.errors import KvdslError
from kvdsl.runtime.spec import PolicySpec


def refuse_agreement(model: PreTrainedModel, spec: PolicySpec) -> None:
    """A process sees its own heads only.

    Raises:
        KvdslError: if the policy makes the heads of a layer agree, and these are spread over processes.
    """
    if (getattr(model, "_tp_size", None) or 1) > 1 and spec.agreement is not None:
        raise KvdslError(
            f"the KV heads of {spec.name} {spec.agreement}, but tensor parallelism spreads them over {model._tp_size} processes: load "
            f"the model without `tp_plan`, or choose a policy whose heads decide by themselves"
        )


def processes_of(model: PreTrainedModel) -> int:
    """Over how many processes the model's heads are spread."""
    return getattr(model, "_tp_size", None) or 1


def head_offset(model: PreTrainedModel, config: Any) -> Callable[[int], int]:
    """A function from the number of local KV heads to the first one's number in the whole layer.

    `random()` asks, since every head must draw the same numbers wherever it lives, and so do tensors of files.
    """
    processes = processes_of(model)

    def offset(local_heads: int) -> int:
        if processes == 1 or not dist.is_available() or not dist.is_initialized():
            return 0
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        if local_heads * processes != heads:
            raise KvdslError(
                f"{heads} KV heads do not divide evenly over {processes} processes ({local_heads} here): choose a tp_size that "
                f"divides {heads}"
            )
        return _rank(model) * local_heads

    return offset


def _rank(model: PreTrainedModel) -> int:
    """This process's place in the tensor-parallel group."""
    mesh = getattr(model, "_device_mesh", None)
    if mesh is None:
        return dist.get_rank() % int(model._tp_size)  # type: ignore[arg-type]
    return int(mesh.get_local_rank("tp") if mesh.ndim > 1 else mesh.get_local_rank())
