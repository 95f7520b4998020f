#!/usr/bin/env python
"""`make demo`: see `lab/kvdsl_lab/demo.py`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "lab")]  # a checkout needs no installation for this

from kvdsl_lab.demo import run  # noqa: E402

if __name__ == "__main__":
    run()
