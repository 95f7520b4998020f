"""The result of building a kernel, for any processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdsl.runtime.gpu.report import Taken


@dataclass(frozen=True)
class Row:
    """One kernel built for one target.

    Attributes:
        policy, kernel: `attend`, which policies share, or `settle`; `look` and `choose` for a selection, `make_room` under a hard cap,
            `agree` if heads agree, `take` and `give_back` for slots in blocks; for prompts `observe`, before it `over_slots` if values
            over slots are reduced, and after it `settle_prompt`.
        registers: of a thread. shared_bytes: of a program. spills: bytes (on AMD registers) that do not fit.
        ms: the time to compile; 0 if it was cached.
        taken: what the machine code uses, if requested.
    """

    policy: str
    kernel: str
    target: str
    registers: int | None
    shared_bytes: int | None
    spills: int | None
    ms: float
    taken: Taken | None = None
