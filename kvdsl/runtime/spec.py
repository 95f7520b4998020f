"""What a generated package tells the runtime about its policy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from kvdsl.runtime.given import Given

ABI = 1
"""Generated code states the runtime interface that it was made for; `PolicySpec` refuses another."""


@dataclass(frozen=True)
class PolicySpec:
    """One policy, as its generated package describes it.

    Attributes:
        name: the published spelling, for messages.
        stem: the package's name.
        params: the names of the policy's params, in the order of the constructor.
        numbers: every number that the kernels read per row, in the order of `SlotState.numbers`.
        resolve: from what the user gave to `numbers` by name, float64 [batch] each. A policy that evicts has `capacity`: the
            tokens kept per KV head after a settle.
        columns: names of the state columns.
        column_rules: how each is kept up to date: `sum`, `squares`, `max`, `min`, `last` or `token`.
        bounded: whether the policy ever evicts.
        group: how a group's query heads are reduced: `mean`, `max` or `sum`.
        reads_attention: whether the policy looks at attention at all; one that does not is served by any attention.
        torch_kernels: the generated torch functions (`kvdsl.runtime.torch_backend` documents them).
        cpu_source: the generated C++ file.
        abi: the runtime interface that the package was generated for.
    """

    name: str
    stem: str
    params: tuple[str, ...]
    numbers: tuple[str, ...]
    resolve: Callable[[Given], dict[str, Tensor]]
    columns: tuple[str, ...]
    column_rules: tuple[str, ...]
    bounded: bool
    group: str
    reads_attention: bool
    torch_kernels: Any
    cpu_source: Path
    abi: int = ABI

    def __post_init__(self) -> None:
        if self.abi != ABI:
            raise ImportError(
                f"the generated package `{self.stem}` was made for runtime interface {self.abi}, this kvdsl has {ABI}: "
                f"run `kvdsl compile` on its .kv file again"
            )
