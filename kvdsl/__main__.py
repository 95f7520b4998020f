"""`python -m kvdsl` is the command line."""

import sys

from kvdsl.cli import main

if __name__ == "__main__":
    sys.exit(main())
