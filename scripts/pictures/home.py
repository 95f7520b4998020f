"""A home folder for programs that are pictured: this checkout's `kvdsl` is on their path, and nobody's settings are."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def kvdsl_on_path(home: Path) -> dict[str, str]:
    """Write the command into the folder; the variables that say so."""
    (home / "bin").mkdir()
    command = home / "bin" / "kvdsl"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvdsl "$@"\n')
    command.chmod(0o755)
    return {
        "PATH": f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_STATE_HOME": str(home),
    }
