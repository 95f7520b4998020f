"""Whatever the README shows works: its policy, its commands and its programs, one after the other in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvdsl.assets import reference_model_path
from kvdsl.cli import COMMANDS
from kvdsl.compiler import shipped_policies

ROOT = Path(__file__).parent.parent
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/index.md", "docs/design.md"]


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def blocks(document: str) -> Iterator[Block]:
    text = (ROOT / document).read_text(encoding="utf-8")
    for language, body in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield Block(language, body)


@pytest.mark.skipif(not (reference_model_path() / "model.safetensors").exists(), reason="needs the reference model")
def test_the_readme(tmp_path: Path) -> None:
    """The .kv file is saved under the name that the text gives it."""
    for block in blocks("README.md"):
        if block.language == "kv":
            (tmp_path / "calm.kv").write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            run(tmp_path, [sys.executable, "-c", block.text])
        elif block.language == "console":
            for line in block.text.splitlines():
                assert line.startswith("$ kvdsl ")
                run(tmp_path, [sys.executable, "-m", "kvdsl", *shlex.split(line)[2:]])
        else:
            assert block == Block("shell", "make demo\n")


def run(folder: Path, command: list[str]) -> None:
    variables = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def test_the_readme_shows_every_policy() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(shown) == [path.stem for path in shipped_policies()]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    file = ROOT / document
    for target in re.findall(r"\]\(([^)#]+)\)", file.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (file.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_exist(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"[`$] ?kvdsl ([a-z]+)", text))
    assert named <= COMMANDS.keys()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets


@pytest.mark.parametrize("document", ["README.md", "docs/design.md"])
def test_policies_in_documents_check(document: str, tmp_path: Path) -> None:
    from kvdsl.compiler import analyse

    for number, block in enumerate(blocks(document)):
        if block.language == "kv":
            file = tmp_path / f"block_{number}.kv"
            file.write_text(block.text, encoding="utf-8")
            assert analyse(file).diagnostics == ()
