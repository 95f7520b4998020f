"""The language's names as Python objects, for policies written in Python: `from kvdsl.lang import attn, mean, norm1, v`.

Operators and calls build expressions, such as `mean(attn) * norm1(v)`. They have no value: they are printed as .kv and compiled from
that. `sum`, `max`, `min` and `abs` hide Python's own; `import kvdsl.lang as kv` avoids that: `kv.sum(kv.attn)`. The module has all
names of the table of operations and of the prelude, and imports neither torch nor transformers.
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
