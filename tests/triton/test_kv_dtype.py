"""Keys and values in fewer bits, in Triton's interpreter: against the reference interpreter, and against the bytes that torch stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import pytest
import torch

from kvdsl.ir.printer import print_policy
from kvdsl.runtime.gpu.backend import TritonBackend
from kvdsl.runtime.state.undo import UndoLog
from tests.differential.cases import Case, compare
from tests.differential.test_kv_dtype import PACKED, drawn
from tests.differential.test_random import load
from tests.differential.traces import run_policy
from tests.quick import few
from tests.runtime.test_blocks import assert_same, folder
from tests.runtime.test_kv_dtype import made

from .interpreter import defined, with_kernels

__all__ = ["folder"]

pytestmark = pytest.mark.usefixtures("small_blocks")

SMALL = {"budget": 12, "prompt": 20, "steps": 5, "kv_heads": 1}
CASES = {
    "groups of dims": Case("roco", head_dim=64, value_dim=48, group=2, **SMALL),
    "padding": Case("roco", head_dim=80, batch=2, padding=3, sinks=True, softcap=5.0, **SMALL),
    "infinite": Case("tova", head_dim=32, inputs="inf", seed=44, **SMALL),
    "not finite, in part": Case("tova", head_dim=80, inputs="nan", seed=7, **SMALL),
    "compact": Case("streaming_llm", head_dim=64, rope="half", **SMALL),
    "compact, pairs side by side": Case("streaming_llm", head_dim=32, rope="interleaved", **SMALL),
    "compact, in part": Case("streaming_llm", head_dim=80, rope="partial", inputs="nan", **SMALL),
}


@pytest.mark.parametrize("kv_dtype", PACKED)
@pytest.mark.parametrize("name", few(CASES, "groups of dims", "compact"))
def test_shipped_policies(name: str, kv_dtype: str) -> None:
    case = replace(CASES[name], kv_dtype=kv_dtype, dtype=torch.float32)
    tally = compare(*load(case.policy), "triton", case)
    assert tally.steps and not tally.failures
