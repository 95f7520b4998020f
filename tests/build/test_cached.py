"""What else lies in the cache folder, packages and the grammar's tables: used only as it was made."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvdsl
from kvdsl.build import cache_folder
from kvdsl.build.store import SEAL, flaw
from kvdsl.syntax import parser
from tests.build.left import left


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVDSL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _load() -> Path:
    """Import a policy as a new process would; the folder of its package."""
    for name in [name for name in sys.modules if name.startswith("_kvdsl_knorm_")]:
        del sys.modules[name]
    kvdsl.load("knorm")
    folder = cache_folder() / "packages"
    (package,) = (folder / name for name in left(folder))
    return package


def _empty(package: Path) -> None:
    for file in package.iterdir():
        file.unlink()


def _zero(name: str) -> Callable[[Path], None]:
    def damage(package: Path) -> None:
        (package / name).write_bytes(bytes((package / name).stat().st_size))

    return damage


@pytest.mark.parametrize(
    "damage",
    [_empty, *map(_zero, ("__init__.py", "cache.py", "kernels_torch.py", "kernels_cpu.cpp", "manifest.json", SEAL))],
)
def test_a_damaged_package_is_made_again(damage: Callable[[Path], None]) -> None:
    package = _load()
    files = {file.name: file.read_bytes() for file in package.iterdir()}
    damage(package)
    assert {file.name: file.read_bytes() for file in _load().iterdir()} == files


def test_bytecode_beside_a_package_is_neither_left_nor_read() -> None:
    package = _load()
    assert {"__init__.py", SEAL} <= set(os.listdir(package))
    assert "__pycache__" not in os.listdir(package)
    (package / "__pycache__").mkdir()
    for name in ("__init__", "cache", "kernels_torch"):
        (package / "__pycache__" / f"{name}.{sys.implementation.cache_tag}.pyc").write_bytes(b"half of it")
    _load()


def _tables() -> Path:
    """Read the grammar as a new process would; the file of its tables."""
    parser._grammar.cache_clear()
    parser._grammar()
    (tables,) = (cache_folder() / "grammar").glob("*/tables")
    return tables


def test_damaged_tables_are_made_again() -> None:
    content = _tables().read_bytes()
    for damaged in (b"", content[:1000], bytes(len(content)), content.replace(b"SCORE", b"SCARE")):
        _tables().write_bytes(damaged)
        assert flaw(_tables().parent) is None


def test_the_grammar_needs_no_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDSL_CACHE_DIR", "/dev/null/below")
    parser._grammar.cache_clear()
    parser._grammar()
