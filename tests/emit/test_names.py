"""Every name that the checker accepts gives Python and C++ that work; the rest it refuses."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvdsl.build.cxx import INCLUDE
from kvdsl.compiler import analyse, package
from kvdsl.source import SourceFile
from tests.quick import few, thinned

KEYWORDS = "struct union int float new class template this operator and bitand co_await char8_t"
MACROS = "NULL EOF M_PI M_E CHAR_BIT INT_MAX UINT32_MAX SIZE_MAX RAND_MAX BUFSIZ EXIT_SUCCESS HUGE_VAL INFINITY NAN FP_NAN errno assert"
MACROS += " math_errhandling stdin linux unix I"
CPP = "std kvdsl Head Query Column Number Policy Slot Group QueryOf params columns group settle place observe decode head row i seen"
CPP += " leaving score main exp fabs bf16 f16 isnan scratch_columns needs_attn"
PYTHON = "given capacity trigger slack max_drop numbers kernels_torch Tensor Given Any Path spec resolve super dict len self cls model"
PYTHON += " backend seed print None True lambda annotations KVCache PolicySpec keep slots torch View Columns Protection"
NUMBERS = "budget prompt floor select page sketch sketch_dims sketch_every prefill_block size_attn_ring size_ attn_ring Ring ring inside"
NAMES = sorted(set(f"{KEYWORDS} {MACROS} {CPP} {PYTHON} {NUMBERS}".split()))
INCLUDES = re.compile(r"^#include .*$", re.MULTILINE)
KINDS = ("policy", "param", "selecting param")
OWN = (*KINDS, "given")


def made(name: str, statement: str) -> dict[str, str] | None:
    """The package of a policy with such a name, or None if the checker refuses it."""
    text = f'kv 1\n\npolicy {name} {{\n  "Mine."\n  param budget = 512\n  {statement}\n}}\n'
    found = analyse(SourceFile("mine.kv", text, Path("mine.kv")))
    return package(found.policy, text) if found.ok else None


def check_cpp(sources: dict[str, str], folder: Path) -> None:
    """Compile the kernels of many policies as one unit, each in a namespace of its own."""
    included = {line for text in sources.values() for line in INCLUDES.findall(text)}
    lines = sorted(included)
    for number, text in enumerate(sources.values()):
        body = INCLUDES.sub("", text).replace('extern "C"', 'extern "C++"')
        lines += [f"namespace unit_{number} {{", body, "}"]
    file = folder / "kernels.cpp"
    file.write_text("\n".join(lines), encoding="utf-8")
    command = ["g++", "-std=c++17", "-fopenmp", "-fsyntax-only", f"-I{INCLUDE}", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    errors = [line for line in done.stderr.splitlines() if "error: " in line]
    assert done.returncode == 0, f"{len(errors)} errors, first {errors[:10]}"


def check_python(text: str) -> None:
    """No name is assigned that has a meaning already, and no dict has a key twice."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            assert len(keys) == len(set(keys)), f"a key twice: {keys}"
        if isinstance(node, ast.FunctionDef) and node.name != "__init__":
            arguments = {arg.arg for arg in node.args.args}
            advanced = {
                id(inner.target) for inner in ast.walk(node) if isinstance(inner, ast.AugAssign)
            }  # pointer += offset
            stored = {
                inner.id
                for inner in ast.walk(node)
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store) and id(inner) not in advanced
            }
            assert not arguments & stored, f"{node.name} hides {arguments & stored}"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("kind", few(["policy", "param", "given"], "param"))
def test_accepted_names_work_in_cpp(kind: str, tmp_path: Path) -> None:
    packages = {name: made_as(kind, name) for name in NAMES}
    accepted = {name: files["kernels_cpu.cpp"] for name, files in packages.items() if files is not None}
    assert "main" in accepted
    assert len(accepted) < len(NAMES)
    check_cpp(accepted, tmp_path)


EVICTING = """\
param {name} = 3
  score mean(attn) * {name} + sum(attn over last {name} queries) - ema(attn, {name} / 4)
  keep first {name}
  trigger overflow >= 2
  slack 1
  layers {name}..
  prefill blocks of {name}
"""
SELECTING = """\
param {name} = 3
  score sum(attn)
  sketch top {name} dims by abs(q) * {name} every {name} queries
  select top 16 * {name} by dot(q, k over sketch) * {name} in layers {name}..
"""


GIVEN = """\
given {name}
  score max(k * {name} over dims) + mean(attn * {name}) - {name}
"""


def made_as(kind: str, name: str) -> dict[str, str] | None:
    if kind == "policy":
        return made(name, "score mean(attn)")
    statements = {"param": EVICTING, "selecting param": SELECTING, "given": GIVEN}
    return made("Mine", statements[kind].format(name=name))


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_the_runtime_are_names_that_a_param_may_have(kind: str) -> None:
    assert all(made_as(kind, name) for name in ("main", "select", "page", "sketch_dims", "prefill_block", "size_attn_ring"))


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("name", thinned(NAMES, 8))
def test_accepted_names_work_in_python(kind: str, name: str) -> None:
    for file, text in (made_as(kind, name) or {}).items():
        if file.endswith(".py"):
            check_python(text)


@pytest.mark.parametrize("doc", ['""', '" "', '"\\n\\n"', None])
def test_a_policy_without_words(doc: str | None) -> None:
    text = f"kv 1\n\npolicy Mine {{\n  {doc or ''}\n  param budget = 512\n  score mean(attn)\n}}\n"
    found = analyse(SourceFile("mine.kv", text, Path("mine.kv")))
    assert found.ok
    ast.parse(package(found.policy, text)["cache.py"])
