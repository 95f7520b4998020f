"""Generated packages: complete, deterministic, and made of what the plan says."""

from __future__ import annotations

import ast
import hashlib
import json
from dataclasses import fields
from pathlib import Path

import jinja2
import pytest
from jinja2 import meta

from kvdsl.compiler import analyse, compile_file, shipped_policies
from kvdsl.emit import differing, environment, render, stale, write
from kvdsl.ir.nodes import Policy
from kvdsl.lower.plan import PackagePlan, make_plan
from kvdsl.source import SourceFile

TEMPLATES = (
    "python/cache.py.jinja",
    "python/__init__.py.jinja",
    "python/kernels_torch.py.jinja",
    "cpu/kernels_cpu.cpp.jinja",
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_read_only_what_the_plan_has(name: str) -> None:
    env = environment()
    source, _, _ = env.loader.get_source(env, name)  # type: ignore[union-attr]
    known = (
        {field.name for field in fields(PackagePlan)}
        | {"abi", "banner", "uses_torch", "resolve_uses_torch"}
        | {"tensors_file", "tensors_sha256"}
    )
    assert meta.find_undeclared_variables(env.parse(source)) <= known


def test_undefined_names_are_errors() -> None:
    with pytest.raises(jinja2.UndefinedError):
        environment().from_string("{{ nothing }}").render()


@pytest.mark.parametrize("path", shipped_policies(), ids=lambda path: path.stem)
def test_shipped_policies_render_the_same_twice(path: Path) -> None:
    first, second = (compile_file(path, {}).files for _ in range(2))
    assert first == second
    for name, text in first.items():
        if name.endswith(".py"):
            ast.parse(text)
        assert not any(line.endswith((" ", "\t")) for line in text.splitlines()), name
    manifest = json.loads(first["manifest.json"])
    for name, digest in manifest["files"].items():
        assert hashlib.sha256(first[name].encode()).hexdigest() == digest
    assert set(first) == {*manifest["files"], "manifest.json"}


def test_unchanged_files_are_left_alone(tmp_path: Path) -> None:
    files = compile_file("roco", {}).files
    assert sorted(write(files, tmp_path)) == sorted(files)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert write(files, tmp_path) == []
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    (tmp_path / "cache.py").write_text("changed")
    assert differing(files, tmp_path) == ["cache.py"]


def test_kernels_of_an_earlier_compilation_are_found(tmp_path: Path) -> None:
    files = compile_file("roco", {}).files
    write(files, tmp_path)
    assert stale(files, tmp_path) == []
    assert stale(set(files) - {"kernels_cpu.cpp"}, tmp_path) == ["kernels_cpu.cpp"]
    (tmp_path / "kernels_cpu.cpp").unlink()
    assert stale(set(files) - {"kernels_cpu.cpp"}, tmp_path) == []


def _policy(body: str) -> Policy:
    analysis = analyse(SourceFile("p.kv", f'kv 1\npolicy P {{\n"a test"\nparam budget = 8\n{body}\n}}\n'))
    assert analysis.ok, analysis.diagnostics
    return analysis.policy


def test_what_cpp_cannot_say_is_left_to_torch() -> None:
    plan = make_plan(_policy("score sum(dot(q, k) > mean(dot(q, k) over slots))"))
    assert plan.cpp is None
    assert "over slots" in plan.refusals["cpu"]
    assert "kernels_cpu.cpp" not in render(plan, "")


def test_numbers_are_only_what_kernels_read() -> None:
    plan = make_plan(_policy("param unread = 3 in 1..9\nscore sum(attn)\nkeep first prompt / 8\ntrigger overflow >= 4"))
    assert [name for name, _ in plan.numbers] == ["prompt", "capacity", "trigger"]
    assert 'unread = given.number("unread", 3, low=1, high=9)' in plan.resolve
