"""Planted faults: does a test find each of them?

`python -m scripts.faults` plants every fault of `planted.py` in a copy of the tree, one after the other, and runs the tests that
ought to find it: those of the gate (`make test`), then the nightly ones. It writes `found.md`, which is committed. A fault that no
test finds, and one whose place has changed, fail the run. `--only WORD` takes those whose room, file or text has it; the table keeps
what it says of the others.
"""
