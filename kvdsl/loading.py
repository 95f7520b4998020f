"""Compile a policy and import its cache class in one step."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kvdsl.build.cache import cache_folder, writable
from kvdsl.errors import KvdslError

if TYPE_CHECKING:
    from kvdsl.runtime.hf import KVCache


def load(policy: str | Path, **settings: Any) -> type[KVCache]:
    """The cache class of a shipped policy (`"h2o"`) or of a .kv file.

    The package goes into kvdsl's cache folder, so that a second call finds it there.

    Args:
        settings: defaults of params to change, as `--set` does.

    Raises:
        DiagnosticError: if there is no such policy, or if it has errors; the text lists them.
        KvdslError: if the cache folder cannot be written to.
    """
    from kvdsl.emit.package import compile_file

    compiled = compile_file(policy, {name: str(value) for name, value in settings.items()})
    files, stem = compiled.files, compiled.policy.stem
    digest = hashlib.sha256("\0".join(files[key] for key in sorted(files)).encode()).hexdigest()[:16]
    folder = cache_folder() / "packages" / f"{stem}-{digest}"
    if not (folder / "manifest.json").exists():
        _publish(files, folder)
    cache_class: type[KVCache] = getattr(_import(folder, f"_kvdsl_{stem}_{digest}"), f"{compiled.policy.name}Cache")
    return cache_class


def _publish(files: dict[str, str], folder: Path) -> None:
    """Write the package into a private folder and rename that: another process sees all of it or nothing."""
    from kvdsl.emit.render import write

    writable(folder.parent)
    try:
        with tempfile.TemporaryDirectory(prefix="writing-", dir=folder.parent) as private:
            write(files, Path(private) / folder.name)
            with contextlib.suppress(OSError):  # somebody else was faster, with the same files
                os.rename(Path(private) / folder.name, folder)
    except OSError as error:
        raise KvdslError(f"cannot write to {folder} ({error.strerror}); set KVDSL_CACHE_DIR to another folder") from error


def _import(folder: Path, name: str) -> ModuleType:
    """Import the folder as a package of this name, once a process."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
