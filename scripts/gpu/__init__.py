"""What needs a GPU: experiments for fifteen minutes. `make gpu`, or `python -m scripts.gpu --only step,right`.

Each experiment has a question and a deadline, and runs in a process of its own, so that one that hangs takes no other along. What it finds
is in OUT/NAME.jsonl as soon as it is known; when it ends OUT/experiments.jsonl gets one line of all that. OUT is the folder that the
variable OUT names, or results/GPU. `--list` names the experiments, and those that lack code. Torch and Triton are all they take, and
transformers or vLLM for whole models; `make generate`, where kvdsl is installed, writes the policies that generated/ lacks.
Kernels are compiled when they first run: Triton finds a cache made elsewhere only by a key that hashes its own files, so none travels.
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
