"""What builds leave."""

from __future__ import annotations

import os
from pathlib import Path

from kvdsl.build.lock import LOCK


def left(folder: Path) -> list[str]:
    """What lies there, but for the empty files that are locked, which stay."""
    return sorted(name for name in os.listdir(folder) if not name.endswith(LOCK) or (folder / name).stat().st_size)
