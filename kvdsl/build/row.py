"""What came of building a kernel, for any processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdsl.runtime.gpu.report import Taken


@dataclass(frozen=True)
class Row:
    """What one kernel takes of one target.

    Attributes:
        policy, kernel: `attend`, which policies share, or `settle`; where a query attends to a selection `look` and `choose`, too,
            under a hard cap `make_room`, `agree` where heads do, and `take` and `give_back` where slots lie in blocks; for prompts
            `observe`, `over_slots` before it where values over slots are reduced, and behind it `settle_prompt`.
        registers: of a thread. shared_bytes: of a program. spills: bytes (on AMD registers) that do not
            fit in there.
        ms: how long compiling took; 0 if it had been done.
        taken: what the machine code says, if asked for.
    """

    policy: str
    kernel: str
    target: str
    registers: int | None
    shared_bytes: int | None
    spills: int | None
    ms: float
    taken: Taken | None = None
