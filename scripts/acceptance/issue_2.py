"""The main path: a policy file becomes a cache that generates text."""

from __future__ import annotations

import json
import tempfile
import time
from functools import lru_cache
from typing import Any

from acceptance.registry import Measured, at_least, below, criterion, kvdsl_json, median_seconds, run

POLICIES = ("full", "random", "window", "h2o", "scissorhands", "tova", "roco", "vatp_h2o", "streaming_llm")


# -- the commands ------------------------------------------------------------------------------------------------------


@criterion(2, "make demo: exit code, seconds")
def _demo() -> Measured:
    begun = time.perf_counter()
    done = run("scripts/demo.py")
    taken = time.perf_counter() - begun
    return f"exit {done.returncode}, {taken:.0f} s", "exit 0, < 60 s", done.returncode == 0 and taken < 60


@criterion(2, "kvdsl check: seconds")
def _check_time() -> Measured:
    return below(median_seconds("-m", "kvdsl", "check", "policies/roco.kv"), 0.5, " s")


@criterion(2, "kvdsl compile roco.kv: seconds")
def _compile_time() -> Measured:
    with tempfile.TemporaryDirectory() as out:
        return below(median_seconds("-m", "kvdsl", "compile", "policies/roco.kv", "--out", out), 1.0, " s")


@lru_cache
def _build_times() -> dict[str, float]:
    """Seconds by policy, in a cache of its own; and of the driver, which is built first."""
    code = (
        "import json, sys, time, kvdsl; from kvdsl.build.cxx import driver_objects, kernel_library\n"
        "begun = time.perf_counter(); driver_objects(); times = {'driver': time.perf_counter() - begun}\n"
        "for name in sys.argv[1:]:\n"
        "    spec = kvdsl.load(name).spec\n"
        "    if spec.cpu_source.exists():\n"
        "        begun = time.perf_counter(); kernel_library(spec.cpu_source, spec.stem); times[name] = time.perf_counter() - begun\n"
        "print(json.dumps(times))"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = run("-c", code, *POLICIES, env={"KVDSL_CACHE_DIR": folder})
    times: dict[str, float] = json.loads(done.stdout)
    return times


@criterion(2, "the slowest C++ build of a shipped policy, the driver being there: seconds")
def _build_time() -> Measured:
    times = {name: seconds for name, seconds in _build_times().items() if name != "driver"}
    worst = max(times, key=lambda name: times[name])
    return f"{times[worst]:.2f} ({worst})", "< 2 s", times[worst] < 2


@criterion(2, "the driver's build, once on a machine: seconds")
def _driver_time() -> Measured:
    return round(_build_times()["driver"], 2), "reported", True


# -- speed -------------------------------------------------------------------------------------------------------------


@lru_cache
def _decode(live: int, dtype: str, batch: int) -> dict[str, Any]:
    return kvdsl_json(
        "bench", "decode", "--policy", "roco", "--batch", str(batch), "--kv-heads", "8", "--group", "4", "--head-dim", "128",
        "--live", str(live), "--dtype", dtype, "--backend", "cpu",
    )  # fmt: skip


def _speed(name: str, key: str, live: int, dtype: str, batch: int, bound: float) -> None:
    @criterion(2, f"bench decode {name}: {key}")
    def _() -> Measured:
        found = _decode(live, dtype, batch)
        value, text, ok = at_least(found[key], bound)
        return f"{value:.3g} [{found[key + '_q1']:.3g} .. {found[key + '_q3']:.3g}]", text, ok


for _key, _bound in (("roofline", 0.75), ("vs_sdpa", 4), ("vs_grouped", 3), ("vs_eager", 40)):
    _speed("fp32, 4096 live, batch 8", _key, 4096, "fp32", 8, _bound)
for _key, _bound in (("roofline", 0.55), ("vs_sdpa", 10)):
    _speed("bf16, 8192 live, batch 8", _key, 8192, "bf16", 8, _bound)
_speed("fp32, 512 live, batch 1", "vs_sdpa", 512, "fp32", 1, 1.0)
