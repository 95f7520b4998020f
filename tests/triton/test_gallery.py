"""The gallery's kernels in Triton's interpreter, step-locked with the reference interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvdsl.compiler import plan_of
from kvdsl.runtime.gpu.backend import TritonBackend
from tests.differential.traces import Trace, run_policy
from tests.gallery.test_backends import STEMS, small
from tests.quick import few

from .interpreter import heads_for, with_kernels

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("small_blocks")]

TRACE = Trace(prompt=22, steps=4, batch=2, padding=2, layers=(2,), seed=4)


@pytest.mark.parametrize("stem", few(STEMS, "a2sf"))
def test_the_kernels_do_what_the_interpreter_does(stem: str, tmp_path: Path) -> None:
    if plan_of(small(stem)).triton is None:
        pytest.skip("torch alone serves it")
    spec = with_kernels(small(stem), tmp_path)
    assert spec is not None
    trace = replace(TRACE, kv_heads=heads_for(small(stem)))
    one = run_policy(small(stem), TritonBackend(spec, torch.device("cpu"), TRACE.dtype), trace, spec=spec)
    assert not one.failures, one.failures[0]
    assert one.steps and not one.refused
