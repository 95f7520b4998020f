"""Retrieval tasks in text form: what the reference model was trained on, and what it is measured with.

A task is a set of facts to be hidden at given depths of some filler text, and questions about them at the
end. Training and evaluation share this one file, so that a model is asked in the words it has learnt.
Everything derives from the random generator that the caller passes in; nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Encode = Callable[[str], Sequence[int]]
"""Text to token ids, without special tokens."""

_NAMES = """
house water door hand night king ship horse tree river fire stone table window book letter road garden church
lady mother father brother sister captain doctor soldier master morning evening winter summer town city
village forest mountain island sea sun moon star heart head eye face voice word name paper money gold silver
iron bread wine dog bird
"""
KEYS = _NAMES.split()


@dataclass(frozen=True)
class Recall:
    """Facts, each with the depth (0 to 1) at which it stands, and questions with their answers."""

    facts: tuple[tuple[float, str], ...]
    questions: tuple[tuple[str, str], ...]


def number(rng: np.random.Generator, digits: int) -> str:
    """A number whose digits all differ: the token before then says which digit comes next, as in any copied
    text.
    """
    return "".join(map(str, rng.permutation(10)[:digits]))


def pass_key(rng: np.random.Generator, depth: float | None = None, digits: int = 5) -> Recall:
    """One number hidden at `depth` (anywhere, if None) and asked for at the end."""
    key = number(rng, digits)
    at = float(rng.random()) if depth is None else depth
    return Recall(
        ((at, f"\n\nThe pass key is {key}. Remember it: the pass key is {key}.\n\n"),), (("\n\nThe pass key is ", key),)
    )


def key_values(rng: np.random.Generator, count: int, asked: int | None = None, digits: int = 4) -> Recall:
    """`count` named numbers strewn over the text, then `asked` of them (all, if None) in another order."""
    names = rng.choice(KEYS, size=count, replace=False)
    values = {str(name): number(rng, digits) for name in names}
    facts = tuple((float(rng.random()), f"\n\nThe number of the {name}: {value}.\n\n") for name, value in values.items())
    order = rng.permutation(names)[:asked]
    return Recall(facts, tuple((f"\n\nThe number of the {name}: ", values[str(name)]) for name in order))


def lay_out(task: Recall, filler: Sequence[int], length: int, encode: Encode, bos: int | None, answered: bool) -> list[int]:
    """`length` tokens: BOS (where the tokenizer has one), filler with the facts in it, the questions; the last answer only if `answered`.

    All questions but the last are answered in the text, as a reader would have done.
    """
    tail: list[int] = []
    for index, (question, answer) in enumerate(task.questions):
        tail += encode(question)
        if answered or index < len(task.questions) - 1:
            tail += encode(answer + ".")
    facts = [(depth, list(encode(text))) for depth, text in sorted(task.facts)]
    out = [] if bos is None else [bos]
    room = length - len(out) - len(tail) - sum(len(ids) for _, ids in facts)
    if room < 0:
        raise ValueError(f"{length} tokens are too few for this task: it needs at least {length - room}")
    if len(filler) < room:
        raise ValueError(f"the filler has {len(filler)} tokens, {room} are needed")
    used = 0
    for depth, ids in facts:
        upto = round(depth * room)
        out += [*filler[used:upto], *ids]
        used = max(used, upto)
    return [*out, *filler[used:room], *tail]


def copying(rng: np.random.Generator, filler: Sequence[int], length: int, bos: int) -> list[int]:
    """A string of unrelated tokens, all different, over and over: only copying predicts its second round."""
    period = int(rng.integers(4, length // 2 + 1))
    string = rng.permutation(np.unique(filler))[:period]
    return [bos, *np.resize(string, length - 1).tolist()]


def repeated_passage(rng: np.random.Generator, filler: Sequence[int], length: int, bos: int) -> list[int]:
    """A passage of a book, other text, and the passage again."""
    size = int(rng.integers(length // 8, length // 3))
    first = int(rng.integers(0, length - 2 * size))
    second = int(rng.integers(first + size, length - size))
    out = [bos, *filler[: length - 1]]
    out[second : second + size] = out[max(first, 1) : max(first, 1) + size]
    return out[:length]


def training_window(rng: np.random.Generator, filler: Sequence[int], length: int, encode: Encode, bos: int) -> list[int]:
    """One window of `length` tokens holding one of the four tasks; short ones only copy."""
    kind = rng.choice(4, p=[0.35, 0.35, 0.15, 0.15]) if length >= 96 else 2
    if kind == 0:
        return lay_out(pass_key(rng), filler, length, encode, bos, answered=True)
    if kind == 1:
        most = min(16, length // 32 - 1)
        return lay_out(key_values(rng, int(rng.integers(1, most + 1))), filler, length, encode, bos, answered=True)
    return (copying if kind == 2 else repeated_passage)(rng, filler, length, bos)
