"""Kernels that are the same for every policy, and what makes them a policy's.

`choose` has those that select, `settle` those that place a token and evict, `prompt` those that observe a prompt. They call the functions
of `hooks`, and a generated `kernels_triton.py` defines those that its policy has otherwise. So `kernels_of` executes the kernels' modules
once more for each policy, and puts the policy's functions in place of those of `hooks`. Triton compiles what the globals of a kernel name,
so these functions are no arguments, and Triton's caches tell policies apart by the functions' text.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

FILES = ("choose", "settle", "prompt")
"""Modules beside this one with kernels."""


@lru_cache
def kernels_of(source: Path) -> Any:
    """Return the kernels of a generated `kernels_triton.py` by name, with its constants.

    Attributes:
        CONSTANTS: the kernels' constants that depend on the policy; `kvdsl.lower.triton.TritonPlan` explains some.
        All kernels in KERNELS; others are missing.
    """
    generated = vars(_module(f"{source.parent.name}.{source.stem}", source))
    # Up to Triton 3.5, the interpreter's functions share no base class with compiled ones.
    own = {name: x for name, x in generated.items() if hasattr(x, "fn")}
    found = {name: x for name, x in generated.items() if name.isupper()} | own
    for file in FILES:
        module = vars(_module(f"{source.parent.name}.{file}", Path(__file__).parent / f"{file}.py"))
        module.update(own)
        found |= {name: x for name, x in module.items() if name in generated["KERNELS"]}
    return SimpleNamespace(**found)


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
