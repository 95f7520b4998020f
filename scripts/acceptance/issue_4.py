"""The whole language, and every policy of the papers."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

from acceptance.registry import REPO, Measured, NotMeasured, all_pass, criterion, kvdsl_json, run, tests

POLICIES = (
    "full", "random", "window", "streaming_llm", "lazy_streaming", "h2o", "scissorhands", "scissorhands_window", "tova", "roco",
    "vatp_h2o", "vatp_scissorhands", "snapkv", "pyramidkv", "adakv", "knorm", "sparcas", "quest", "equip_streaming", "equip_h2o",
    "roco_easykv", "vatp_code", "vatp_roco", "roco_sparcas",
)  # fmt: skip
MAX_STATEMENTS = 12
RESULTS = REPO / "benchmarks/results/fuzz"

# -- policies ----------------------------------------------------------------------------------------------------------


@criterion(4, "every policy of the issue is shipped, checks without errors and cites its source")
def _shipped() -> Measured:
    listed = {row["name"]: row for row in kvdsl_json("list")["policies"]}
    stems = {row["file"].rsplit("/", 1)[-1].removesuffix(".kv") for row in listed.values()}
    missing = [stem for stem in POLICIES if stem not in stems]
    done = run("-m", "kvdsl", "check", *(f"policies/{stem}.kv" for stem in POLICIES if stem not in missing))
    return (
        f"{len(POLICIES) - len(missing)} of {len(POLICIES)}, check exits {done.returncode}",
        "all, 0",
        (not missing and done.returncode == 0),
    )


@criterion(4, "every policy compiles and generates with `kvdsl run` on the reference model")
def _runs() -> Measured:
    wrong = []
    for stem in POLICIES:
        done = run("-m", "kvdsl", "run", "--policy", stem, "--max-new-tokens", "8", "--json")
        if done.returncode or json.loads(done.stdout)["new_tokens"] < 1:
            wrong.append(f"{stem}: exit {done.returncode}")
    return "; ".join(wrong) or f"{len(POLICIES)} run", "all", not wrong


@criterion(4, "every policy's *_test.kv passes")
def _scenarios() -> Measured:
    files = [f"policies/{stem}_test.kv" for stem in POLICIES]
    absent = [name for name in files if not (REPO / name).exists()]
    done = run("-m", "kvdsl", "test", *(name for name in files if name not in absent))
    last = done.stdout.strip().splitlines()[-1]
    return f"{last}; {len(absent)} files missing", "0 failed, 0 missing", done.returncode == 0 and not absent


@criterion(4, "every policy against the paper's formula by brute force, on random logits")
def _papers() -> Measured:
    return all_pass(tests("tests/interp", "test_papers"), len(POLICIES))


@criterion(4, "statements of the longest shipped policy, without what it inherits")
def _statements() -> Measured:
    from kvdsl.diagnostics import Sink
    from kvdsl.source import SourceFile
    from kvdsl.syntax.shape import parse_module

    counts = {}
    for stem in POLICIES:
        text = (REPO / f"policies/{stem}.kv").read_text(encoding="utf-8")
        for policy in parse_module(SourceFile(stem, text), Sink()).policies:
            counts[stem] = len(policy.statements)
    worst = max(counts, key=lambda stem: counts[stem])
    return f"{counts[worst]} ({worst})", f"<= {MAX_STATEMENTS}", counts[worst] <= MAX_STATEMENTS


@criterion(4, "illegal combinations are refused by check, each with a code")
def _illegal() -> Measured:
    return all_pass(tests("tests/sema", "test_combinations"), 30)


@criterion(4, "every diagnostic's example fails with it")
def _codes() -> Measured:
    return all_pass(tests("tests/diagnostics", "test_codes"), 50)


@criterion(4, "the examples of README and docs, the tutorial's own policy on every backend")
def _docs() -> Measured:
    return all_pass(tests("tests/docs"), 10)


# -- random policies and inputs ----------------------------------------------------------------------------------------


@criterion(4, "300 random policies and more, as CI runs them")
def _random() -> Measured:
    return all_pass(tests("tests/differential", "test_policies"))


@lru_cache
def _long_run(name: str) -> dict[str, Any]:
    """A long run's result, which is committed: it takes an hour."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise NotMeasured(f"there is no {path.relative_to(REPO)}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _differences(name: str, least: int) -> None:
    @criterion(4, f"a long run of random policies, {name}: policies, steps near a boundary, differences (committed result)")
    def _() -> Measured:
        found = _long_run(f"policies_{name}")
        value = (
            f"{found['policies']:,} policies, {found['natural_inputs']['near_share']:.2%} near, {found['failures']} differ"
        )
        return value, f">= {least:,}, 0 differ", found["policies"] >= least and found["failures"] == 0


_differences("torch", 50_000)
_differences("cpu", 3_000)


@criterion(4, "mutated inputs through check: inputs, failures, the slowest in seconds (committed result)")
def _inputs() -> Measured:
    found = _long_run("check")
    slowest = max(one["s"] for one in found["slowest"])
    return (
        f"{found['inputs']:,} inputs, {found['failed']} failures, {slowest:.2f} s",
        ">= 1,000,000, 0, <= 1 s",
        found["inputs"] >= 1_000_000 and found["failed"] == 0 and slowest <= 1,
    )
