"""Kernels are compiled ahead of time here, for GPUs that this machine does not have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import kvdsl
from kvdsl.errors import KvdslError
from kvdsl.memory import KV_DTYPES
from kvdsl.runtime.backends import choose
from kvdsl.runtime.gpu.build import Shape, build, parse_target
from kvdsl.runtime.gpu.kernels import kernels_of
from tests.cli.harness import run
from tests.differential.test_random import POLICIES

GPUS = "cuda:80,cuda:90,cuda:100,hip:gfx90a,hip:gfx942"
NEWEST = "cuda:90,hip:gfx942"
ON_ALL = ("roco", "streaming_llm", "sparcas", "scissorhands", "equip_h2o")
"""Between them they have what a kernel can have; of the other policies each is compiled for a GPU of one maker, in turn."""


def kernels_for(policy: str) -> list[str]:
    """What a policy needs: two for steps, or one instead; two before them if these attend to a selection; for prompts one if it observes
    them, another if it reduces over slots, and one if each head evicts by what its columns say. Torch serves a prompt's folds, and
    evictions that read keys.
    """
    spec = kvdsl.load(policy).spec
    wanted = {"look": spec.selects, "choose": spec.selects, "attend": True, "settle": True}
    wanted["at_once"] = "at_once" in kernels_of(spec.triton_source).KERNELS
    wanted |= {"over_slots": policy == "scissorhands", "observe": spec.reads_attention and policy != "lazy_answer"}
    by_columns = (
        spec.when == "both" and spec.victims == "own" and not spec.across and policy not in ("keydiff_answer", "rkv_answer")
    )
    wanted["settle_prompt"] = spec.bounded and by_columns
    return [kernel for kernel, is_there in wanted.items() if is_there]


MAY_SPILL = {("attend", "cuda:90", True): 80, ("attend", "cuda:80", True): 8, ("at_once", "cuda:90", False): 16}
"""Bytes that a kernel may spill, by target and by whether it turns keys; elsewhere none.

On Hopper, `attend` turns keys with two warps and lacks a few registers. An H200 takes a third less time for them than for four warps,
which spill nothing (decision 53). On an A100, ptxas spills two registers so that three programs fit on a multiprocessor. `at_once`, which
no step launches yet, may use 168 registers for the same reason; policies with many columns need four more.
"""


def allowed(kernel: str, target: str, *, turns: bool) -> int:
    """Return the bytes that a kernel may spill."""
    return MAY_SPILL.get((kernel, target, turns), 0)


@pytest.mark.nightly
@pytest.mark.parametrize("policy", POLICIES)
def test_kernels_compile_for_every_target_and_spill_next_to_nothing(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    gpus = GPUS if policy in ON_ALL else NEWEST.split(",")[POLICIES.index(policy) % 2]
    rope = ("--rope", "cached") if policy.startswith("equip") else ()  # as EQUIP's paper keeps keys
    rows = run(capsys, "build", policy, *rope, "--target", gpus, "--json").json()["rows"]
    assert [(row["target"], row["kernel"]) for row in rows] == [
        (gpu, kernel) for kernel in kernels_for(policy) for gpu in gpus.split(",")
    ]
    turns = kvdsl.load(policy).spec.compact
    assert all(row["spills"] <= allowed(row["kernel"], row["target"], turns=turns) for row in rows)
    assert all(0 < row["registers"] < 256 and 0 < row["shared_bytes"] < 100_000 for row in rows)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("statement", "kernels"),
    [
        ("cap hard", ["make_room"]),
        ("victims shared by heads", ["agree"]),
        ("storage blocks 16\npositions compact\nrope cached", ["attend", "take", "settle", "give_back"]),
        ("storage blocks 16\nselect top 8 by dot(q, k)", ["look", "attend", "settle"]),
        ("storage blocks 16\nselect top 8 by dot(q, k over sketch)\nsketch top 4 dims by abs(q) every 8 queries", ["look"]),
    ],
)
def test_what_no_shipped_policy_has(
    statement: str, kernels: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "p.kv"
    file.write_text(
        f'kv 1\npolicy P {{\n"a test"\nparam budget = 8\nscore sum(attn)\n{statement}\nkeep top 3 by std(attn)\n}}\n'
    )
    rows = run(capsys, "build", str(file), "--target", NEWEST, "--json").json()["rows"]
    ours = [row for row in rows if row["kernel"] in kernels]
    assert [row["kernel"] for row in ours] == [kernel for kernel in kernels for _ in NEWEST.split(",")]
    assert all(row["spills"] <= allowed(row["kernel"], row["target"], turns="compact" in statement) for row in ours)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("policy", "kernels"),
    [
        ("gkv", ["settle"]),
        ("raas", ["settle", "settle_prompt"]),
        ("snapstream", ["settle", "settle_prompt"]),
        ("infllm", ["look", "vote", "choose"]),
    ],
)
def test_slots_and_heads_compared_spill_nothing(capsys: pytest.CaptureFixture[str], policy: str, kernels: list[str]) -> None:
    """What only policies of the gallery have."""
    rows = run(capsys, "build", policy, "--target", NEWEST, "--json").json()["rows"]
    ours = [row for row in rows if row["kernel"] in kernels]
    assert [row["kernel"] for row in ours] == [kernel for kernel in kernels for _ in NEWEST.split(",")]
    assert not any(row["spills"] for row in ours)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("policy", "group", "head_dim", "dtype"),
    [
        ("roco", 1, 128, "bf16"), ("streaming_llm", 3, 64, "bf16"), ("sparcas", 4, 80, "fp16"),
        ("streaming_llm", 8, 96, "bf16"), ("roco", 4, 128, "fp32"), ("sparcas", 1, 64, "fp32"),
    ],
)  # fmt: skip
def test_other_shapes_spill_next_to_nothing(
    capsys: pytest.CaptureFixture[str], policy: str, group: int, head_dim: int, dtype: str
) -> None:
    """A few numbers that are kept over a loop. Tiles too large for the registers spill hundreds of bytes."""
    shape = ("--group", str(group), "--head-dim", str(head_dim), "--dtype", dtype)
    rows = run(capsys, "build", policy, *shape, "--target", NEWEST, "--json").json()["rows"]
    assert {row["kernel"] for row in rows} == set(kernels_for(policy))
    turns = kvdsl.load(policy).spec.compact
    assert all(row["spills"] <= max(32, allowed(row["kernel"], row["target"], turns=turns)) for row in rows)


@pytest.mark.nightly
@pytest.mark.parametrize("kv_dtype", [*KV_DTYPES[1:], "int8/int4"])
@pytest.mark.parametrize("policy", ["roco", "streaming_llm", "sparcas", "quest"])
def test_fewer_bits_spill_next_to_nothing(capsys: pytest.CaptureFixture[str], policy: str, kv_dtype: str) -> None:
    """Where a query attends to a selection: two numbers in `int4`, eight with keys in another type. Steps take two launches."""
    rows = run(capsys, "build", policy, "--kv-dtype", kv_dtype, "--target", "cuda:90", "--json").json()["rows"]
    assert [row["kernel"] for row in rows] == [kernel for kernel in kernels_for(policy) if kernel != "at_once"]
    most = {"int4": 8, "int8/int4": 32}.get(kv_dtype, 0)
    assert all(row["spills"] <= (most if row["kernel"] == "attend" else 0) for row in rows)


def test_build(capsys: pytest.CaptureFixture[str]) -> None:
    result = run(capsys, "build", "full", "--target", "cuda:90, hip:gfx942, cpu", code=0)
    lines = [line.split() for line in result.out.splitlines()]
    assert [line[:3] for line in lines[1:]] == [
        ["full", "attend", "cuda:90"],
        ["full", "attend", "hip:gfx942"],
        ["full", "settle", "cuda:90"],
        ["full", "settle", "hip:gfx942"],
        ["full", "decode", "cpu"],
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("full", "--target", "cuda:hopper"), "is no target"),
        (("full", "--target", "gfx942"), "is no target"),
        (("full", "--head-dim", "60"), "multiple of 16"),
        (("rocko",), "roco"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    result = run(capsys, "build", *words, code=2)
    assert message in result.err and "Traceback" not in result.err


def test_a_policy_without_kernels(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "p.kv"
    file.write_text('kv 1\npolicy P {\n"a test"\nparam budget = 8\nscore position\nvictims shared by layers\n}\n')
    result = run(capsys, "build", str(file), "--target", "cuda:90", code=2)
    assert "no Triton kernels" in result.err and "Traceback" not in result.err


def test_without_a_gpu_triton_serves_nothing() -> None:
    with pytest.raises(KvdslError, match="on a GPU, not on cpu"):
        choose(kvdsl.load("roco").spec, "triton", torch.device("cpu"), torch.float32)


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["roco", "equip_h2o", "sparcas"])
def test_a_step_of_some_rows_spills_nothing_more(policy: str) -> None:
    source, targets = kvdsl.load(policy).spec.triton_source, {name: parse_target(name) for name in NEWEST.split(",")}
    rows = list(build(policy, source, targets, Shape(some_rows=True)))
    assert {row.kernel for row in rows} == set(kernels_for(policy))
    turns = kvdsl.load(policy).spec.compact
    assert all(row.spills <= allowed(row.kernel, row.target, turns=turns) for row in rows)
