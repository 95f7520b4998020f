#!/usr/bin/env python
"""Counts how the code is built, and prints a table.

How each figure is counted, of the files that git knows:

- lines: of Python, C++ and Jinja, with comments and empty lines; of tests all Python.
- isinstance: calls.
- methods: functions that a class itself defines, properties among them. What it inherits is not counted.
- files under 60 lines: Python files of `kvdsl`.
- import circles: groups of modules of `kvdsl` of which each reaches the others by imports, wherever these stand: in functions and for types
  alone, too.
- an operation's files: files of `kvdsl` that name an operation which has code of its own in the interpreter and in a target.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click

HERE = Path(__file__).resolve().parents[1]
sys.path.append(str(HERE))  # a checkout needs no installation for this

from scripts.figures import show  # noqa: E402

FIGURES = {
    "lines": "lines in `kvdsl/` and `templates/`",
    "lines_python": "of these, Python",
    "lines_cpp": "of these, C++",
    "lines_jinja": "of these, Jinja",
    "lines_tests": "lines in `tests/`",
    "isinstance": "`isinstance` in `kvdsl/`",
    "methods": "methods of the largest class",
    "short_files": "files under 60 lines",
    "circles": "import circles, type-only ones included",
    "leverage": "files of `kvdsl/` that name `leverage`",
    "enough": "files of `kvdsl/` that name `enough` as an operation",
}
_LANGUAGES = {"python": {".py"}, "cpp": {".cpp", ".hpp", ".h"}, "jinja": {".jinja"}}
_SHORT = 60


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print the figures by name.")
@click.option(
    "--before", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="Figures from --json, as a first column."
)
@click.option(
    "--checkout", type=click.Path(path_type=Path, file_okay=False, exists=True), default=HERE, help="What to count."
)
def main(as_json: bool, before: Path | None, checkout: Path) -> None:
    show(figures(checkout), FIGURES, as_json=as_json, before=before)


def figures(checkout: Path) -> dict[str, int]:
    """All figures of a checkout, by the names of `FIGURES`."""
    core = _files(checkout, "kvdsl", "templates")
    lines = {
        language: sum(_length(path) for path in core if path.suffix in suffixes) for language, suffixes in _LANGUAGES.items()
    }
    modules = {path: ast.parse(path.read_text(encoding="utf-8")) for path in core if path.suffix == ".py"}
    package = {path: tree for path, tree in modules.items() if path.is_relative_to(checkout / "kvdsl")}
    nodes = [node for tree in package.values() for node in ast.walk(tree)]
    return {
        "lines": sum(lines.values()),
        **{f"lines_{language}": count for language, count in lines.items()},
        "lines_tests": sum(_length(path) for path in _files(checkout, "tests") if path.suffix == ".py"),
        "isinstance": sum(isinstance(node, ast.Call) and _is_named(node.func, "isinstance") for node in nodes),
        "methods": max(len(_methods(node)) for node in nodes if isinstance(node, ast.ClassDef)),
        "short_files": sum(_length(path) < _SHORT for path in package),
        "circles": len(circles({module_name(path, checkout): tree for path, tree in package.items()})),
        "leverage": _naming(core, "leverage"),
        "enough": _naming(core, '"enough', "enough(", "Enough", "`enough"),
    }


def _files(checkout: Path, *folders: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", *folders], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [checkout / name for name in listed if (checkout / name).is_file()]


def _length(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def _naming(paths: list[Path], *words: str) -> int:
    return sum(any(word in path.read_text(encoding="utf-8") for word in words) for path in paths if path.suffix == ".py")


def _is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _methods(node: ast.ClassDef) -> list[str]:
    return [part.name for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))]


# -- imports -----------------------------------------------------------------------------------------------------------


def module_name(path: Path, checkout: Path) -> str:
    """What a file of a package is imported by."""
    parts = path.relative_to(checkout).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(modules: dict[str, ast.Module]) -> list[set[str]]:
    """Groups of modules that import each other, directly or not."""
    imports = {name: {other for other in _imported(tree, modules) if other != name} for name, tree in modules.items()}
    reached = {name: _reached(name, imports) for name in imports}
    together = {name: frozenset({name} | {other for other in reached[name] if name in reached[other]}) for name in imports}
    return [set(group) for group in dict.fromkeys(together.values()) if len(group) > 1]


def _imported(tree: ast.Module, modules: dict[str, ast.Module]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from (name for name in (inner if inner in modules else node.module,) if name in modules)


def _reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    found, todo = set[str](), list(imports[start])
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo.extend(imports[name])
    return found


if __name__ == "__main__":
    main()
