"""Plan → {path: text}: the files of a generated package."""

from __future__ import annotations

import ast
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

from kvdsl import __version__
from kvdsl.abi import ABI
from kvdsl.emit.environment import environment
from kvdsl.files import write_whole
from kvdsl.lower.plan import PackagePlan

_PYTHON = ("__init__.py", "cache.py", "kernels_torch.py")
_CPP = "kernels_cpu.cpp"
_TRITON = "kernels_triton.py"


def render(plan: PackagePlan, source: str) -> dict[str, str]:
    """The files of a policy's package, by name.

    Args:
        source: the text of the .kv file, whose digest the banner and the manifest carry.
    """
    env = environment()
    context = {field.name: getattr(plan, field.name) for field in fields(plan)}
    context |= {"abi": ABI, "banner": _banner(plan, source)}
    files = {name: env.get_template(f"python/{name}.jinja").render(context) for name in _PYTHON}
    for name, text in files.items():
        files[name] = _tidy(text)
        ast.parse(files[name], filename=f"{plan.stem}/{name}")
    if plan.cpp is not None:
        files[_CPP] = _tidy(env.get_template("cpu/kernels_cpu.cpp.jinja").render(context))
    if plan.triton is not None:
        files[_TRITON] = _tidy(env.get_template("triton/kernels_triton.py.jinja").render(context))
        ast.parse(files[_TRITON], filename=f"{plan.stem}/{_TRITON}")
    files["manifest.json"] = _manifest(plan, source, files)
    return files


def _banner(plan: PackagePlan, source: str) -> str:
    return f"Made by kvdsl {__version__} from {plan.stem}.kv ({_digest(source)[:12]}). Do not edit: `kvdsl compile` makes it anew."


def _manifest(plan: PackagePlan, source: str, files: dict[str, str]) -> str:
    content = {
        "kvdsl": __version__,
        "abi": ABI,
        "policy": plan.name,
        "source": f"{plan.stem}.kv",
        "source_sha256": _digest(source),
        "files": {name: _digest(text) for name, text in sorted(files.items())},
    }
    return json.dumps(content, indent=2) + "\n"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _tidy(text: str) -> str:
    """Templates leave blank lines where a block printed nothing."""
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def write(files: dict[str, str], folder: Path) -> list[str]:
    """Write what differs from what is there, and say which files that were."""
    changed = differing(files, folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name in changed:
        write_whole(folder / name, files[name])
    return changed


def differing(files: dict[str, str], folder: Path) -> list[str]:
    """The files whose text is not what the folder has."""
    return [name for name, text in files.items() if _read(folder / name) != text]


def stale(files: Iterable[str], folder: Path) -> list[str]:
    """Kernels in the folder of a package that has none any more: they would go on being used."""
    return [name for name in (_CPP, _TRITON) if name not in files and (folder / name).exists()]


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return None
