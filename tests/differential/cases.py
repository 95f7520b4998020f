"""Cases of named policies, by the comparison of `traces`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvdsl.ir.nodes import Policy
from kvdsl.runtime.backend import Backend
from kvdsl.runtime.backends import choose
from kvdsl.runtime.spec import PolicySpec

from .traces import Run, Tally, Trace


@dataclass(frozen=True)
class Case:
    """One random trace. Rows are left-padded by up to `padding` tokens; the prompt comes in `cuts` forwards, through `layers`
    layers from `layer` on. If there is `later`, a prompt of so many tokens follows the steps, and as many steps again; the second row
    has fewer of them, the third none. Prompts count as `expected` tokens at least. The backend's tensors are on `device`.
    """

    policy: str
    group: int = 2
    head_dim: int = 32
    value_dim: int | None = None
    batch: int = 1
    kv_heads: int = 2
    dtype: torch.dtype = torch.float32
    budget: float = 12
    prompt: int = 9
    steps: int = 12
    padding: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    inputs: str = "normal"
    seed: int = 0
    at_once: int = 1
    layer: int = 1
    layers: int = 1
    cuts: int = 1
    later: int = 0
    expected: int = 0
    rope: str | None = None
    given: tuple[tuple[str, float], ...] = ()
    slopes: bool = False
    kv_dtype: str = "model"
    device: str = "cpu"

    def __str__(self) -> str:
        shown = {k: v for k, v in self.__dict__.items() if v != Case.__dataclass_fields__[k].default}
        return "-".join(f"{k}={str(v).replace('torch.', '')}" for k, v in shown.items())


def compare(policy: Policy, spec: PolicySpec, backend: str | Backend, case: Case) -> Tally:
    """Run one case on a backend and, step by step, in the interpreter.

    Args:
        policy: with its state columns.
    """
    given = {
        name: value
        for name, value in vars(case).items()
        if name not in ("policy", "layer", "layers", "cuts", "rope", "budget")
    }
    trace = Trace(
        **given,
        layers=tuple(range(case.layer, case.layer + case.layers)),
        chunks=case.cuts,
        rope=case.rope or "none",
        budget=case.budget if "budget" in spec.params else None,
    )
    spec = spec.laid_out(kv_dtype=case.kv_dtype)
    served = choose(spec, backend, torch.device(case.device), case.dtype) if isinstance(backend, str) else backend
    run = Run(policy, spec, served, trace)
    run.run()
    return run.tally
