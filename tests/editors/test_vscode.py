"""The extension for VS Code: its grammar colours, its snippets are policies, its package holds what it needs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from tests.cli.harness import run

EXTENSION = Path(__file__).resolve().parents[2] / "editors" / "vscode"
SNIPPETS = json.loads((EXTENSION / "snippets" / "kv.json").read_text(encoding="utf-8"))
NPM = shutil.which("npm")
needs_packages = pytest.mark.skipif(
    NPM is None or not (EXTENSION / "node_modules").exists(), reason="its packages are not there (make vscode)"
)


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets_are_sound_before_anything_is_typed_over_them(
    capsys: pytest.CaptureFixture[str], name: str, tmp_path: Path
) -> None:
    text = re.sub(r"\$\{\d+:([^}]*)\}", r"\1", "\n".join(SNIPPETS[name]["body"]))
    path = tmp_path / ("mine_test.kv" if name == "tests" else "mine.kv")
    path.write_text(text, encoding="utf-8")
    for command in ("check", "fmt", *(["test"] if name == "tests" else [])):
        done = run(capsys, command, str(path))
        assert done.code == 0, done
    assert path.read_text(encoding="utf-8") == text  # it is laid out as `kvdsl fmt` does


@needs_packages
@pytest.mark.nightly
def test_the_grammar_colours() -> None:
    done = subprocess.run([str(NPM), "test"], cwd=EXTENSION, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


START = """
const Module = require("module"), load = Module._load;
const vscode = new Proxy({}, {get: (known, name) => known[name] ?? class {}});
Module._load = (name, ...rest) => (name === "vscode" ? vscode : load(name, ...rest));
console.log(Object.keys(require("./extension/extension.js")).join(" "));
"""
"""Loads the extension without an editor."""


@needs_packages
@pytest.mark.nightly
def test_the_package_holds_what_it_needs(tmp_path: Path) -> None:
    command = [str(NPM), "run", "package", "--", "--out", str(tmp_path / "kvdsl.vsix")]
    subprocess.run(command, cwd=EXTENSION, capture_output=True, check=True)
    with zipfile.ZipFile(tmp_path / "kvdsl.vsix") as package:
        package.extractall(tmp_path)
    manifest = json.loads((tmp_path / "extension" / "package.json").read_text(encoding="utf-8"))["contributes"]
    paths = [one["path"] for kind in ("grammars", "snippets") for one in manifest[kind]]
    for path in (*paths, manifest["languages"][0]["configuration"]):
        assert (tmp_path / "extension" / path).is_file()
    done = subprocess.run(["node", "-e", START], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["activate", "deactivate"], done.stderr
