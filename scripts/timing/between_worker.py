"""One side of `between.py`: a full cache of the checkout that PYTHONPATH names, and as many steps at a time as asked for."""

from __future__ import annotations

import json
import sys
import time
from statistics import median

import torch

try:
    from kvdsl_lab.bench import decode
except ImportError:  # checkouts from before the laboratory was a package of its own
    from kvdsl.bench import decode

SETTLING = 16
"""Steps before anything is timed."""


def main(policy: str, dtype: str, live: int, batch: int, threads: int) -> None:
    """Read numbers of steps, a line each, and answer each with the median milliseconds of a step."""
    torch.set_num_threads(threads)
    shape = decode.Shape(batch, 8, 4, 128, live, dtype)
    spec = decode.load(policy).spec
    backend = decode.choose(spec, "cpu", torch.device("cpu"), shape.torch_dtype)
    step = decode.decode_step(backend, decode.steady_state(spec, shape))
    tokens = decode.new_tokens(shape)
    for index in range(SETTLING):
        step(tokens[index % len(tokens)])
    for line in sys.stdin:
        times = []
        for index in range(-2, int(line)):  # two to wake the threads
            began = time.perf_counter()
            step(tokens[index % len(tokens)])
            times.append((time.perf_counter() - began) * 1e3)
        print(median(times[2:] or times), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3], **json.loads(sys.argv[3]))
