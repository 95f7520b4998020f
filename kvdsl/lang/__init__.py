"""The language's own names as objects of Python, for policies that are written there: `from kvdsl.lang import attn, mean, norm1, v`.

An operator or a call of them makes an expression, `mean(attn) * norm1(v)`, which has no value: it is printed as .kv, and compiled from
there. `sum`, `max`, `min` and `abs` hide Python's own; `import kvdsl.lang as kv` leaves these alone, `kv.sum(kv.attn)`.
Imports neither torch nor transformers. All names of the table of operations are here, and those of the prelude.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvdsl.files import read_resource
from kvdsl.ir.ops import NAMED_FUNCTIONS, NAMED_INPUTS
from kvdsl.lang.expressions import Expression, MisusedError, OtherSlot, name
from kvdsl.sema.editions import FUNCTIONS

if TYPE_CHECKING:

    def __getattr__(text: str) -> Expression: ...


_PRELUDE = re.findall(r"^let (\w+)", read_resource("grammar", "prelude.kv"), re.MULTILINE)
_NAMES = {one: name(one) for one in sorted({*NAMED_INPUTS, *NAMED_FUNCTIONS, *_PRELUDE, "prev"} - FUNCTIONS.keys())}

globals().update(_NAMES)
__all__ = ["Expression", "MisusedError", "OtherSlot", "name", *_NAMES]
