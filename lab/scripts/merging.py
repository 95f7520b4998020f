"""Whether what leaves is worth merging into what stays: perplexity and divergence on books, at equal bytes.

    python lab/scripts/merging.py --books dev.tar.xz --out results/merging/smollm2.json

A prompt of 768 tokens is read at once and cut to the budget; 252 more are read, four at a time, and four leave for them. H2O says who:
half of the budget is for the newest, the others stay by the attention that they got. What leaves is dropped (`evict`), or merged:

    cam         its value is added to those of the 16 tokens behind it, a sixteenth to each, with a probability by attention (CaM, 2024)
    d2o         key and value go into the most similar key's, weighed by exp(cosine), if that reaches a moving threshold (D2O, 2024)
    d2o_values  the same, but keys stay as they were
    votes       means of all that went into a slot, under D2O's threshold; a slot's logit rises by the log of how many they are (as KeepKV)

Two more keep everything and attend to a part of it, for MagicPIG (2024): `sampled` draws tokens by how probably a hash of theirs meets
the query's, and weighs them by the inverse; `topk` attends to equally many, the best by their true scores. Both attend to the first 4
and the last 64 as well. A draw is independent for each token, with the probability that hashing would have.

Every figure is paired: all variants read the same windows, as many of each book. The model's own forward is written out here, so that this
script needs nothing of kvdsl's caches, which it judges.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import log_softmax, normalize, softmax
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import kvdsl
from kvdsl.environment import environment

PROMPT, LENGTH, STEP = 768, 1024, 4
"""How much is read at once at first, and in all, and how much at a time after that."""
MERGED_INTO = 16
"""Tokens that CaM spreads a value over, as its authors' code has it."""
MEMORY = 0.3
"""How much of D2O's threshold is kept at each step, as its authors' code has it."""
BITS, TABLES, SINKS, RECENT = 10, 150, 4, 64
"""MagicPIG's hashing, and what it always attends to."""
DRAWS = 4000


@dataclass
class Layer:
    """What one layer holds: [rows, heads, slots, dim] and [rows, heads, slots]; the last slots are for the newest tokens."""

    k: Tensor
    v: Tensor
    place: Tensor
    got: Tensor
    votes: Tensor
    threshold: Tensor = field(default_factory=lambda: torch.empty(0))
    centre: Tensor = field(default_factory=lambda: torch.empty(0))


Merge = Callable[[Layer, Tensor, Tensor, bool], None]
"""Merges victims [rows, heads, n] into slots that stay, by a mask [rows, heads, slots]; whether they are the prompt's."""


def pick(x: Tensor, index: Tensor) -> Tensor:
    """Slots of x, [rows, heads, n, dim], by their numbers [rows, heads, n]."""
    return x.gather(2, index[..., None].expand(*index.shape, x.shape[-1]))


def evict(layer: Layer, victims: Tensor, stay: Tensor, prompt: bool) -> None:
    """Drops them."""


def cam(layer: Layer, victims: Tensor, stay: Tensor, prompt: bool) -> None:
    """CaM, which merges while text is generated."""
    for victim in () if prompt else victims.split(1, -1):
        behind = stay & (layer.place > layer.place.gather(2, victim))
        targets = torch.where(behind, layer.place, LENGTH).topk(MERGED_INTO, largest=False).indices
        real = behind.gather(2, targets)
        count = real.sum(-1, keepdim=True).clamp(min=1)
        mean = (layer.got.gather(2, targets) * real).sum(-1, keepdim=True) / count
        merged = torch.bernoulli((layer.got.gather(2, victim) / mean).nan_to_num(0, 1).clamp(0, 1))
        share = (pick(layer.v, victim) * (merged / count)[..., None]).expand(-1, -1, MERGED_INTO, -1) * real[..., None]
        layer.v.scatter_add_(2, targets[..., None].expand_as(share), share)


def nearest(layer: Layer, victims: Tensor, stay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each victim the most similar key that stays, the cosine, and whether that reaches the threshold, which moves."""
    cosine = normalize(pick(layer.k, victims), dim=-1) @ normalize(layer.k, dim=-1).transpose(-1, -2)
    best, target = cosine.masked_fill(~stay[:, :, None], -2).max(-1)
    mean = best.mean(-1, keepdim=True)
    first = layer.threshold.numel() == 0
    layer.threshold = mean if first else MEMORY * layer.threshold + (1 - MEMORY) * mean
    return target, best, best >= layer.threshold


def d2o(layer: Layer, victims: Tensor, stay: Tensor, prompt: bool) -> None:
    """D2O's weighted merge."""
    target, cosine, enough = nearest(layer, victims, stay)
    weight = torch.exp(cosine) * enough
    _mean_into(layer, victims, target, weight, torch.full_like(layer.votes, math.e), keys=True)


def d2o_values(layer: Layer, victims: Tensor, stay: Tensor, prompt: bool) -> None:
    """The same for values alone."""
    target, cosine, enough = nearest(layer, victims, stay)
    _mean_into(layer, victims, target, torch.exp(cosine) * enough, torch.full_like(layer.votes, math.e), keys=False)


def votes(layer: Layer, victims: Tensor, stay: Tensor, prompt: bool) -> None:
    """A slot is the mean of its tokens and counts as many."""
    target, _, enough = nearest(layer, victims, stay)
    weight = layer.votes.gather(2, victims) * enough
    _mean_into(layer, victims, target, weight, layer.votes, keys=True)
    layer.votes.scatter_add_(2, target, weight)


def _mean_into(layer: Layer, victims: Tensor, target: Tensor, weight: Tensor, own: Tensor, keys: bool) -> None:
    """Slots become means of what they are, weighed by `own`, and what goes into them."""
    total = own.scatter_add(2, target, weight)[..., None]
    for x in (layer.k, layer.v) if keys else (layer.v,):
        into = target[..., None].expand(*target.shape, x.shape[-1])
        x.copy_((x * own[..., None]).scatter_add(2, into, pick(x, victims) * weight[..., None]) / total)


MERGES: dict[str, Merge] = {"evict": evict, "cam": cam, "d2o": d2o, "d2o_values": d2o_values, "votes": votes}


class Whole:
    """A cache that holds everything, and notes what the prompt's tokens got from its queries."""

    def __init__(self) -> None:
        self.layers: dict[int, Layer] = {}

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """The outputs of queries [rows, heads, group, tokens, dim]; the tokens' keys and values are [rows, heads, tokens, dim]."""
        tokens, got = k.shape[2], torch.zeros(k.shape[:3])
        out = torch.empty_like(q)
        for row in range(len(k)):  # one at a time, so that probabilities fit into memory
            logits = torch.einsum("hgtd,hsd->hgts", q[row], k[row]) * scaling
            probs = softmax(logits + ahead(tokens, tokens), -1)
            got[row] = probs[:, :, :PROMPT].mean(1).sum(1)
            out[row] = torch.einsum("hgts,hsd->hgtd", probs, v[row])
        self.layers[index] = Layer(
            *(x[:, :, :PROMPT].clone() for x in (k, v)),
            torch.arange(PROMPT).expand(*k.shape[:2], -1).clone(), got[:, :, :PROMPT], torch.ones(*k.shape[:2], PROMPT),
        )  # fmt: skip
        return out


class Evicting:
    """A cache of `budget` slots a head, from which H2O evicts, in one of the ways above; the prompt has been read."""

    def __init__(self, merge: Merge, budget: int, prompt: Whole) -> None:
        self.merge, self.budget = merge, budget
        self.layers = {index: self._cut(layer) for index, layer in prompt.layers.items()}

    def _cut(self, prompt: Layer) -> Layer:
        """What stays of the prompt, and slots for the next tokens."""
        layer = replace(prompt, k=prompt.k.clone(), v=prompt.v.clone(), votes=prompt.votes.clone())
        free = layer.place < PROMPT - self.budget // 2
        victims = layer.got.masked_fill(~free, math.inf).topk(PROMPT - self.budget, largest=False).indices
        stay = torch.ones_like(free).scatter(2, victims, False)
        self.merge(layer, victims, stay, True)
        kept = stay.nonzero()[:, 2].view(*free.shape[:2], self.budget)
        room = torch.cat([kept, kept[..., :STEP]], -1)
        place, got, votes = (x.gather(2, room) for x in (layer.place, layer.got, layer.votes))
        return Layer(pick(layer.k, room), pick(layer.v, room), place, got, votes, layer.threshold)

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """As `Whole.attend`, of the next tokens."""
        layer = self.layers[index]
        layer.k[:, :, -STEP:], layer.v[:, :, -STEP:] = k, v
        layer.place[:, :, -STEP:] = layer.place[:, :, :-STEP].amax(-1, keepdim=True) + 1 + torch.arange(STEP)
        layer.got[:, :, -STEP:], layer.votes[:, :, -STEP:] = 0, 1
        logits = torch.einsum("bhgtd,bhsd->bhgts", q, layer.k) * scaling + layer.votes.log()[:, :, None, None]
        probs = softmax(logits + ahead(STEP, logits.shape[-1]), -1)
        layer.got += probs.mean(2).sum(2)
        out = torch.einsum("bhgts,bhsd->bhgtd", probs, layer.v)
        self._settle(layer)
        return out

    def _settle(self, layer: Layer) -> None:
        """As many leave as have come, and these take their slots."""
        free = layer.place <= layer.place[:, :, -1:] - self.budget // 2
        victims = layer.got.masked_fill(~free, math.inf).topk(STEP, largest=False).indices
        stay = torch.ones_like(free).scatter(2, victims, False)
        self.merge(layer, victims, stay, False)
        for x in (layer.k, layer.v):
            x.scatter_(2, victims[..., None].expand(*victims.shape, x.shape[-1]), x[:, :, -STEP:].clone())
        for y in (layer.place, layer.got, layer.votes):
            y.scatter_(2, victims, y[:, :, -STEP:].clone())


class Selecting:
    """A cache that holds everything and attends to a part of it: the `count` best, or what is drawn, if that is None."""

    def __init__(self, count: int | None, prompt: Whole) -> None:
        self.count = count
        self.layers = {
            index: replace(layer, centre=layer.k[:, :, SINKS:].mean(2, keepdim=True))
            for index, layer in prompt.layers.items()
        }
        self.attended: list[float] = []

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """As `Whole.attend`, of the next tokens."""
        layer = self.layers[index]
        layer.k, layer.v = torch.cat([layer.k, k], 2), torch.cat([layer.v, v], 2)
        logits = torch.einsum("bhgtd,bhsd->bhgts", q, layer.k) * scaling
        logits = logits + ahead(q.shape[3], logits.shape[-1])
        slots = torch.arange(layer.k.shape[2])
        always = (slots < SINKS) | (slots >= len(slots) - RECENT)
        if self.count is None:
            logits = logits - torch.where(always, 0.0, self._odds(layer, q))
        else:
            best = torch.where(always & logits.isfinite(), math.inf, logits).topk(self.count, -1).indices
            logits = torch.full_like(logits, -math.inf).scatter(-1, best, logits.gather(-1, best))
        self.attended.append(logits.isfinite().sum(-1).double().mean().item())
        return torch.einsum("bhgts,bhsd->bhgtd", softmax(logits, -1), layer.v)

    def _odds(self, layer: Layer, q: Tensor) -> Tensor:
        """The log of how probably each is drawn, inf for those that are not: two of the tables have to give the query's code."""
        cosine = torch.einsum("bhgtd,bhsd->bhgts", normalize(q, dim=-1), normalize(layer.k - layer.centre, dim=-1))
        same = (1 - torch.arccos(cosine.clamp(-1, 1)) / math.pi) ** BITS
        none, one = (1 - same) ** TABLES, TABLES * same * (1 - same) ** (TABLES - 1)
        odds = (1 - none - one).clamp(1e-6, 1)
        return torch.where(torch.rand_like(odds) < odds, odds.log(), math.inf)


def ahead(tokens: int, slots: int) -> Tensor:
    """What the last slots are to the last tokens, [tokens, slots]: minus infinity for what comes after a token."""
    return torch.full((tokens, slots), -math.inf).triu(slots - tokens + 1)


def forward(model: Any, ids: Tensor, start: int, attend: Callable[..., Tensor]) -> Tensor:
    """Hidden states [rows, tokens, size] behind the last norm, of a Llama whose attention is `attend`."""
    hidden = model.model.embed_tokens(ids)
    cos, sin = model.model.rotary_emb(hidden, torch.arange(start, start + ids.shape[1])[None])
    for index, block in enumerate(model.model.layers):
        attention, x = block.self_attn, block.input_layernorm(hidden)
        heads = (ids.shape[0], ids.shape[1], -1, attention.head_dim)
        q, k, v = (one(x).view(heads).transpose(1, 2) for one in (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        out = attend(index, q.unflatten(1, (k.shape[1], -1)), k, v, attention.scaling)
        hidden = hidden + attention.o_proj(out.flatten(1, 2).transpose(1, 2).flatten(2))
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
    return model.model.norm(hidden)


def read(model: Any, ids: Tensor, cache: Evicting | Selecting, whole: Tensor) -> dict[str, list[float]]:
    """For each window the mean loss of what is read behind the prompt, and the divergence from the full cache's distributions."""
    loss, divergence = torch.zeros(len(ids)), torch.zeros(len(ids))
    for start in range(PROMPT, LENGTH - STEP, STEP):
        told = log_softmax(model.lm_head(forward(model, ids[:, start : start + STEP], start, cache.attend)), -1)
        full = whole[:, start - PROMPT : start - PROMPT + STEP]
        loss -= told.gather(2, ids[:, start + 1 : start + 1 + STEP, None]).sum((1, 2))
        divergence += (full.exp() * (full - told)).sum((1, 2))
    tokens = LENGTH - STEP - PROMPT
    return {"loss": (loss / tokens).tolist(), "kl": (divergence / tokens).tolist()}


def windows(archive: Path, tokenizer: Any, turns: int) -> tuple[list[str], Tensor]:
    """`turns` windows of each book, evenly spread: the books' names, window by window, and [windows, LENGTH]."""
    with tarfile.open(archive, "r:xz") as tar:
        members = sorted(
            (one for one in tar.getmembers() if one.isfile() and one.name.endswith(".txt")), key=lambda one: one.name
        )
        texts = {Path(one.name).stem: tar.extractfile(one).read().decode() for one in members}  # type: ignore[union-attr]
    names, found = [], []
    for turn in range(turns):
        for name, text in texts.items():
            middle = len(text) * (turn + 1) // (turns + 1)
            names.append(name)
            found.append(tokenizer(text[middle : middle + 12 * LENGTH], return_tensors="pt").input_ids[0, :LENGTH])
    return names, torch.stack(found)


def interval(differences: np.ndarray, seed: int) -> list[float]:
    """The middle 95 % of the means of bootstrap draws."""
    rng = np.random.default_rng(seed)
    means = differences[rng.integers(0, len(differences), (DRAWS, len(differences)))].mean(axis=1)
    return [round(float(x), 5) for x in np.quantile(means, [0.025, 0.975])]


def compared(rows: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """Each variant's means, and how far it is behind the first one of its budget."""
    made = []
    for row in rows:
        base = next(one for one in rows if one["budget"] == row["budget"])
        line = {"variant": row["variant"], "budget": row["budget"], "windows": len(row["loss"])}
        line |= {"perplexity": round(math.exp(np.mean(row["loss"])), 3), "kl": round(float(np.mean(row["kl"])), 4)}
        if "attended" in row:
            line["attended"] = round(float(np.mean(row["attended"])), 1)
        for measure in ("loss", "kl"):
            behind = np.array(row[measure]) - np.array(base[measure])
            line[f"{measure}_behind_{base['variant']}"] = [round(float(behind.mean()), 5), *interval(behind, seed)]
        made.append(line)
    return made


def judged(ids: Tensor, budgets: list[int], seed: int) -> list[dict[str, Any]]:
    """What every variant makes of some windows, [windows, LENGTH]; in a process of its own."""
    torch.set_num_threads(1)
    model, rows = kvdsl.load_model("smollm2")[0], []
    with torch.inference_mode():
        prompt = Whole()
        hidden = forward(model, ids, 0, prompt.attend)[:, PROMPT : LENGTH - STEP]
        whole = log_softmax(model.lm_head(hidden), -1)
        loss = -whole.gather(2, ids[:, PROMPT + 1 : LENGTH - STEP + 1, None])[..., 0].mean(1)
        rows.append({"variant": "full", "budget": LENGTH, "loss": loss.tolist(), "kl": [0.0] * len(ids)})
        for variant, budget in [(name, budget) for budget in budgets for name in MERGES]:
            torch.manual_seed(seed)
            found = read(model, ids, Evicting(MERGES[variant], budget, prompt), whole)
            rows.append({"variant": variant, "budget": budget, **found})
            print(variant, budget, np.mean(found["loss"]), np.mean(found["kl"]), flush=True)
        torch.manual_seed(seed)
        count = None
        for variant in ("sampled", "topk"):
            cache = Selecting(count, prompt)
            found = read(model, ids, cache, whole)
            count = round(float(np.mean(cache.attended)))
            rows.append({"variant": variant, "budget": None, **found, "attended": [count] * len(ids)})
            print(variant, count, np.mean(found["loss"]), np.mean(found["kl"]), flush=True)
    return rows


def main() -> None:
    """Shares the windows out among processes, and writes what they found as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--books", type=Path, required=True, help="an archive of texts, .tar.xz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budgets", default="128,256", help="of what is evicted from; none: attending to a part alone")
    parser.add_argument("--turns", type=int, default=1, help="windows of each book")
    parser.add_argument("--rows", type=int, default=5, help="windows that are read together")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    names, ids = windows(given.books, kvdsl.load_model("smollm2")[1], given.turns)
    budgets, began = [int(one) for one in given.budgets.split(",") if one], time.perf_counter()
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn")) as pool:
        parts = ids.split(given.rows)
        found = pool.map(judged, parts, [budgets] * len(parts), [given.seed + part for part in range(len(parts))])
        for some in found:
            rows = [_joined(old, new) for old, new in zip(rows, some, strict=True)] if rows else some
            _write(given, names[: len(rows[0]["loss"])], rows, time.perf_counter() - began)


def _joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The same variant of more windows."""
    return {key: value + new[key] if isinstance(value, list) else value for key, value in old.items()}


def _write(given: argparse.Namespace, books: list[str], rows: list[dict[str, Any]], seconds: float) -> None:
    setup = {
        "model": "smollm2", "prompt": PROMPT, "length": LENGTH, "step": STEP, "books": books, "merged_into": MERGED_INTO, "memory": MEMORY,
        "bits": BITS, "tables": TABLES, "sinks": SINKS, "recent": RECENT, "draws": DRAWS, "seed": given.seed,
    }  # fmt: skip
    result = {
        "environment": environment(dtype="float32", seed=given.seed),
        "setup": setup,
        "seconds": round(seconds, 1),
        "table": compared(rows, given.seed),
        "windows": rows,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
