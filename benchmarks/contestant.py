"""One contestant of `peers.py`, in a process of its own, so that what it occupies is its own.

Reads JSON lines on standard input: first what to do (see `main`), then the number of a stretch of the text for every round. Answers
each by a JSON line on standard output: what was measured, or the error that ended it.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from contestants import CONTESTANTS, Contestant, Task
from torch import Tensor

from kvdsl.generation.models import load_model, windows
from kvdsl.generation.text import read_text
from kvdsl.runtime.hf.versions import with_cache
from kvdsl_lab.bench.measure import peak_bytes

WARM_TOKENS = 8

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_PAGES = 1 << 16


def read(model: Any, ids: Tensor, cache: Any, prompt: int) -> dict[str, Any]:
    """Read a text, the prompt at once and the rest token by token: `ttft_ms`, `tpot_ms` of every token, and each token's `losses`.

    Tokens are the text's own, so that everybody reads the same. Positions are those of the text, which a cache that has been
    pressed cannot know.

    Args:
        ids: int64 [1, prompt + new + 1].
    """
    times, losses = [], []
    for start, stop in [(0, prompt), *((at, at + 1) for at in range(prompt, ids.shape[1] - 1))]:
        positions = torch.arange(start, stop)[None]
        begun = time.perf_counter()
        logits = model(ids[:, start:stop], **with_cache(cache), position_ids=positions, logits_to_keep=1).logits[:, -1]
        times.append((time.perf_counter() - begun) * 1e3)
        losses.append(float(torch.nn.functional.cross_entropy(logits.float(), ids[:, stop])))
    return {"ttft_ms": times[0], "tpot_ms": times[1:], "losses": losses}


def one_round(one: Contestant, model: Any, ids: Tensor, task: Task) -> dict[str, Any]:
    """What a text takes, and by how much the process grows over it."""
    found: dict[str, Any] = {}

    def run() -> None:
        cache, context = one.begin(model, task)
        with torch.inference_mode(), context:
            found.update(read(model, ids, cache, task.prompt), cache_bytes=cache_bytes(cache))

    found["peak_bytes"] = peak_bytes(run)
    return found


def give_back_at_once() -> None:
    """Have what is freed go back to the system, tensors by themselves: else the peak depends on what the allocator happens to keep."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        raise SystemExit("memory is measured with glibc's allocator, which is not here")
    libc.mallopt(_MMAP_THRESHOLD, _PAGES)
    libc.mallopt(_TRIM_THRESHOLD, 0)


def cache_bytes(cache: Any) -> int:
    """What a cache holds in the end."""
    if hasattr(cache, "bytes"):
        return int(cache.bytes())
    held = ("keys", "values", "_quantized_keys", "_quantized_values")
    return sum(tensor_bytes(getattr(layer, name, ())) for layer in cache.layers for name in held)


def tensor_bytes(found: Any) -> int:
    """The bytes of a tensor, or of all in a tuple or dict; a quantized tensor is the tensors that it is made of."""
    if hasattr(found, "__tensor_flatten__"):
        return sum(tensor_bytes(getattr(found, name)) for name in found.__tensor_flatten__()[0])
    if isinstance(found, dict | tuple):
        return sum(map(tensor_bytes, found.values() if isinstance(found, dict) else found))
    return found.nbytes if isinstance(found, Tensor) else 0


def main() -> None:
    """The first line: `index` of the contestant, `task`, `model` and `text` (null for those that ship), `stretches`, `threads`
    and whether it is about `memory`.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no answer
    given = json.loads(input())

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    torch.set_num_threads(given["threads"])
    if given["memory"]:
        give_back_at_once()
    one, task = CONTESTANTS[given["index"]], Task(**given["task"])
    model, tokenizer = load_model(given["model"])
    text = read_text(None if given["text"] is None else Path(given["text"]))
    ids = windows(tokenizer, text, task.prompt + task.new + 1, given["stretches"])
    with torch.inference_mode():  # what torch itself loads at its first call is nobody's
        model(ids[:1, :WARM_TOKENS], logits_to_keep=1)
    answer({"layers": model.config.num_hidden_layers, "dtype": str(model.dtype).removeprefix("torch.")})
    for line in sys.stdin:
        stretch = json.loads(line)
        try:
            answer(one_round(one, model, ids[stretch : stretch + 1], task))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
