"""Many policies fit into one library."""

from __future__ import annotations

import ctypes
from pathlib import Path

from kvdsl.build.cxx import kernel_library
from kvdsl.compiler import compile_file


def test_many_policies_in_one_library(tmp_path: Path) -> None:
    """Each under a prefix of its own; policies of one name lie in namespaces of their own as well."""
    units = {stem: compile_file(stem, {}).files["kernels_cpu.cpp"] for stem in ("roco", "h2o", "scissorhands_window")}
    units["again"] = f"namespace again {{\n{units['roco']}}}\n"
    file = tmp_path / "many.cpp"
    defined = (f"#define KVDSL_ENTRY(name) {prefix}_##name\n{unit}#undef KVDSL_ENTRY\n" for prefix, unit in units.items())
    file.write_text("\n".join(defined), encoding="utf-8")
    library = ctypes.CDLL(str(kernel_library(file, "many")))
    assert all(hasattr(library, f"{prefix}_decode_{dtype}") for prefix in units for dtype in ("f32", "bf16", "f16"))
    assert not hasattr(library, "kvdsl_abi")
