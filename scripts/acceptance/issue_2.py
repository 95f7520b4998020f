"""The main path: a policy file becomes a cache that generates text."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from acceptance.registry import (
    Case,
    Measured,
    all_pass,
    at_least,
    below,
    criterion,
    kvdsl_json,
    median_seconds,
    run,
    test_cases,
    tests,
)

POLICIES = ("full", "random", "window", "h2o", "scissorhands", "tova", "roco", "vatp_h2o", "streaming_llm")


@criterion(2, "make test: the whole suite, slow tests included")
def _everything() -> Measured:
    return all_pass(tests("tests"), 300)


# -- the commands ------------------------------------------------------------------------------------------------------


@criterion(2, "make demo: exit code, seconds")
def _demo() -> Measured:
    begun = time.perf_counter()
    done = run("-m", "kvdsl_lab.demo")
    taken = time.perf_counter() - begun
    return f"exit {done.returncode}, {taken:.0f} s", "exit 0, < 60 s", done.returncode == 0 and taken < 60


@criterion(2, "kvdsl check: seconds")
def _check_time() -> Measured:
    return below(median_seconds("-m", "kvdsl", "check", "policies/roco.kv"), 0.5, " s")


@criterion(2, "kvdsl check imports neither torch nor transformers")
def _check_imports() -> Measured:
    code = (
        "import sys, kvdsl.cli; status = kvdsl.cli.main(['check', 'policies/roco.kv']); "
        "found = [name for name in ('torch', 'transformers') if name in sys.modules]; print(status, *found)"
    )
    found = run("-c", code).stdout.splitlines()[-1].split()
    return " ".join(found[1:]) or "none", "none", found == ["0"]


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


@criterion(2, "a C++ build says so, once")
def _build_message() -> Measured:
    code = (
        "import kvdsl; from kvdsl.build.cxx import kernel_library as b; s = kvdsl.load('roco').spec; b(s.cpu_source, s.stem)"
    )
    with tempfile.TemporaryDirectory() as folder:
        lines = [len(run("-c", code, env={"KVDSL_CACHE_DIR": folder}).stderr.splitlines()) for _ in range(2)]
    return f"{lines[0]} line, then {lines[1]}", "1 line, then 0", lines == [1, 0]


_SCRATCH: dict[str, Callable[[Path], list[str]]] = {
    "unknown policy": lambda folder: ["run", "--policy", "rocko"],
    "unknown param": lambda folder: ["run", "--policy", "roco", "--set", "bugdet=3"],
    "unknown statement": lambda folder: [
        "check",
        _file(folder, "bad.kv", 'kv 1\npolicy Bad {\n  "Bad."\n  skore position\n}\n'),
    ],
    "missing file": lambda folder: ["compile", str(folder / "nothing.kv")],
    "budget 0": lambda folder: ["run", "--policy", "roco", "--set", "budget=0"],
    "budget -1": lambda folder: ["run", "--policy", "roco", "--set", "budget=-1"],
    "budget abc": lambda folder: ["run", "--policy", "roco", "--set", "budget=abc"],
    "keeps more than the budget": lambda folder: ["run", "--policy", "h2o", "--set", "budget=8", "--set", "recent=20"],
    "no such model": lambda folder: ["run", "--model", str(folder / "model")],
}


def _file(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


@criterion(2, "mistakes: one clear message, an exit code, no traceback")
def _mistakes() -> Measured:
    wrong = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, words in _SCRATCH.items():
            wrong += _complaints(label, words(folder), {})
        wrong += _complaints(
            "no compiler", ["run", "--backend", "cpu"], {"CXX": "no-such-compiler", "KVDSL_CACHE_DIR": name + "/x"}
        )
        blocked = _file(folder, "not-a-folder", "")
        wrong += _complaints(
            "cache folder that cannot be written", ["run", "--backend", "cpu"], {"KVDSL_CACHE_DIR": blocked}
        )
    return "; ".join(wrong) or f"{len(_SCRATCH) + 2} clear", "all clear", not wrong


def _complaints(label: str, words: list[str], env: dict[str, str]) -> list[str]:
    done = run("-m", "kvdsl", *words, env=env)
    if done.returncode not in (1, 2):
        return [f"{label}: exit {done.returncode}"]
    if "Traceback" in done.stderr or "internal error" in done.stderr:
        return [f"{label}: {done.stderr.strip().splitlines()[-1][:120]}"]
    return [] if done.stderr.strip() or done.stdout.strip() else [f"{label}: no message"]


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

# -- exactness ---------------------------------------------------------------------------------------------------------


@criterion(2, "budget >= length: largest difference of logits from DynamicCache, all policies, reference model")
def _logits() -> Measured:
    import torch
    from transformers import DynamicCache

    from kvdsl import load
    from kvdsl.generation.models import load_model, windows

    model, tokenizer = load_model(None)
    ids = windows(tokenizer, _book(), 160, 2)
    worst, at, tokens_differ = 0.0, "", 0
    with torch.inference_mode():
        wanted = _stepwise(model, ids, DynamicCache(config=model.config))
        for name in POLICIES:
            made: Any = load(name)
            found = _stepwise(model, ids, made(model, **({"budget": 512} if "budget" in made.spec.params else {})))
            difference = float((found - wanted).abs().max())
            worst, at = max((worst, at), (difference, name))
            tokens_differ += int((found.argmax(-1) != wanted.argmax(-1)).sum())
    return f"{worst:.2g} ({at}), {tokens_differ} other tokens", "<= 1e-4, 0", worst <= 1e-4 and tokens_differ == 0


def _book() -> str:
    from kvdsl_lab.assets import book_text

    return book_text()


def _stepwise(model: Any, ids: Any, cache: Any) -> Any:
    """Logits of a prompt of 120 tokens, then token by token."""
    import torch

    found = [model(input_ids=ids[:, :120], past_key_values=cache, use_cache=True).logits]
    found += [
        model(input_ids=ids[:, at : at + 1], past_key_values=cache, use_cache=True).logits for at in range(120, ids.shape[1])
    ]
    return torch.cat(found, 1).float()


@criterion(2, "budget >= length: every model family (tests/hf)")
def _families() -> Measured:
    return all_pass(tests("tests/hf"), 10)


@criterion(2, "differential tests against the interpreter")
def _differential() -> Measured:
    counts = tests("tests/differential")
    from tests.differential.test_random import CASES_PER_POLICY

    runs = [
        case for case in test_cases("tests/differential") if "test_random_traces" in case.name and case.outcome == "passed"
    ]
    cases = CASES_PER_POLICY * len(runs)
    near, steps = (_recorded(runs, name) for name in ("near", "head_steps"))
    value = f"{cases} random cases; {counts}; {near} of {steps} head-steps near a boundary"
    return (
        value,
        ">= 300 cases for each backend, 0 failed, < 1 %",
        counts.failed == 0 and cases >= 600 and near < 0.01 * steps,
    )


def _recorded(cases: list[Case], name: str) -> int:
    return sum(int(value) for case in cases for key, value in case.recorded if key == name)


@criterion(2, "left-padded batches give each row what it gets alone")
def _padding() -> Measured:
    return all_pass(tests("tests/hf", named="padd"))


@criterion(2, "tensor parallelism over two processes")
def _tensor_parallel() -> Measured:
    return all_pass(tests("tests/hf", named="tensor_parallel|tp_plan|two_processes"))


@criterion(2, "nothing in a .kv file can inject code")
def _injection() -> Measured:
    return all_pass(tests("tests", named="inject|escap|hostile|untrusted"))


# -- memory ------------------------------------------------------------------------------------------------------------


@criterion(2, "2,000 generated tokens at budget 256: buffers that move, growth of the resident set")
def _memory() -> Measured:
    import torch

    from kvdsl import load
    from kvdsl.generation.models import load_model, windows

    model, tokenizer = load_model(None)
    made: Any = load("roco")
    cache = made(model, budget=256)
    step = windows(tokenizer, _book(), 40, 1)
    before: tuple[list[int], int] = ([], 0)
    with torch.inference_mode():
        for count in range(2001):
            step = model(input_ids=step, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
            if count == 400:
                before = _addresses(cache), _resident()
    moved = sum(a != b for a, b in zip(before[0], _addresses(cache), strict=True))
    grown = (_resident() - before[1]) / 2**20
    return f"{moved} moved, {grown:.1f} MiB", "0, < 4 MiB", moved == 0 and grown < 4


def _addresses(cache: Any) -> list[int]:
    states = [cache.layers[layer].state for layer in cache.managed]
    return [getattr(state, name).data_ptr() for state in states for name in state.TENSORS]


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
