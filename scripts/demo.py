#!/usr/bin/env python
"""`make demo`: see `kvdsl/demo.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a checkout needs no installation for this

from kvdsl.demo import main

if __name__ == "__main__":
    main()
