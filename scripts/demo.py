#!/usr/bin/env python
"""`make demo`: see `kvdsl/demo.py`."""

from kvdsl.demo import main

if __name__ == "__main__":
    main()
