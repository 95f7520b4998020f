"""The Triton backend, as far as it can be judged without a GPU, and decode steps under `torch.compile`."""

from __future__ import annotations

from acceptance.registry import Measured, NotMeasured, all_pass, criterion, interpreted, kvdsl_json, tests

GPUS = "cuda:80,cuda:90,cuda:100,hip:gfx90a,hip:gfx942"
POLICIES = ("full", "h2o", "roco", "scissorhands", "sparcas", "streaming_llm", "tova", "vatp_h2o")
_COMPILED = "tests/hf/test_compile.py"

# -- kernels -----------------------------------------------------------------------------------------------------------


@criterion(5, "ahead of time: registers and spills of every kernel on five targets")
def _ahead() -> Measured:
    rows = kvdsl_json("build", *POLICIES, "--target", GPUS)["rows"]
    spills, registers = sum(row["spills"] for row in rows), max(row["registers"] for row in rows)
    targets = len({row["target"] for row in rows})
    value = f"{len(rows)} kernels, {targets} targets, {spills} spills, at most {registers} registers"
    return value, "5 targets, 0 spills, < 256 registers", targets == 5 and spills == 0 and registers < 256


@criterion(
    5, "kernels of every policy against the reference interpreter, in Triton's interpreter; bytes and launches of a step"
)
def _kernels() -> Measured:
    return all_pass(interpreted("tests/triton"), 100)


@criterion(5, "building for GPUs that are not there: tests")
def _building() -> Measured:
    return all_pass(tests("tests/triton", "test_build"), 8)


@criterion(5, "on an H200: bytes over time, SDPA's flash decoding, a decode step in one CUDA graph")
def _gpu() -> Measured:
    raise NotMeasured("needs a GPU: `make gpu` there")


# -- torch.compile -----------------------------------------------------------------------------------------------------


def _compiled(name: str, named: str, least: int) -> None:
    @criterion(5, name)
    def _() -> Measured:
        return all_pass(tests(_COMPILED, named), least)


_compiled(
    "a decode step is one graph (fullgraph) with the tokens, slots and columns of an eager one",
    "is_an_eager_one|inductor",
    8,
)
_compiled("the operator's schema, shapes and functional form (torch.library.opcheck)", "operator_says", 3)
_compiled("transformers' auto-compilation in `generate`: one graph for all steps and caches", "generate", 2)
_compiled("caches that grow are refused or served outside of the graph", "grows", 3)
