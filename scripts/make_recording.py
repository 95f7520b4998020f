#!/usr/bin/env python
"""Records what SmolLM2 attends with over a page of a book, for the playground: docs/playground/recording.json and recording.bin.

The page is from Adalbert Stifter's Rock Crystal, in the public domain; `kvdsl models get smollm2` brings the model. Of some layers every
query, key and value is kept, rotated as the attention sees them, in 8 bits. Queries and keys lie far from zero along a few dims, so every
dim of every head has a scale of its own; attention then differs from the model's by less than 1 % of its mass.

recording.bin holds, layer by layer and KV head by KV head, the vectors of the group's queries, of the keys and of the values: for each of
these the scales, little-endian float32 [dim], and then the whole numbers, int8 [tokens, dim].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "lab")]  # a checkout needs no installation for this

import click  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

import kvdsl  # noqa: E402
from kvdsl.assets import book_text  # noqa: E402
from kvdsl.runtime.hf.rope import ropes  # noqa: E402
from kvdsl_lab.assets import book_index  # noqa: E402
from kvdsl_lab.eval.recording import Recording, record  # noqa: E402

FOLDER = ROOT / "docs" / "playground"
BOOK, START = "rock_crystal", "The ascent of the mountain"
TOKENS = 320
LAYERS = (0, 4, 10, 16, 22, 28)
"""From the first, which looks at everything, to the last but one, which looks at the first token most of the time."""


@click.command()
def main() -> None:
    """Records what SmolLM2 attends with over a page of a book, over docs/playground/recording.bin and recording.json."""
    model, tokenizer = kvdsl.load_model("smollm2")
    book = book_text(BOOK)
    ids = tokenizer(book[book.index(START) :][: 8 * TOKENS], return_tensors="pt").input_ids[:, :TOKENS]
    found = record(model, ids)
    vectors = b"".join(packed(part) for layer in LAYERS for part in parts(found[layer]))
    (FOLDER / "recording.bin").write_bytes(vectors)
    rope, query = ropes(model)[0], found[0].query
    assert rope is not None
    about = {
        "book": {name: book_index()[BOOK][name] for name in ("title", "author")},
        "model": "SmolLM2-135M",
        "tokens": [tokenizer.decode([token]) for token in ids[0]],
        "layers": LAYERS,
        "all_layers": len(found),
        "heads": query.shape[1],
        "group": query.shape[2],
        "dim": query.shape[4],
        "scaling": found[0].call.scaling,
        "rope": {"inv_freq": rope.inv_freq.tolist(), "pairing": rope.pairing, "offset": rope.offset},
    }
    (FOLDER / "recording.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{TOKENS} tokens, {len(LAYERS)} layers: {len(vectors) / 2**20:.1f} MiB")


def parts(layer: Recording) -> Iterator[Tensor]:
    """Of each KV head the group's queries, the keys and the values, [tokens, dim] each."""
    for query, key, value in zip(layer.query[0], layer.key[0], layer.value[0], strict=True):
        yield from (*query, key, value)


def packed(vectors: Tensor) -> bytes:
    """The scales and the whole numbers."""
    scale = vectors.abs().amax(dim=0).clamp_min(torch.finfo(torch.float32).tiny) / 127
    whole = (vectors / scale).round().to(torch.int8)
    return scale.numpy().astype("<f4").tobytes() + whole.numpy().tobytes()


if __name__ == "__main__":
    main()
