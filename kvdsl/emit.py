"""Render a plan as {path: text}, the files of a generated package. Filters are the only way for text of a .kv file into them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import jinja2
from jinja2.bccache import Bucket

from kvdsl.abi import ABI, VERSION
from kvdsl.build import cache_folder
from kvdsl.build.store import entry, flaw
from kvdsl.errors import KvdslError
from kvdsl.files import encoded, resource, write_whole
from kvdsl.ir.nodes import Policy, Tensor
from kvdsl.lower.plan import PackagePlan
from kvdsl.lower.without import sentence
from kvdsl.tensorfile import Stored, check_axes, read, written

NO_DATA: Mapping[str, bytes] = MappingProxyType({})

_PYTHON = ("__init__.py", "cache.py", "kernels_torch.py")
_CPP = "kernels_cpu.cpp"
_TRITON = "kernels_triton.py"
MANIFEST = "manifest.json"


def render(plan: PackagePlan, source: str, data: Mapping[str, bytes] = NO_DATA, origin: str | None = None) -> dict[str, str]:
    """Return the text files of a policy's package by name.

    Args:
        source: the text of the .kv file; the banner and the manifest have its digest.
        origin: the source's location for the manifest; by default the file's name.
        data: the other files by name; the manifest has their digests.
    """
    env = environment()
    context = {field.name: getattr(plan, field.name) for field in fields(plan)}
    context |= {"abi": ABI, "banner": _banner(plan, source), "number_row": "pair" if plan.heads_differ else "row"}
    if plan.tensors:
        context |= {"tensors_file": TENSORS, "tensors_sha256": _digest(data[TENSORS])}
    files = {name: env.get_template(f"python/{name}.jinja").render(context) for name in _PYTHON}
    for name, text in files.items():
        files[name] = _tidy(text)
        _check(files[name], f"{plan.stem}/{name}")
    if plan.cpp is not None:
        files[_CPP] = _tidy(env.get_template("cpu/kernels_cpu.cpp.jinja").render(context))
    if plan.triton is not None:
        files[_TRITON] = _tidy(env.get_template("triton/kernels_triton.py.jinja").render(context))
        _check(files[_TRITON], f"{plan.stem}/{_TRITON}")
    files[MANIFEST] = _manifest(plan, source, {**files, **data}, origin or f"{plan.stem}.kv")
    return files


def _check(text: str, name: str) -> None:
    """Raise SyntaxError if the text is not Python."""
    compile(text, name, "exec", dont_inherit=True)


_MADE = "Made by kvdsl"


def _banner(plan: PackagePlan, source: str) -> str:
    return f"{_MADE} {VERSION} from {plan.stem}.kv ({_digest(source)[:12]}). Do not edit: `kvdsl compile` rewrites it."


def _manifest(plan: PackagePlan, source: str, files: Mapping[str, str | bytes], origin: str) -> str:
    without = {target: sentence(target, refusal, source) for target, refusal in plan.refusals.items()}
    content = {
        "kvdsl": VERSION,
        "abi": ABI,
        "policy": plan.name,
        "source": origin,
        "source_sha256": _digest(source),
        **({"without": without} if without else {}),
        "files": {name: _digest(content) for name, content in sorted(files.items())},
    }
    return json.dumps(content, indent=2) + "\n"


def _digest(content: str | bytes) -> str:
    return hashlib.sha256(encoded(content)).hexdigest()


def _tidy(text: str) -> str:
    """Remove the blank lines of template blocks that printed nothing."""
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def write(files: Mapping[str, str | bytes], folder: Path) -> list[str]:
    """Write the files that differ from those in the folder; return their names."""
    changed = differing(files, folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in changed:
        write_whole(folder / name, files[name])
    return changed


def differing(files: Mapping[str, str | bytes], folder: Path) -> list[str]:
    """Return the files that differ from those in the folder."""
    return [name for name, content in files.items() if not _has(folder / name, content)]


def stale(files: Iterable[str], folder: Path) -> list[str]:
    """Return files of the folder that the package no longer has; stale kernels would still be used."""
    return [name for name in (_CPP, _TRITON, TENSORS) if name not in files and (folder / name).exists()]


def origin_of(folder: Path) -> str | None:
    """Return the source of the package in a folder, from its manifest; None without a manifest of kvdsl's."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["source"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def is_ours(path: Path) -> bool:
    """Return whether kvdsl may write this file: it made it, or it does not exist."""
    return (
        path.suffix not in (".py", ".cpp")
        or not path.exists()
        or _MADE in path.read_text(encoding="utf-8", errors="replace")
    )


def _has(path: Path, content: str | bytes) -> bool:
    try:
        return (path.read_text(encoding="utf-8") if isinstance(content, str) else path.read_bytes()) == content
    except (FileNotFoundError, UnicodeDecodeError):
        return False


TENSORS = "tensors.safetensors"
"""The file's name in a package."""


def data_of(policy: Policy) -> dict[str, bytes]:
    """Return the binary files of a policy's package by name: none, or one with its tensors.

    Raises:
        KvdslError: if a tensor's file is missing, or does not match the policy.
    """
    if not policy.tensors:
        return {}
    return {TENSORS: written({tensor.name: stored_of(tensor) for tensor in policy.tensors})}


def stored_of(tensor: Tensor) -> Stored:
    """Read a tensor from its file.

    Raises:
        KvdslError: as in `data_of`.
    """
    path = Path(tensor.path)
    if path.resolve() != path:
        raise KvdslError(f"`{path}` has become a link since the policy was checked")
    stored = read(path, [tensor.name])[tensor.name]
    check_axes(tensor.name, tensor.axes, stored.shape, str(path))
    return stored


# -- templates ---------------------------------------------------------------------------------------------------------


class _Compiled(jinja2.BytecodeCache):
    """Caches compiled templates on disk, because compiling them takes longer than compiling a policy."""

    def load_bytecode(self, bucket: Bucket) -> None:
        place = self._place(bucket)
        if flaw(place) is None:
            bucket.bytecode_from_string((place / "code").read_bytes())

    def dump_bytecode(self, bucket: Bucket) -> None:
        def make(folder: Path) -> None:
            (folder / "code").write_bytes(bucket.bytecode_to_string())

        with contextlib.suppress(KvdslError, OSError):  # the cache folder is read-only or locked
            entry(self._place(bucket), "a template", make, patience=1)

    def _place(self, bucket: Bucket) -> Path:
        """Return the cache entry. Its key covers the code's inputs, including this file, whose filters Jinja applies to constants."""
        parts = (bucket.key, bucket.checksum, Path(__file__).read_text(encoding="utf-8"), jinja2.__version__, sys.version)
        return cache_folder() / "templates" / hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """Return the environment. Undefined names are errors; only the filters here escape. Cached, because it keeps compiled templates."""
    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader(str(resource("templates"))),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
        bytecode_cache=_Compiled(),
    )
    env.filters["docstring"] = docstring
    env.filters["string"] = string
    env.filters["comment"] = comment
    env.filters["tuple"] = literal_tuple
    return env


def docstring(text: str) -> str:
    """Escape text for a triple-quoted Python string, so that it can neither end the string nor form escapes."""
    return re.sub(r'"(?="|$)', r'\\"', _plain(text).replace("\\", "\\\\"))


def string(text: str) -> str:
    """Return a Python (and C++) string literal in ASCII."""
    return json.dumps(_plain(text))


def literal_tuple(names: Iterable[str]) -> str:
    """Return a Python tuple of strings."""
    items = [string(name) for name in names]
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def comment(text: str) -> str:
    """Escape text for a one-line C++ comment, so that it can neither end nor continue it (with a trailing backslash)."""
    return _plain(text).replace("*/", "* /").replace("/*", "/ *").replace("??", "? ?").rstrip("\\ ")


def _plain(text: str) -> str:
    """Return printable text on one line; newlines, control and invisible characters become spaces."""
    return "".join(char if char.isprintable() else " " for char in text)
