"""Compile a policy and import its cache class in one step."""

from __future__ import annotations

import builtins
import hashlib
import importlib.util
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import FileFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from kvdsl.build import cache_folder
from kvdsl.build.store import entry
from kvdsl.errors import KvdslError, warn
from kvdsl.memory import OPTIONS
from kvdsl.source import Combined, SourceFile

if TYPE_CHECKING:
    from kvdsl.compiler import Compiled
    from kvdsl.ir.nodes import Policy
    from kvdsl.lang.policies import Policy as WrittenPolicy
    from kvdsl.runtime.hf import KVCache


def load(
    policy: str | Path | WrittenPolicy,
    /,
    *,
    storage: str | None = None,
    rope: str | None = None,
    kv_dtype: str | None = None,
    **settings: Any,
) -> type[KVCache]:
    """Return the cache class of a shipped policy (`"h2o"`), a .kv file, a `@kvdsl.policy`, or one in a Python file that is executed
    (`"mine.py:calm"`); each optionally with clauses, as in `"h2o with when prefill"`.

    The package is written to kvdsl's cache folder, where later calls find it. Warnings of `kvdsl check` become Python warnings.

    Args:
        storage, rope, kv_dtype: defaults for the constructor's options of memory layout.
        settings: new defaults of params, as `--set` sets them; `ratio=0.25` is a budget of a quarter of the prompt.

    Raises:
        DiagnosticError: if there is no such policy, or it has errors; the text lists them.
        KvdslError: if the cache folder cannot be written to, or the policy does not support the memory layout.
    """
    from kvdsl.compiler import compile_file

    compiled = compile_file(policy, {name: str(value) for name, value in settings.items()})
    return _laid_out(_with_warnings(compiled), storage=storage, rope=rope, kv_dtype=kv_dtype)


def compile(
    source: str,
    /,
    *,
    storage: str | None = None,
    rope: str | None = None,
    kv_dtype: str | None = None,
    **settings: Any,
) -> type[KVCache]:
    """Return the cache class of a policy in a string. Warnings of `kvdsl check` become Python warnings.

    Args:
        source: the text of a .kv file; imports start in the current folder.
        storage, rope, kv_dtype, settings: as for `load`.

    Raises:
        DiagnosticError: if the policy has errors; the text lists them.
        KvdslError: if the cache folder cannot be written to, or the policy does not support the memory layout.
    """
    from kvdsl.compiler import compile_text

    if isinstance(source, Path) or ("\n" not in source and Path(source).suffix == ".kv"):
        raise KvdslError(f"`{source}` is a file's name, not a policy; `kvdsl.load({str(source)!r})` compiles the file")
    compiled = compile_text(source, {name: str(value) for name, value in settings.items()})
    return _laid_out(_with_warnings(compiled), storage=storage, rope=rope, kv_dtype=kv_dtype)


def _laid_out(found: type[KVCache], **options: str | None) -> type[KVCache]:
    """Return the class, or a subclass with these options of memory layout as defaults."""
    spec = found.spec.laid_out(**options)
    if spec is found.spec:
        return found
    names = {"spec": spec, "__doc__": found.__doc__, "__module__": found.__module__, "__qualname__": found.__qualname__}
    made: type[KVCache] = type(found.__name__, (found,), names)
    assert isinstance(found.origin, Loaded)
    memory = {name: value for name, value in options.items() if value is not None}
    made.origin = Loaded(found.origin.source, {**found.origin.settings, **memory})
    return made


def _with_warnings(compiled: Compiled) -> type[KVCache]:
    """Return the class of a package; its diagnostics become Python warnings at the caller's line."""
    for found in compiled.diagnostics:
        line, _ = found.span.file.location(found.span.start)
        help = "" if found.help is None else f"; {found.help}"
        warn(f"{found.file}:{line}: {found.message}{help} ({found.code})")
    return cache_class(compiled)


@dataclass(frozen=True)
class Loaded:
    """The source and settings of a class returned by `load` or `compile`; see `kvdsl.runtime.hf.saving.Origin`."""

    source: SourceFile | Path
    settings: Mapping[str, str]

    def name(self, cache_class: type[KVCache]) -> str:
        """Return the name by which `load` finds the class again: `h2o`, `h2o with when prefill`."""
        return self.source.text if isinstance(self.source, Combined) else cache_class.spec.stem

    def with_clauses(self, cache_class: type[KVCache], clauses: str, settings: Mapping[str, Any]) -> type[KVCache]:
        """Return the class of the policy with clauses. All settings apply, except for params that the clauses change.

        Raises:
            DiagnosticError: if it has errors.
        """
        from kvdsl.compiler import compile_found
        from kvdsl.shipped import combine

        changed = set(re.findall(r"\bparam\s+(\w+)", clauses))
        if "budget" in changed or settings.keys() & {"budget", "ratio"}:
            changed |= {"budget"} if "ratio" in cache_class.spec.params else {"budget", "ratio"}
        kept = {name: value for name, value in self.settings.items() if name not in changed}
        kept |= {name: str(value) for name, value in settings.items()}
        memory = {name: kept.pop(name, None) for name in OPTIONS}
        return _laid_out(_with_warnings(compile_found(combine(self.source, clauses), kept)), **memory)

    @staticmethod
    def made_again(module: str, name: str, policy: str, expected: str) -> KVCache:
        """Return an empty cache of a loaded class, from the module, or else from the shipped policy of that name."""
        from kvdsl.runtime.hf import saving

        def shipped() -> type[KVCache] | None:
            from kvdsl.diagnostics import DiagnosticError

            with suppress(DiagnosticError):
                return load(policy)
            return None

        again: KVCache = saving.made_again(module, name, policy, expected, shipped)
        return again


def cache_class(compiled: Compiled) -> type[KVCache]:
    """Write the package to the cache folder unless it is there, import it, and return its class.

    Raises:
        KvdslError: if the cache folder cannot be written to.
    """
    stem = compiled.policy.stem
    digest = hashlib.sha256("\0".join(compiled.files[key] for key in sorted(compiled.files)).encode()).hexdigest()[:16]
    folder = entry(cache_folder() / "packages" / f"{stem}-{digest}", stem, lambda folder: _write(compiled, folder))
    with _needing("a policy's cache"):
        found: type[KVCache] = getattr(_import(folder, f"_kvdsl_{stem}_{digest}"), f"{compiled.policy.name}Cache")
    found.origin = Loaded(compiled.source, compiled.settings)
    return found


def class_of(policy: Policy, text: str) -> type[KVCache]:
    """Return the class of a checked policy made by a pass, like that of a file.

    Args:
        text: the policy's text.

    Raises:
        KvdslError: if the cache folder cannot be written to.
    """
    from kvdsl.compiler import Compiled, package

    return cache_class(Compiled(policy, package(policy, text), {}, (), SourceFile(f"<{policy.stem}>", text), {}))


def class_in_memory(policy: Policy, files: Mapping[str, str] | None = None) -> type[KVCache]:
    """Return the class of a checked policy from a package in memory, for the torch backend, which builds nothing.

    Args:
        files: the package, if it exists already.
    """
    from kvdsl.compiler import package
    from kvdsl.ir.printer import print_policy

    files = package(policy, print_policy(policy)) if files is None else files
    name = f"_kvdsl_in_memory_{policy.stem}"
    modules = {
        name: ModuleType(name),
        **{f"{name}.{part}": ModuleType(f"{name}.{part}") for part in ("kernels_torch", "cache")},
    }
    modules[name].__path__ = []
    with _IMPORTING:
        sys.modules.update(modules)
        try:
            for part in ("kernels_torch", "cache"):
                made = modules[f"{name}.{part}"]
                made.__file__, made.__package__ = f"/nowhere/{name}/{part}.py", name
                exec(builtins.compile(files[f"{part}.py"], f"<{part} of {policy.stem}>", "exec"), made.__dict__)
                setattr(modules[name], part, made)
        finally:
            for own in modules:
                del sys.modules[own]
    found: type[KVCache] = getattr(modules[f"{name}.cache"], f"{policy.name}Cache")
    return found


def load_model(name: str | None = None, dtype: str | None = None) -> tuple[Any, Any]:
    """Load a causal language model for inference on the best device, and its tokenizer.

    Args:
        name: a name of `kvdsl models` (`"smollm2"`), a folder, or an id on the Hugging Face hub; None for the reference model.
        dtype: `fp32`, `bf16` or `fp16`; None for float32 (the reference model) or the checkpoint's dtype.

    Raises:
        KvdslError: for an unknown model or dtype; names of `kvdsl models` are never downloaded here.
    """
    with _needing("a model"):
        from kvdsl.generation.models import load_model

        return load_model(name, dtype)


@contextmanager
def _needing(what: str) -> Iterator[None]:
    """Report in one line that something needs torch or transformers, which the language half of kvdsl does not need."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name not in ("torch", "transformers"):
            raise
        raise KvdslError(f"{what} needs {missing.name}, which is not installed: pip install {missing.name}") from missing


def _write(compiled: Compiled, folder: Path) -> None:
    for name, text in compiled.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name, data in compiled.data.items():
        (folder / name).write_bytes(data)


class _SourceLoader(SourceFileLoader):
    """Reads files checked by the entry's seal, and neither reads nor writes bytecode next to them."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


_IMPORTING = threading.RLock()
"""Held while a package is imported, so that other threads never see an incomplete one."""


def _import(folder: Path, name: str) -> ModuleType:
    """Import the folder as a package of this name, once per process."""
    with _IMPORTING:
        return sys.modules.get(name) or _imported(folder, name)


def _imported(folder: Path, name: str) -> ModuleType:
    sys.path_importer_cache[str(folder)] = FileFinder(str(folder), (_SourceLoader, [".py"]))  # for the package's modules
    spec = importlib.util.spec_from_loader(name, _SourceLoader(name, str(folder / "__init__.py")), is_package=True)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
