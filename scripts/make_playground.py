#!/usr/bin/env python
"""Makes the playground of docs/playground: a page on which the compiler itself runs in the browser, and all that it loads.

Python is Pyodide's, from npm. The compiler is this checkout's, and what it stands on (lark, jinja2, pydantic) is taken from the environment
that runs this script; only pydantic-core is no Python, and its build for WebAssembly comes from PyPI. Needs Node.js and npm.
"""

from __future__ import annotations

import http.server
import importlib.metadata
import io
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "docs" / "playground"
BUILD = ROOT / "build" / "playground"
"""Where npm installs, and where the wheel of pydantic-core is kept."""

LANGUAGE = ("build", "emit", "explain", "interp", "ir", "lower", "lsp", "passes", "scenarios", "sema", "syntax")
"""Folders of kvdsl that the page needs; of the rest only what lies beside them."""

PURE = (
    "annotated-types", "attrs", "jinja2", "lark", "lsprotocol", "markupsafe", "pydantic", "pygls", "typing-extensions",
    "typing-inspection",
)  # fmt: skip
"""What the compiler imports and is, or can do with, Python alone (markupsafe has a form in C, and one without)."""

PYTHON, PLATFORM = "3.14", "pyemscripten_2026_0_wasm32"
"""Of the Pyodide that docs/playground/package.json names; its `pyodide-lock.json` says so."""

PYODIDE = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "pyodide-lock.json", "python_stdlib.zip")


def make(out: Path) -> None:
    """Write the whole page into a folder, which is emptied first."""
    install()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for name in ("index.html", "style.css", "recording.bin"):
        shutil.copy(SOURCE / name, out)
    bundle(out)
    (out / "pyodide").mkdir()
    for name in PYODIDE:
        shutil.copy(BUILD / "node_modules" / "pyodide" / name, out / "pyodide")
    (BUILD / "python.zip").write_bytes(python_zip())
    _run("node", "warm.mjs", str(out / "pyodide"), str(BUILD / "python.zip"), str(out / "python.zip"), cwd=BUILD)


def install() -> None:
    """What package.json names, into the build folder."""
    BUILD.mkdir(parents=True, exist_ok=True)
    wanted = (SOURCE / "package.json").read_text(encoding="utf-8")
    done = BUILD / "installed.json"
    if done.exists() and done.read_text(encoding="utf-8") == wanted:
        return
    (BUILD / "package.json").write_text(wanted, encoding="utf-8")
    _run("npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error", cwd=BUILD)
    done.write_text(wanted, encoding="utf-8")


def bundle(out: Path) -> None:
    """The page's script with CodeMirror in it; the worker's, which loads Pyodide from the folder beside it."""
    for name in SOURCE.glob("*.*js"):
        shutil.copy(name, BUILD)
    options = ("--bundle", "--minify", "--format=esm", "--target=es2022", "--log-level=warning", "--legal-comments=none")
    _run(
        "node_modules/.bin/esbuild", "main.js", "worker.js", "reader.js", *options, "--external:./pyodide/pyodide.mjs", f"--outdir={out}",
        cwd=BUILD,
    )  # fmt: skip


def visit(site: Path, script: str, *words: str) -> None:
    """Open the page that was made, in Debian's Chromium, as a script of the playground's folder does."""
    chromium = shutil.which("chromium")
    if chromium is None:
        raise click.ClickException("a visit needs `chromium`")
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            _run("node", script, chromium, f"http://127.0.0.1:{server.server_address[1]}/", *words, cwd=BUILD)
        finally:
            server.shutdown()


# -- Python ------------------------------------------------------------------------------------------------------------


def python_zip() -> bytes:
    """The compiler, what it stands on and what the page asks of it, as Pyodide unpacks it."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, content in sorted({**dict(_language()), **dict(_pure()), **dict(_pydantic_core())}.items()):
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def _language() -> Iterator[tuple[str, bytes]]:
    folders = (ROOT / "kvdsl", *(ROOT / "kvdsl" / name for name in LANGUAGE))
    for path in (path for folder in folders for path in folder.glob("*.py")):
        yield str(path.relative_to(ROOT)), path.read_bytes()
    for folder in ("grammar", "policies", "templates"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and not path.stem.endswith("_test"):
                yield f"kvdsl/_data/{path.relative_to(ROOT)}", path.read_bytes()
    for path in (*SOURCE.glob("*.py"), SOURCE / "recording.json"):
        yield path.name, path.read_bytes()


def _pure() -> Iterator[tuple[str, bytes]]:
    """The Python files of installed distributions."""
    for name in PURE:
        for file in importlib.metadata.files(name) or ():
            if file.suffix in (".py", ".lark") and ".." not in file.parts:
                yield str(file), Path(str(file.locate())).read_bytes()


def _pydantic_core() -> Iterator[tuple[str, bytes]]:
    """The release that the installed pydantic stands on, for WebAssembly."""
    version = importlib.metadata.version("pydantic-core")
    wheels = BUILD / "wheels"
    found = list(wheels.glob(f"pydantic_core-{version}-*{PLATFORM}.whl"))
    if not found:
        _run(
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:",
            "--python-version", PYTHON, "--implementation", "cp", "--platform", PLATFORM, "--dest", str(wheels),
            f"pydantic-core=={version}",
        )  # fmt: skip
        found = list(wheels.glob(f"pydantic_core-{version}-*{PLATFORM}.whl"))
    with zipfile.ZipFile(found[0]) as wheel:
        for name in wheel.namelist():
            if name.startswith("pydantic_core/") and not name.endswith("/"):
                yield name, wheel.read(name)


def _run(*command: str, cwd: Path | None = None) -> None:
    try:
        subprocess.run(command, cwd=cwd, check=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise click.ClickException(f"`{command[0]}` is not there; the playground needs Node.js and npm") from error
    except subprocess.CalledProcessError as error:
        raise click.ClickException(f"`{' '.join(command[:4])} …` failed") from error


@click.command(help=__doc__, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--out", type=click.Path(path_type=Path), default=ROOT / "site" / "playground", show_default="site/playground")
@click.option("--times", is_flag=True, help="say how long it takes to load, and to answer a key; needs chromium")
def main(out: Path, times: bool) -> None:
    make(out.resolve())
    if times:
        visit(out.resolve(), "times.mjs")
    click.echo(f"written: {out} ({sum(path.stat().st_size for path in out.rglob('*') if path.is_file()) / 2**20:.0f} MiB)")


if __name__ == "__main__":
    main()
