"""The hooks for pre-commit and the workflow of docs/howto/testing.md: their commands exist, and the hooks find what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import blocks, read
from tests.docs.test_pages import understood

ROOT = Path(__file__).resolve().parents[1]
HOOKS = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
PAGE = "docs/howto/testing.md"


def test_hooks_and_workflow_run_commands_that_exist() -> None:
    workflow = next(block.text for block in blocks(read(PAGE)) if block.title == "policies.yml")
    assert len(workflow.splitlines()) == 10
    steps = yaml.safe_load(workflow)["jobs"]["policies"]["steps"]
    commands = [step["run"] for step in steps if step.get("run", "").startswith("kvdsl ")]
    assert len(commands) == 3
    for command in [*commands, *(hook["entry"] for hook in HOOKS)]:
        understood(command.split()[1:])


def test_the_page_names_the_hooks() -> None:
    config = next(block.text for block in blocks(read(PAGE)) if block.title == ".pre-commit-config.yaml")
    (repository,) = yaml.safe_load(config)["repos"]
    assert [hook["id"] for hook in repository["hooks"]] == [hook["id"] for hook in HOOKS]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("hook", "before", "code"), [("check", "score attn", 1), ("check", "score mean(attn)", 0), ("fmt", " score position", 1)]
)
def test_pre_commit_runs_them(tmp_path: Path, hook: str, before: str, code: int) -> None:
    """As `pre-commit` itself runs a hook of this repository; a hook that changes a file fails."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "mine.kv").write_text(f'kv 1\n\npolicy Mine {{\n  "Mine."\n  param budget = 64\n  {before}\n}}\n')
    bin = tmp_path / "bin"
    bin.mkdir()
    (bin / "kvdsl").write_text(f'#!/bin/sh\nexec {sys.executable} -m kvdsl "$@"\n')
    (bin / "kvdsl").chmod(0o755)
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    (hooks / ".pre-commit-hooks.yaml").write_bytes((ROOT / ".pre-commit-hooks.yaml").read_bytes())
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")} | {
        "PATH": f"{bin}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PRE_COMMIT_HOME": str(tmp_path / "home"),
        "GIT_CONFIG_GLOBAL": os.devnull,
    }

    def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)

    for folder in (mine, hooks):
        run(folder, "git", "init", "-q")
        run(folder, "git", "add", ".")
        done = run(folder, "git", "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x")
        assert done.returncode == 0, done.stderr
    done = run(mine, sys.executable, "-m", "pre_commit", "try-repo", str(hooks), f"kvdsl-{hook}", "--all-files")
    assert done.returncode == code, done.stdout + done.stderr
