"""Which tokens stay: a policy on recorded attention, by the reference interpreter, in a web worker of its own. What it answers is JSON.

The recording is what scripts/make_recording.py made. The first tokens of its page are a prompt, the others come one by one, each with
the query that the model had under the full cache: what would change in later layers, once tokens are gone, is not seen here.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from kvdsl.budget import as_written, tokens_or_rate
from kvdsl.compiler import analyse
from kvdsl.errors import KvdslError
from kvdsl.interp import Call, Rope, Text, attend
from kvdsl.interp.attention import over_group
from kvdsl.interp.evaluate import Array
from kvdsl.ir.nodes import Policy
from kvdsl.source import SourceFile

HERE = Path(__file__).resolve().parent
PATIENCE = 0.2
"""Seconds after which a run shows what it has, and the worker can hear a newer question."""


LACKS: tuple[type[Exception], ...] = (np.LacksError, TypeError) if hasattr(np, "LacksError") else ()
"""What the stand-in for NumPy raises where the interpreter asks for more than it has, or with other arguments; NumPy itself has all."""


class CannotRunError(Exception):
    """What keeps a policy from being run here, in a sentence."""


@lru_cache
def about() -> dict[str, Any]:
    """The recording without its numbers."""
    found: dict[str, Any] = json.loads((HERE / "recording.json").read_text(encoding="utf-8"))
    return found


@lru_cache(maxsize=16)
def head_of(layer: int, head: int) -> tuple[Array, Array, Array]:
    """A KV head's queries [tokens, group, dim], keys and values [tokens, dim], as they were packed; `layer` is a recorded one."""
    group, dim, tokens = about()["group"], about()["dim"], len(about()["tokens"])
    size, each = dim * (4 + tokens), group + 2
    start = (about()["layers"].index(layer) * about()["heads"] + head) * each * size
    with (HERE / "recording.bin").open("rb") as file:
        file.seek(start)
        *queries, key, value = (_unpacked(file.read(size), dim) for _ in range(each))
    return (
        np.stack([np.array([query[token] for query in queries]) for token in range(tokens)]),
        np.array(key),
        np.array(value),
    )


def _unpacked(data: bytes, dim: int) -> list[list[float]]:
    """Vectors, from their scales and whole numbers."""
    scales = struct.unpack(f"<{dim}f", data[: 4 * dim])
    whole = struct.unpack(f"{len(data) - 4 * dim}b", data[4 * dim :])
    return [[x * scale for x, scale in zip(whole[at : at + dim], scales)] for at in range(0, len(whole), dim)]  # noqa: B905


@lru_cache(maxsize=512)
def attention(layer: int, head: int, token: int) -> list[float]:
    """What the query of a token gives each token up to itself under the full cache, the mean over the group."""
    given: list[float] = over_group(_of_query_heads(layer, head, token), "mean").tolist()
    return given


def _of_query_heads(layer: int, head: int, token: int) -> Array:
    """The same of each query head, [group, tokens]."""
    query, key, value = head_of(layer, head)
    seen = np.arange(token + 1)
    return attend(key[: token + 1], value[: token + 1, :0], seen, query[token], token, Call(about()["scaling"])).probs


# -- a run -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A request.

    Attributes:
        text: the policy.
        layer, head: of the model.
        prompt: the tokens that come at once.
        params: values by name, as they are written, for those of them that the policy has.
    """

    text: str
    layer: int
    head: int
    prompt: int
    params: dict[str, str] = field(default_factory=dict)


def run(asked: Asked) -> Iterator[dict[str, Any]]:
    """Yield which tokens stayed, now and then during the run and at its end.

    `known` tokens have been read, `done` is their share of all, and the `first` are the prompt. `left` says of each token after whose query
    it was gone, or null; `read` of each query after the prompt which tokens it attended to, or null where that is all that was there;
    `lost` what it gave, under the full cache, to tokens that it did not attend to here; `alone` whether the head decides by itself.

    Raises:
        CannotRunError: if the policy needs what is not there.
    """
    policy = _policy(asked.text)
    alone = policy.victims == "own" and not policy.heads_share
    heads = [asked.head] if alone else list(range(about()["heads"]))
    text = _text(policy, asked, heads)
    parts = [head_of(asked.layer, head) for head in heads]
    q, k, v = (np.stack(one) for one in zip(*parts, strict=True))
    own, tokens, said = heads.index(asked.head), len(about()["tokens"]), monotonic()
    left: list[int | None] = [None] * tokens
    read: list[list[int]] = []
    lost: list[float] = []
    found = {
        "name": policy.name,
        "first": asked.prompt,
        "alone": alone,
        "left": left,
        "read": None if policy.select is None else read,
        "lost": lost,
    }
    yield found | {"known": 0, "done": 0.0}
    for first in (0, *range(asked.prompt, tokens)):
        end = first + 1 if first else asked.prompt
        step = text.forward(q[:, first:end], k[:, first:end], v[:, first:end])[own]
        for position in step.evicted.tolist():
            left[position] = end - 1
        if first:
            reads = [sorted(there.tolist()) for there in step.reads]
            read.append(sorted({position for there in reads for position in there}))
            lost.append(_lost(asked, first, reads))
        if end == tokens or monotonic() - said > PATIENCE:
            yield found | {"known": end, "done": end / tokens}
            said = monotonic()


def _lost(asked: Asked, token: int, reads: list[list[int]]) -> float:
    """What the query of a token gave to those that it did not attend to, or on average each of its query heads."""
    one = len(reads) == 1
    given = [attention(asked.layer, asked.head, token)] if one else _of_query_heads(asked.layer, asked.head, token).tolist()
    shares = [sum(row[position] for position in there) for row, there in zip(given, reads, strict=True)]
    return max(0.0, 1 - sum(shares) / len(shares))


def _policy(text: str) -> Policy:
    analysis = analyse(SourceFile("policy.kv", text))
    if not analysis.policies:
        raise CannotRunError("The policy has errors.")
    policy = analysis.policies[0]
    if policy.tensors:
        raise CannotRunError("This policy reads tensors from files, which this page does not have.")
    wanted = [given.name for given in policy.given if given.default is None]
    if wanted:
        raise CannotRunError(f"The caller has to give this policy `{wanted[0]}`, which was not recorded.")
    untold = [given.name for given in policy.given if given.source in ("spans", "token")]
    if untold:
        raise CannotRunError(f"This policy reads `{untold[0]}`: the recorded text has no spans, and its tokens no ids.")
    if policy.victims == "layers" or policy.across_layers is not None or policy.reuses:
        raise CannotRunError("Under this policy all layers decide together, and not all of them were recorded.")
    return policy


def _text(policy: Policy, asked: Asked, heads: list[int]) -> Text:
    rope = about()["rope"]
    call = Call(about()["scaling"], rope=Rope(np.array(rope["inv_freq"]), rope["pairing"], rope["offset"]))
    dim = about()["dim"]
    return Text(
        policy, _params(policy, asked), asked.layer, about()["all_layers"], key_dim=dim, value_dim=dim, call=call, heads=len(heads),
        head_offset=heads[0],
    )  # fmt: skip


def _params(policy: Policy, asked: Asked) -> dict[str, float | None]:
    """What is given of the policy's params."""
    written = {param.name: asked.params[param.name] for param in policy.params if param.name in asked.params}
    given: dict[str, float | None] = {name: as_written(float(value), value) for name, value in written.items()}
    try:
        return given | {
            name: tokens_or_rate(value) for name, value in given.items() if name == "budget" and value is not None
        }
    except ValueError as error:
        raise CannotRunError(f"The budget {error}.") from None


# -- for the worker ----------------------------------------------------------------------------------------------------

_runs: dict[str, Iterator[dict[str, Any]]] = {}


def page() -> str:
    """The recording without its numbers."""
    return json.dumps(about())


def begin(side: str, question: str) -> None:
    """Begin a run in place of the side's one before; `question` has the fields of `Asked`."""
    _runs[side] = run(Asked(**json.loads(question)))


def go_on(side: str) -> str:
    """Continue for a moment: what `run` yields, the last one with a `done` of 1, or {"error": why not}."""
    try:
        return json.dumps(next(_runs[side]))
    except CannotRunError as error:
        return json.dumps({"done": 1, "error": str(error)})
    except LACKS as error:
        return json.dumps(
            {"done": 1, "error": f"This page has no NumPy, and its stand-in cannot run this policy: it lacks {error}."}
        )
    except (KvdslError, ValueError, LookupError, ArithmeticError) as error:
        return json.dumps({"done": 1, "error": f"The reference interpreter refuses this: {error}"})


def answer(question: str) -> str:
    """The last of a whole run."""
    begin("", question)
    while True:
        found = go_on("")
        if json.loads(found)["done"] == 1:
            return found
