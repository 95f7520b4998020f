"""What needs a GPU, in stages of a few minutes each: `make gpu`, or `python -m scripts.gpu --stage right`.

    compile  every kernel once, in as many processes as there are cores, so that later stages find them in Triton's cache
    right    are the kernels right? Against float64 and torch, with poisoned workspaces, twice, in CUDA graphs, in a whole model
    kernels  how fast is a decode step, captured for many layers, beside flash decoding; and a prompt beside flash attention
    model    a model of Llama-3-8B's shape with random weights: tokens a second, time to the first token, peak memory
    in_place the same model's tokens with caches that are overwritten in place and that are shifted, by batch and size

Every stage is a process of its own with a deadline: one that hangs takes no other along. Every result is a line of JSON, written when it is
known, in OUT/STAGE.jsonl; OUT is the folder that the variable OUT names, or results/GPU. Torch and Triton are all it takes, and
transformers for whole models; `make generate`, where kvdsl is installed, writes the policies that generated/ lacks.
`--toy` goes through the same at sizes for Triton's interpreter (TRITON_INTERPRET=1), where times mean nothing.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None

sys.path[:0] = [str(ROOT), str(ROOT / "lab")]  # nothing need be installed
if not HAS_TRANSFORMERS:  # the kernels do without; generated packages import their base class
    _stand_in = ModuleType("kvdsl.runtime.hf")
    _stand_in.KVCache = object  # type: ignore[attr-defined]
    sys.modules[_stand_in.__name__] = _stand_in
