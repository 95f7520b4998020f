"""The rotation of keys in a model that vLLM runs, for policies with compact positions."""

from __future__ import annotations

from typing import Any

import torch

from kvdsl.errors import KvdslError
from kvdsl.runtime.rope import Rope


def rotation(config: Any, head_size: int) -> Rope:
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
    dims = torch.arange(
        0, head_size, 2, dtype=torch.int64, device="cpu"
    )  # vLLM makes layers with a GPU as the default device
    frequencies = 1.0 / told["rope_theta"] ** (dims.float() / head_size)
    return Rope(frequencies.double(), "half")
