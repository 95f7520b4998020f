"""Every name that the checker accepts gives Python and C++ that work; the rest it refuses."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from kvdsl.build.cxx import INCLUDE
from kvdsl.compiler import analyse
from kvdsl.emit.package import package
from kvdsl.source import SourceFile

KEYWORDS = "struct union int float new class template this operator and bitand co_await char8_t"
MACROS = "NULL EOF M_PI M_E CHAR_BIT INT_MAX UINT32_MAX SIZE_MAX RAND_MAX BUFSIZ EXIT_SUCCESS HUGE_VAL INFINITY NAN FP_NAN errno assert"
MACROS += " math_errhandling KVDSL_ABI stdin linux unix I"
CPP = "std kvdsl Head Query Column Number Policy Slot Group QueryOf params columns group settle place observe decode head row i seen"
CPP += " leaving score main exp fabs bf16 f16 isnan scratch_columns needs_attn"
PYTHON = "given capacity trigger slack max_drop numbers kernels_torch Tensor Given Any Path spec resolve super dict len self cls model"
PYTHON += " backend seed print None True lambda annotations KVCache PolicySpec keep slots torch View Columns Protection"
NAMES = sorted(set(f"{KEYWORDS} {MACROS} {CPP} {PYTHON}".split()))


def made(name: str, statement: str) -> dict[str, str] | None:
    """The package of a policy with such a name, or None if the checker refuses it."""
    text = f'kv 1\n\npolicy {name} {{\n  "Mine."\n  param budget = 512\n  {statement}\n}}\n'
    found = analyse(SourceFile("mine.kv", text, Path("mine.kv")))
    return package(found.policy, text) if found.ok else None


def check(files: dict[str, str], folder: Path) -> None:
    source = folder / "kernels.cpp"
    source.write_text(files["kernels_cpu.cpp"], encoding="utf-8")
    command = ["g++", "-std=c++17", "-fopenmp", "-fsyntax-only", f"-I{INCLUDE}", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name in ("__init__.py", "cache.py", "kernels_torch.py"):
        for node in ast.walk(ast.parse(files[name])):
            if isinstance(node, ast.Dict):
                keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
                assert len(keys) == len(set(keys)), f"{name} has a key twice: {keys}"
            if isinstance(node, ast.FunctionDef) and node.name == "resolve":
                hidden = {arg.arg for arg in node.args.args} & {
                    target.id for inner in ast.walk(node) if isinstance(inner, ast.Assign) for target in inner.targets
                    if isinstance(target, ast.Name)
                }  # fmt: skip
                assert not hidden, f"{name} hides {hidden}"


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", NAMES)
def test_policy_names(name: str, tmp_path: Path) -> None:
    files = made(name, "score mean(attn)")
    if files is not None:
        check(files, tmp_path)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", NAMES)
def test_param_names(name: str, tmp_path: Path) -> None:
    files = made("Mine", f"param {name} = 3\n  score mean(attn) * {name}\n  keep first {name}\n  trigger overflow >= 2\n  slack 1")
    if files is not None:
        check(files, tmp_path)


@pytest.mark.parametrize("doc", ['""', '" "', '"\\n\\n"', None])
def test_a_policy_without_words(doc: str | None) -> None:
    text = f"kv 1\n\npolicy Mine {{\n  {doc or ''}\n  param budget = 512\n  score mean(attn)\n}}\n"
    found = analyse(SourceFile("mine.kv", text, Path("mine.kv")))
    assert found.ok
    ast.parse(package(found.policy, text)["cache.py"])
